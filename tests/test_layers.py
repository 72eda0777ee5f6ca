"""The house keeps its shape: who may import whom, where torch may not go, and what nobody does.

Reads syntax trees; imports none of the packages. Each rule is also shown to fail on planted code.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "model", "cache", "load_tests")

ALLOWED = {  # what a package may import besides itself
    "server": {"model", "cache"},
    "model": {"cache"},
    "cache": set(),
    "load_tests": set(),
}
IN_PROCESS = (  # load tests in one process with what they measure, which they may import
    "load_tests/engines.py",
    "load_tests/gpu_check.py",
    "load_tests/gpu_parts.py",
    "load_tests/gpu_peer.py",
    "load_tests/in_process.py",
    "load_tests/measured.py",
    "load_tests/profile_engine.py",
    "load_tests/profile_http.py",
    "load_tests/profile_step.py",
    "load_tests/roofline.py",
    "load_tests/scaling.py",
    "load_tests/scaling_parts.py",
    "load_tests/spill_cost.py",
    "load_tests/step_cost.py",
)
NO_TORCH = (
    "cache/terms.py",
    "cache/block_pool.py",
    "cache/keeper.py",
    "cache/kept.py",
    "cache/prefix.py",
    "cache/manager.py",
    "model/config.py",
    "model/confined/inside.py",
    "model/confined/process.py",
    "model/digests.py",
    "model/sampling.py",
    "model/tokenizers/chat_process.py",
    "model/tokenizers/hf_process.py",
    "model/tokenizers/spm_process.py",
    "server/__main__.py",
    "server/banner.py",
    "server/cache_view.py",
    "server/chat.py",
    "server/cli.py",
    "server/client_options.py",
    "server/config.py",
    "server/config_file.py",
    "server/connect.py",
    "server/errors.py",
    "server/listen.py",
    "server/options.py",
    "server/plan.py",
    "server/printing.py",
    "server/pull.py",
    "server/request.py",
    "server/scheduler.py",
    "server/serve_options.py",
)
ONLY_IN = {  # third-party package: the files that may know it
    "prometheus_client": (
        "server/metrics.py",
        "server/metrics_families.py",
        "load_tests/scrape.py",
    ),
    "fastapi": ("server/app.py", "server/routes/"),
    "matplotlib": ("model/explain/", "model/family/evaluation/pictures.py"),
    "gguf": ("model/weights/gguf_file.py",),
    "jinja2": ("model/tokenizers/chat_process.py",),  # never in the server's own process
    "sentencepiece": (
        "model/tokenizers/spm.py",
        "model/tokenizers/spm_process.py",
        "model/family/tokenizer.py",
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


def faults(path: str, source: str) -> list[str]:
    """What is wrong with one file, by the rules that need no other file."""
    tree = parsed(source)
    package = path.split("/")[0]
    found = []
    for name, late in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            found.append(f"relative import {name}")
        late_exception = path == "server/cli.py" and late
        allowed = set(PACKAGES) if path in IN_PROCESS else ALLOWED[package]
        if top in PACKAGES and top != package and top not in allowed:
            if not (late_exception and top == "load_tests"):
                found.append(f"upward import {name}")
        elif top in PACKAGES and late and not late_exception:
            found.append(f"late import {name}")
        if top == "torch" and path in NO_TORCH:
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
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def reaches_torch(path: str, sources: dict[str, str]) -> list[str]:
    """The chain of files over which importing `path` would load torch; empty: it would not."""
    seen: set[str] = set()
    chains = [[path]]
    while chains:
        chain = chains.pop()
        for name, late in imports(parsed(sources[chain[-1]])):
            if late:
                continue
            if name.split(".")[0] == "torch":
                return [*chain, "torch"]
            base = name.replace(".", "/")
            for target in (f"{base}.py", f"{base}/__init__.py"):
                if target in sources and target not in seen:
                    seen.add(target)
                    chains.append([*chain, target])
    return []


SOURCES = modules()


@pytest.mark.parametrize("path", SOURCES)
def test_file_keeps_the_rules(path: str) -> None:
    assert faults(path, SOURCES[path]) == []


@pytest.mark.parametrize("path", sorted(set(NO_TORCH) & set(SOURCES)))
def test_importing_plain_data_never_loads_torch(path: str) -> None:
    assert reaches_torch(path, SOURCES) == []


def test_files_that_must_not_know_torch_are_there() -> None:
    """A renamed file must not slip out of the rule."""
    assert set(NO_TORCH) <= set(SOURCES)


def test_package_inits_are_empty() -> None:
    inits = {path: text for path, text in SOURCES.items() if path.endswith("/__init__.py")}
    assert inits
    assert {path for path, text in inits.items() if text.strip()} == set()


@pytest.mark.parametrize(
    ("path", "planted", "fault"),
    [
        ("cache/kv.py", "import model.config", "upward import model.config"),
        ("cache/kv.py", "from server import request", "upward import server"),
        ("model/batch.py", "from server.request import Request", "upward import server.request"),
        ("model/batch.py", "def f():\n    import server.app", "upward import server.app"),
        ("server/app.py", "import load_tests.bench", "upward import load_tests.bench"),
        ("server/app.py", "def f():\n    import load_tests", "upward import load_tests"),
        ("server/cli.py", "import load_tests.bench", "upward import load_tests.bench"),
        ("load_tests/bench.py", "from cache import kv", "upward import cache"),
        ("load_tests/rounds.py", "import model.batch", "upward import model.batch"),
        ("server/app.py", "from .request import Request", "relative import .request"),
        ("server/app.py", "def f():\n    from cache import kv", "late import cache"),
        ("server/scheduler.py", "from torch import Tensor", "imports torch"),
        ("cache/manager.py", "import torch.nn as nn", "imports torch"),
        ("model/weights/base.py", "import pickle", "imports pickle"),
        ("model/weights/base.py", "import torch\ntorch.load('x')", "calls torch.load"),
        ("model/weights/base.py", "from torch import load", "imports torch.load"),
        ("model/batch.py", "eval('1')", "calls eval"),
        ("model/batch.py", "exec('1')", "calls exec"),
        ("model/batch.py", "import yaml\nyaml.load('1')", "calls yaml.load"),
        ("server/app.py", "def f():\n    global x\n    x = 1", "global x"),
        ("server/engine.py", "from prometheus_client import Counter", "imports prometheus_client"),
        ("server/engine.py", "import fastapi", "imports fastapi"),
        ("model/loading.py", "import gguf", "imports gguf"),
        ("model/tokenizers/hf.py", "import sentencepiece", "imports sentencepiece"),
        ("model/tokenizers/chat.py", "import jinja2", "imports jinja2"),
        ("server/app.py", "from matplotlib.figure import Figure", "imports matplotlib"),
    ],
)
def test_planted_fault_is_found(path: str, planted: str, fault: str) -> None:
    assert fault in faults(path, planted)


def test_what_is_allowed_passes() -> None:
    assert faults("server/metrics.py", "import prometheus_client") == []
    assert faults("server/routes/openai.py", "import fastapi") == []
    assert faults("server/cli.py", "def f():\n    from load_tests.bench import main") == []
    assert faults("load_tests/step_cost.py", "from model.transformer import Decoder") == []
    assert faults("server/engine.py", "import torch\nfrom cache.kv import KVCache") == []


def test_planted_detour_to_torch_is_found() -> None:
    sources = {
        "server/request.py": "from model.sampling import SamplingParams",
        "model/sampling.py": "import model.batch",
        "model/batch.py": "from torch import Tensor",
    }
    chain = ["server/request.py", "model/sampling.py", "model/batch.py", "torch"]
    assert reaches_torch("server/request.py", sources) == chain
    late = {"server/cli.py": "def serve():\n    import torch"}
    assert reaches_torch("server/cli.py", late) == []
