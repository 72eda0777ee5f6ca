"""The container's recipe, read as text: stages, user, health check, volume, and what is copied."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ropewalk.server.cli.options import OTHER_VARIABLES, variables
from ropewalk.server.cli.serve import serve
from tests.command_line import understood

ROOT = Path(__file__).parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) with comments dropped and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage name, in order; "" holds those before the first FROM."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for word, rest in instructions(text):
        if word == "FROM":
            name = rest.split()[-1]
            found[name] = []
        found[name].append((word, rest))
    return found


STAGES = stages((ROOT / "Dockerfile").read_text())
RUNTIME = list(STAGES.values())[-1]


def last(word: str) -> str:
    return next(rest for name, rest in reversed(RUNTIME) if name == word)


def environment() -> dict[str, str]:
    words = [word for name, rest in RUNTIME if name == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def test_two_stages_on_a_base_that_is_chosen() -> None:
    assert list(STAGES) == ["", "base", "build", "runtime"]
    assert STAGES[""] == [("ARG", "BASE=debian:bookworm-slim")]
    assert STAGES["base"][0] == ("FROM", "${BASE} AS base")
    assert ("COPY", "--from=build /opt/ropewalk /opt/ropewalk") in RUNTIME
    assert "nvidia/cuda:" in (ROOT / "Dockerfile").read_text()


def test_runs_as_an_ordinary_user_in_group_0() -> None:
    assert last("USER") == "10001:0"
    order = [word for word, _ in RUNTIME]
    assert order.index("USER") > max(i for i, word in enumerate(order) if word in ("RUN", "COPY"))


def test_cache_is_on_a_volume_the_user_may_write() -> None:
    volume = last("VOLUME")
    assert environment()["ROPEWALK_HOME"] == volume
    assert environment()["HF_HOME"].startswith(volume + "/")
    made = next(rest for word, rest in RUNTIME if word == "RUN")
    assert f"install --directory --owner 10001 --group 0 --mode 0775 {volume}" in made


def test_health_check_is_the_commands_own() -> None:
    check = last("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command == ["ropewalk", "health"]
    asked = understood(*command[1:])
    assert asked.info_name == "health"
    given = float(re.search(r"--timeout=(\d+)s", check)[1])
    assert asked.params["timeout"] < given  # the command gives its reason before it is cut off
    assert "curl" not in check


def test_starts_the_server_on_every_address() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["tini", "--", "ropewalk"]
    assert understood(*json.loads(last("CMD"))).info_name == "serve"
    assert environment()["ROPEWALK_HOST"] == "0.0.0.0"


def test_variables_are_ones_that_ropewalk_reads() -> None:
    known = variables([serve]) | set(OTHER_VARIABLES)
    own = {name for name in environment() if name.startswith("ROPEWALK_")}
    assert own
    assert own <= known


def test_compiler_is_in_the_image_that_serves() -> None:
    """The CPU kernels are compiled for the processor that runs them."""
    assert RUNTIME[0] == ("FROM", "base AS runtime")
    assert any("install" in rest and " g++ " in rest for _, rest in STAGES["base"])


def ignored(path: str) -> bool:
    """.dockerignore: the last pattern that matches decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = [pattern, f"{pattern}/*", pattern.removeprefix("**/"), f"{pattern}/**"]
        if any(fnmatch(path, part) for part in parts):
            out = not line.startswith("!")
    return out


def copied() -> list[str]:
    words = [rest.split() for word, rest in STAGES["build"] if word == "COPY"]
    return [source for line in words for source in line[:-1]]


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_exists_and_reaches_the_build(source: str) -> None:
    assert (ROOT / source).exists()
    assert not ignored(source)


def test_everything_the_package_needs_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    linked = {path.name for path in (ROOT / "ropewalk").iterdir() if path.is_symlink()}
    assert len(linked) == 4
    needed = {"ropewalk", "pyproject.toml", *project["license-files"]}
    assert linked | needed == set(copied())


def test_everything_that_is_not_python_is_installed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["packages"]["find"]["include"] == ["ropewalk*"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, data in setup["package-data"].items()
        for pattern in data
    ]
    sources = sorted((ROOT / "model").rglob("*.[ch]pp"))
    weights = [path for path in (ROOT / "model/family/weights").rglob("*") if path.is_file()]
    assert sources and weights
    for path in (*sources, *weights):
        inside = f"ropewalk/{path.relative_to(ROOT).as_posix()}"
        assert any(fnmatch(inside, pattern) for pattern in patterns)


def test_nothing_else_reaches_the_build() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/test_container.py", "docs/x.md"):
        assert ignored(path)
    assert ignored("server/__pycache__/cli.cpython-311.pyc")


def test_torch_is_found_in_the_project_file() -> None:
    """The layer for torch cuts its requirement out of pyproject.toml with sed."""
    pattern = re.compile(r'^ *"(torch[><=][^"]*)",*$', re.MULTILINE)
    found = pattern.findall((ROOT / "pyproject.toml").read_text())
    assert len(found) == 1
    assert any("torch[><=]" in rest for word, rest in STAGES["build"] if word == "RUN")
