"""What the documents name exists: links, files, modules, scripts, flags, paths and error codes."""

import os
import re
import shlex
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from ropewalk.server.errors import ServeError
from tests.command_line import understood
from tests.server.toy import toy_app

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "model" / "family" / "MODEL_CARD.md"]
FOLDERS = (
    *("cache", "deploy", "docs", "load_tests", "model", "ropewalk", "scripts", "server", "tests"),
)
SOURCES = [
    path for top in FOLDERS for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts
]
OF_OTHER_TIMES = {"CHANGELOG.md", "measurements.md"}  # they name what there was
# Files that a reader of docs/architecture.md is told to add.
ADDED = {"model/encodings/kerple.py", "model/architectures/starcoder2.py", "model/kernels/flat.py"}
# Flags of other programs: containers, conversions to other formats, kubectl.
FOREIGN = {
    *("--allow-requantize", "--build", "--file", "--filename", "--gpus", "--group-size"),
    *("--kv-event-block-size", "--no-router-track-active-blocks"),
    *("--router-kv-overlap-score-credit", "--router-predicted-ttl-secs"),
    *("--kustomize", "--outfile", "--outtype", "--ratio", "--rm", "--secure-serving", "--target"),
    *("--stop-timeout", "--task", "--tasks", "--weight-format"),
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_files_exist(page: Path) -> None:
    tops = "|".join(FOLDERS)
    paths = re.findall(rf"(?<![\w./-])(?:{tops})/[\w./-]*\w", text_of(page))
    wanted = {path for path in paths if "DEVICE" not in path} - ADDED
    assert {path for path in wanted if not (ROOT / path).exists()} == set()
    own = set(re.findall(r"Saved as `(\w+\.py)`", text_of(page)))
    names = set(re.findall(r"(?<![\w/])\w+\.py\b", text_of(page)))
    assert names - own - {Path(path).name for path in (*SOURCES, *ADDED)} == set()


@each_page
def test_programs_exist(page: Path) -> None:
    modules = set(re.findall(r"python3? -m ([\w.]+)", text_of(page)))
    modules -= {"dynamo.frontend"}  # which needs more than the tests have
    assert [name for name in modules if find_spec(name) is None] == []
    for script in set(re.findall(r"(?<![\w./-])scripts/[\w-]+", text_of(page))):
        assert os.access(ROOT / script, os.X_OK), script


@pytest.fixture(scope="module")
def named() -> set[str]:
    """Flags in sources of ours, their negatives, and the variables that are made of them."""
    texts = [path.read_text() for path in SOURCES if path.suffix in ("", ".py") and path.is_file()]
    texts.append(text_of(ROOT / "docs" / "configuration.md"))  # generated
    names = r"--[a-z][a-z0-9-]+|\bROPEWALK_[A-Z_]+\b"
    found = set(chain.from_iterable(re.findall(names, text) for text in texts))
    return found | {flag.replace("--", "--no-", 1) for flag in found}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in OF_OTHER_TIMES], ids=lambda page: page.name
)
def test_flags_and_variables_exist(page: Path, named: set[str]) -> None:
    ours = re.sub(r"^AIPERF/(?:.*\\\n)*.*", "", text_of(page), flags=re.M)
    told = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+|\bROPEWALK_[A-Z_]+\b", ours)
    assert set(told) - named - FOREIGN == set()


def commands(page: Path) -> list[str]:
    """Those of `ropewalk` in the page's blocks of code, without the environment before them."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text_of(page), re.M | re.S))
    found = re.findall(r"^(?:\w+=\S* )*\.venv/bin/ropewalk (.*?)(?: &)?$", blocks, re.M)
    return [command for command in found if not command.startswith("bench")]  # many parsers


@pytest.mark.parametrize("command", sorted({each for page in PAGES for each in commands(page)}))
def test_commands_are_understood(command: str) -> None:
    assert understood(*shlex.split(command, comments=True))


def errors(kind: type[ServeError]) -> set[tuple[str, str]]:
    """(status, code) of everything that is derived from it."""
    found = {(str(kind.status), kind.code)} if kind is not ServeError else set()
    return found.union(*map(errors, kind.__subclasses__()))


def test_every_error_is_in_the_docs_and_no_other() -> None:
    rows = re.findall(r"^\|(\d{3})\|(.*?)\|", text_of(ROOT / "docs" / "http.md"), re.M)
    assert {(of, code) for of, codes in rows for code in re.findall(r"`(\w+)`", codes)} == errors(
        ServeError
    )
    named = {pair for page in PAGES for pair in re.findall(r"\b([45]\d\d) `(\w+)`", text_of(page))}
    assert named <= errors(ServeError)


def test_every_path_is_in_the_docs_and_no_other() -> None:
    described = toy_app().openapi()["paths"]
    served = {
        f"{method.upper()} {path}" for path, methods in described.items() for method in methods
    }
    optional = {"GET /v1/encodings", "GET /v1/cache", "POST /v1/cache/plan", "POST /v1/cache/flush"}
    optional |= {"GET /v1/cache/stream", "POST /v1/models/load", "POST /v1/models/unload"}
    kept = "/v1/cache/sequences"
    optional |= {f"POST {kept}", f"GET {kept}", f"GET {kept}/{{id}}", f"DELETE {kept}/{{id}}"}
    optional |= {f"POST {kept}/{{id}}/operations"}
    paths = re.findall(r"`((?:GET|POST|DELETE) /\S*)`", text_of(ROOT / "docs" / "http.md"))
    assert len(paths) == len(set(paths))
    assert served <= set(paths) <= served | optional
