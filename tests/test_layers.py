"""The house keeps its shape: who may import whom, where torch may not go, and what nobody does.

Reads syntax trees; imports none of the packages, but once starts a server to see what it imports.
Each rule is also shown to fail on planted code.
"""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.server.follow import on_the_way

ROOT = Path(__file__).parents[1]
MAX_FILES = 16  # in a room
# Of `ropewalk serve`: the files that it imports, those in server/ that run from socket to streamed
# token, and all on that way, the forward pass being one; tests/server/follow.py lists them.
MAX_IMPORTED, MAX_IN_SERVER, MAX_ON_THE_WAY = 120, 22, 30
STUDIES = ("model/inspect/", "model/family/", "load_tests/")
PACKAGES = ("server", "model", "cache", "load_tests", "report")

ALLOWED = {  # what a package may import besides itself
    "server": {"model", "cache", "report"},
    "model": {"cache", "report"},
    "cache": set(),
    "load_tests": {"report"},
    "report": set(),
}
IN_PROCESS = (  # load tests in one process with what they measure, which they may import
    "load_tests/micro/engines.py",
    "load_tests/micro/events_cost.py",
    "load_tests/gpu/check.py",
    "load_tests/gpu/parts.py",
    "load_tests/gpu/peer.py",
    "load_tests/micro/few_bits.py",
    "load_tests/micro/in_process.py",
    "load_tests/micro/mask_cost.py",
    "load_tests/micro/measured.py",
    "load_tests/micro/profile_engine.py",
    "load_tests/micro/profile_http.py",
    "load_tests/micro/profile_step.py",
    "load_tests/micro/roofline.py",
    "load_tests/micro/scaling.py",
    "load_tests/micro/scaling_parts.py",
    "load_tests/micro/spill_cost.py",
    "load_tests/micro/step_cost.py",
    "load_tests/run/draft_gain.py",
)
LATE = {  # what few need, and is imported where it is: in a function of these files
    "model/chat/template.py": ("model.tokenizers.gguf_fields",),
    "model/kernels/backends.py": ("model.kernels.triton",),
    "model/loading/checkpoints.py": ("model.tokenizers.gguf_vocab", "model.weights.gguf_file"),
    "model/tokenizers/loading.py": ("model.tokenizers.hf", "model.tokenizers.spm"),
    "server/app/cache.py": ("server.app.watching",),
    "server/app/operations.py": ("server.app.described", "server.app.explorer"),
    "server/engine/engine.py": ("server.engine.kept_cache",),
    "server/openai/requests.py": ("server.tools.grammars",),
    "server/launch/build.py": (
        *("cache.spill", "server.events", "server.launch.graphs", "server.launch.registry"),
    ),
    "server/launch/load_model.py": ("model.loading.random_weights",),
    "server/ray/application.py": ("server.launch.build",),
}
NO_TORCH = (  # files, and what begins so
    "cache/types.py",
    "cache/block_pool.py",
    "cache/keeper.py",
    "cache/prefix.py",
    "cache/manager.py",
    "cache/rearranging.py",
    "model/config.py",
    "model/confined/inside.py",
    "model/confined/process.py",
    "model/digests.py",
    "model/sampling.py",
    "model/chat/process.py",
    "model/tokenizers/hf_process.py",
    "model/tokenizers/spm_process.py",
    "server/launch/banner.py",
    "server/engine/cache_view.py",
    "server/cli/",
    "server/config.py",
    "server/errors.py",
    "server/listen.py",
    "server/download.py",
    "server/ray/",
    "server/scheduling/",
)
ONLY_IN = {  # third-party package: the files that may know it
    "prometheus_client": ("server/metrics/exporter.py", "load_tests/client/scrape.py"),
    "click": ("server/cli/",),
    "fastapi": ("server/app/",),
    "matplotlib": (
        "report/figure.py",
        "model/inspect/audit_page.py",
        "model/inspect/explain/",
        "model/family/evaluation/report/pictures.py",
        "load_tests/report/charts.py",
    ),
    "gguf": ("model/weights/gguf_file.py",),
    "jinja2": ("model/chat/process.py", "report/page.py"),  # never in the server's own process
    "ray": ("server/ray/application.py",),  # an extra: nothing else of the server needs it
    "simpy": ("load_tests/plan/simulate.py",),
    "sentencepiece": (
        "model/tokenizers/spm.py",
        "model/tokenizers/spm_process.py",
        "model/family/texts/tokenizer.py",
    ),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"}
# Where a statement may stand: no expression holds one.
HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

parsed = cache(ast.parse)


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Every imported module's dotted name, and whether the import is inside a function.

    `from a import b` counts as both `a` and `a.b`: b may be a module.
    """
    found = []

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.append((base, late))
            found.extend((f"{base}.{alias.name}", late) for alias in node.names)
        inside = late or isinstance(node, FUNCTIONS)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, HOLDERS):
                visit(child, inside)

    visit(tree, False)
    return found


def dotted(node: ast.expr) -> str:
    """What is called as `a.b.c`; empty for the value of any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def deferred(path: str, name: str) -> bool:
    """Whether a file may import a module late."""
    return name.removeprefix("ropewalk.").startswith(LATE.get(path, ("-",)))


def faults(path: str, source: str) -> list[str]:
    """What is wrong with one file, by the rules that need no other file."""
    tree = parsed(source)
    package = path.split("/")[0]
    found = []
    for name, late in imports(tree):
        top, *below = name.split(".")
        layer = below[0] if top == "ropewalk" and below else ""
        if top in PACKAGES:
            found.append(f"{name} is ropewalk.{name}")
        if name.startswith("."):
            found.append(f"relative import {name}")
        # What only one command needs, or few servers.
        late_exception = late and (path.startswith("server/cli/") or deferred(path, name))
        allowed = set(PACKAGES) if path in IN_PROCESS else ALLOWED[package]
        if layer in PACKAGES and layer != package and layer not in allowed:
            if not (path == "server/cli/bench.py" and late and layer == "load_tests"):
                found.append(f"upward import {name}")
        elif layer in PACKAGES and late and not late_exception:
            found.append(f"late import {name}")
        if top == "torch" and path.startswith(NO_TORCH):
            found.append("imports torch")
        if top in FORBIDDEN_MODULES:
            found.append(f"imports {top}")
        if top in ONLY_IN and not path.startswith(ONLY_IN[top]):
            found.append(f"imports {top}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"global {', '.join(node.names)}")
        if isinstance(node, ast.Call) and (called := dotted(node.func)) in FORBIDDEN_CALLS:
            found.append(f"calls {called}")
        if isinstance(node, ast.ImportFrom):
            called = {f"{node.module}.{alias.name}" for alias in node.names}
            found.extend(f"imports {name}" for name in sorted(called & FORBIDDEN_CALLS))
    return found


def modules() -> dict[str, str]:
    """Path below the root → source, of every file in the packages."""
    root = ROOT / "ropewalk"
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def reaches(path: str, sources: dict[str, str], library: str = "torch") -> list[str]:
    """The chain of files over which importing `path` loads the library; empty: it does not."""
    seen: set[str] = set()
    chains = [[path]]
    while chains:
        chain = chains.pop()
        for name, late in imports(parsed(sources[chain[-1]])):
            if late:
                continue
            if name.split(".")[0] == library:
                return [*chain, library]
            base = name.removeprefix("ropewalk.").replace(".", "/")
            for target in (f"{base}.py", f"{base}/__init__.py"):
                if target in sources and target not in seen:
                    seen.add(target)
                    chains.append([*chain, target])
    return []


def room_of(path: str) -> str:
    """The folder; a file right in a layer is a room by itself, but the cache is one room."""
    folder = path.rpartition("/")[0].removesuffix("/common")
    return path if folder in PACKAGES and folder != "cache" else folder


def rooms(sources: dict[str, str]) -> dict[str, set[str]]:
    """Each room, and the rooms that its files import: at once, or late for LATE."""
    leans: dict[str, set[str]] = {}
    for path, source in sources.items():
        found = leans.setdefault(room_of(path), set())
        for name, late in imports(parsed(source)):
            target = name.removeprefix("ropewalk.").replace(".", "/") + ".py"
            if target in sources and (not late or deferred(path, name)):
                found.add(room_of(target))
        found.discard(room_of(path))
    return leans


SOURCES = modules()


def test_files_keep_the_rules() -> None:
    found = {path: faults(path, source) for path, source in SOURCES.items()}
    assert {path: its for path, its in found.items() if its} == {}


def test_importing_plain_data_never_loads_torch() -> None:
    found = {path: reaches(path, SOURCES) for path in SOURCES if path.startswith(NO_TORCH)}
    assert {path: its for path, its in found.items() if its} == {}


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_only_reports_load_what_they_need(library: str) -> None:
    """Commands are imported late."""
    assert reaches("server/studies/explain.py", SOURCES, library)
    for path in ("server/launch/build.py", "server/cli/main.py", "server/studies/encodings.py"):
        assert reaches(path, SOURCES, library) == []


def test_files_that_must_not_know_torch_are_there() -> None:
    """A renamed file must not slip out of the rule."""
    assert [each for each in NO_TORCH if not any(path.startswith(each) for path in SOURCES)] == []


def test_each_room_says_in_one_sentence_what_it_is_for() -> None:
    inits = {path: text for path, text in SOURCES.items() if path.endswith("/__init__.py")}
    assert {path.rpartition("/")[0] for path in SOURCES} == {
        path.rpartition("/")[0] for path in inits
    }
    for path, text in inits.items():
        tree = ast.parse(text)
        assert len(tree.body) == 1 and "\n" not in (ast.get_docstring(tree) or "\n"), path


def test_serving_imports_no_studies_and_a_prompt_passes_few_files() -> None:
    command = [sys.executable, "-m", "tests.server.follow", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [path for path in found["imported"] if path.startswith(STUDIES)] == []
    assert len(found["imported"]) <= MAX_IMPORTED, found["imported"]
    way = on_the_way(found["passed"])
    assert len(way) <= MAX_ON_THE_WAY, way
    assert sum(path.startswith("server/") for path in found["passed"]) <= MAX_IN_SERVER
    assert {"server/http/protocol.py", "server/engine/engine.py"} < set(way)  # it was followed
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [path for path in way[:-1] if f"(../{path})" not in page] == []


def test_rooms_lean_one_way() -> None:
    TopologicalSorter(rooms(SOURCES)).prepare()


def test_a_planted_circle_of_rooms_is_found() -> None:
    planted = {
        "server/http/streaming.py": "from ropewalk.server.app import app",
        "server/app/app.py": "from ropewalk.server.http.streaming import ping",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(rooms(planted)).prepare()


def test_a_room_holds_no_more_than_one_can_see() -> None:
    native = (ROOT / "model" / "kernels").rglob("*.[ch]pp")  # C++ is read as well
    paths = [*SOURCES, *(path.relative_to(ROOT).as_posix() for path in native)]
    sizes = Counter(str(Path(path).parent) for path in paths)
    crowded = {room: size for room, size in sizes.items() if size > MAX_FILES}
    assert crowded.keys() <= {"model/architectures", "model/encodings"}  # there, a file is a thing


@pytest.mark.parametrize(
    ("path", "planted", "fault"),
    [
        ("cache/kv.py", "import ropewalk.model.config", "upward import ropewalk.model.config"),
        ("cache/kv.py", "from ropewalk.server import errors", "upward import ropewalk.server"),
        (
            "model/batch.py",
            "from ropewalk.server.scheduling.request import Request",
            "upward import ropewalk.server.scheduling.request",
        ),
        (
            "model/batch.py",
            "def f():\n    import ropewalk.server.app.app",
            "upward import ropewalk.server.app.app",
        ),
        (
            "server/app/app.py",
            "import ropewalk.load_tests.run.bench",
            "upward import ropewalk.load_tests.run.bench",
        ),
        (
            "server/app/app.py",
            "def f():\n    import ropewalk.load_tests",
            "upward import ropewalk.load_tests",
        ),
        (
            "server/cli/bench.py",
            "import ropewalk.load_tests.run.bench",
            "upward import ropewalk.load_tests.run.bench",
        ),
        (
            "load_tests/run/bench.py",
            "from ropewalk.cache import kv",
            "upward import ropewalk.cache",
        ),
        (
            "load_tests/common/rounds.py",
            "import ropewalk.model.batch",
            "upward import ropewalk.model.batch",
        ),
        ("cache/kv.py", "from cache import spill", "cache is ropewalk.cache"),
        ("server/app/app.py", "from .request import Request", "relative import .request"),
        (
            "server/app/app.py",
            "def f():\n    from ropewalk.cache import kv",
            "late import ropewalk.cache",
        ),
        ("server/scheduling/scheduler.py", "from torch import Tensor", "imports torch"),
        ("cache/manager.py", "import torch.nn as nn", "imports torch"),
        ("model/weights/base.py", "import pickle", "imports pickle"),
        ("model/weights/base.py", "import torch\ntorch.load('x')", "calls torch.load"),
        ("model/weights/base.py", "from torch import load", "imports torch.load"),
        ("model/batch.py", "eval('1')", "calls eval"),
        ("model/batch.py", "exec('1')", "calls exec"),
        ("model/batch.py", "import yaml\nyaml.load('1')", "calls yaml.load"),
        ("server/app/app.py", "def f():\n    global x\n    x = 1", "global x"),
        (
            "server/engine/engine.py",
            "from prometheus_client import Counter",
            "imports prometheus_client",
        ),
        ("server/engine/engine.py", "import fastapi", "imports fastapi"),
        ("model/loading/checkpoints.py", "import gguf", "imports gguf"),
        ("model/tokenizers/hf.py", "import sentencepiece", "imports sentencepiece"),
        ("model/chat/template.py", "import jinja2", "imports jinja2"),
        ("server/app/app.py", "from matplotlib.figure import Figure", "imports matplotlib"),
    ],
)
def test_planted_fault_is_found(path: str, planted: str, fault: str) -> None:
    assert fault in faults(path, planted)


def test_what_is_allowed_passes() -> None:
    assert faults("server/metrics/exporter.py", "import prometheus_client") == []
    assert faults("server/app/openai.py", "import fastapi") == []
    assert (
        faults(
            "server/cli/bench.py", "def f():\n    from ropewalk.load_tests.run.bench import main"
        )
        == []
    )
    assert (
        faults("load_tests/micro/step_cost.py", "from ropewalk.model.decoder import Decoder") == []
    )
    assert (
        faults("server/engine/engine.py", "import torch\nfrom ropewalk.cache.kv import KVCache")
        == []
    )


def test_planted_detour_to_torch_is_found() -> None:
    sources = {
        "server/scheduling/request.py": "from ropewalk.model.sampling import SamplingParams",
        "model/sampling.py": "import ropewalk.model.batch",
        "model/batch.py": "from torch import Tensor",
    }
    chain = ["server/scheduling/request.py", "model/sampling.py", "model/batch.py", "torch"]
    assert reaches("server/scheduling/request.py", sources) == chain
    late = {"server/cli/main.py": "def serve():\n    import torch"}
    assert reaches("server/cli/main.py", late) == []
