"""Tables of these pages that repeat what the code says, made from it. scripts/docs writes them."""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ropewalk.cache.types import BLOCK_SIZE, Evict, Move, Op, Unsupported
from ropewalk.model.architectures.base import Architecture, architectures
from ropewalk.model.architectures.fields import Absent, Default, Disputed, Like
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.catalogue import LENGTHS, SHAPE, Ability, Place, example, facts
from ropewalk.model.dry_run import OTHER, SEQUENCE, Trial
from ropewalk.model.encodings.base import PositionalEncoding, find, names
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.family.evaluation import results
from ropewalk.model.family.evaluation.report.findings import shipped, verdict
from ropewalk.model.family.evaluation.report.words import signed
from ropewalk.model.family.evaluation.results import Measured
from ropewalk.server.cli.chat import chat
from ropewalk.server.cli.health import health
from ropewalk.server.cli.options import settings_of
from ropewalk.server.cli.serve import serve
from ropewalk.server.studies.encodings import by_storage

DOCS = Path(__file__).parent

# ---- checkpoints.md ----


def defaults_table() -> str:
    rows = ["|`model_type`|who says so|an absent key means|", "|---|---|---|"]
    for family in architectures():
        rows += _rows(family.model_type, family.absent)
    return "\n".join(rows)


def gguf_table() -> str:
    rows = ["|`general.architecture`|who says so|an absent key means|", "|---|---|---|"]
    for family in architectures():
        if family.gguf_name is not None:
            rows += _rows(family.gguf_name, family.absent_in_gguf)
    return "\n".join(rows)


def disputed_table() -> str:
    rows = ["|`model_type`|key|its absence means|", "|---|---|---|"]
    for family in architectures():
        for key, what in _disputed(family):
            rows.append(f"|`{family.model_type}`|`{key}`|{what.meanings}|")
    return "\n".join(rows)


def _rows(name: str, absent: Absent) -> Iterator[str]:
    defaults = {key: what for key, what in absent.items() if isinstance(what, Default)}
    for who in dict.fromkeys(what.by for what in defaults.values()):
        told = [f"`{key}` = {_shown(what)}" for key, what in defaults.items() if what.by == who]
        yield f"|`{name}`|{who}|{', '.join(told)}|"


def _shown(what: Default) -> str:
    return f"`{what.value.key}`" if isinstance(what.value, Like) else f"{what.value:.15g}"


def _disputed(family: Architecture) -> Iterator[tuple[str, Disputed]]:
    for key, what in family.absent.items():
        if isinstance(what, Disputed):
            yield key, what


# ---- encodings.md ----

PLACE = Place([SdpaAttention, ReferenceAttention], torch.float32, torch.device("cpu"))
VARIANTS = (  # how the row is called, the encoding, options besides the usual ones
    ("alibi, `hf_exact`", "alibi", {"hf_exact": True}),
    ("t5, `per_layer`", "t5", {"per_layer": True}),
    ("t5, form `table`", "t5", {"form": "table"}),
    ("t5, form `materialised`", "t5", {"form": "materialised"}),
    ("rope, storage `raw`", "rope", {"storage": "raw"}),
    ("rope, storage `block`", "rope", {"storage": "block"}),
)


def list_table() -> str:
    """What each touches and where it ends, from the classes."""
    rows = [
        "|encoding|what it is|hooks|hard limit|past the trained length|",
        "|---|---|---|---|---|",
    ]
    for name in names():
        entry = facts(name, PLACE)
        hooks = ", ".join(f"`{hook}`" for hook in entry.hooks) or "none"
        summary = entry.summary.rstrip(".")
        rows.append(f"|`{name}`|{summary}|{hooks}|{entry.limit}|{entry.beyond_trained}|")
    return "\n".join(rows)


def cost_table() -> str:
    """Positional work of one new token by encoding and keys seen, from the code's own counters."""
    heads = " | ".join(f"{length:,} keys" for length in LENGTHS).replace(" | ", "|")
    rows = [f"|encoding|{heads}|", "|---|" + "---:|" * len(LENGTHS)]
    counted = [(f"`{name}`", name, {}) for name in names()]
    for label, name, options in sorted((*counted, *VARIANTS), key=lambda row: row[1]):
        encoding = example(find(name), SHAPE, max(LENGTHS) if options else 1024, options)
        rows.append(row(label, [encoding.work(SHAPE, length, BLOCK_SIZE) for length in LENGTHS]))
    columns = SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim
    attention = [PositionalWork(flops=4 * columns * n, bytes=4 * columns * n) for n in LENGTHS]
    rows.append(row("*attention itself, bfloat16 cache*", attention))
    matrices = SHAPE.num_layers * (
        4 * SHAPE.hidden_size**2 + 2 * SHAPE.hidden_size * SHAPE.intermediate_size
    )
    weights = PositionalWork(flops=2 * matrices, bytes=2 * matrices)
    rows.append(row("*weight matrices of the layers, bfloat16*", [weights] * len(LENGTHS)))
    return "\n".join(rows)


def row(label: str, costs: list[PositionalWork]) -> str:
    return f"|{label}|{'|'.join(map(cell, costs))}|"


def cell(cost: PositionalWork) -> str:
    if not cost.flops:
        return "0"
    built = f", {cost.bias_built:,} built" if cost.bias_built else ""
    return f"{cost.flops:,} FLOPs, {cost.bytes:,} B{built}"


def operations_table() -> str:
    """What is asked of stored entries, in float32 and in half precision where that differs."""
    rows = [f"|encoding|{'|'.join(f'`{op.value}`' for op in Op)}|", "|---|" + "---|" * len(Op)]
    half = replace(PLACE, dtype=torch.bfloat16)
    for name in names():
        both = by_storage(facts(name, PLACE)), by_storage(facts(name, half))
        for (label, abilities), (_, halves) in zip(*both, strict=True):
            pairs = zip(abilities, halves, strict=True)
            rows.append(f"|{label}|{'|'.join(one(*pair) for pair in pairs)}|")
    return "\n".join(rows)


def one(wide: Ability, half: Ability) -> str:
    if wide.capability is half.capability:
        return wide.capability.value
    return f"{wide.capability.value}; in half precision {half.capability.value}"


# ---- cache.md ----

KEPT = 1024  # tokens that a shift or a move takes along
COMPARED = (
    ("rope, `absolute`", "rope", {"storage": "absolute"}),
    ("rope, `raw`", "rope", {"storage": "raw"}),
    ("rope, `block`", "rope", {"storage": "block"}),
    ("t5, `materialised`", "t5", {"form": "materialised"}),
    ("t5, `table`", "t5", {"form": "table"}),
    ("t5, `window`", "t5", {"form": "window"}),
    ("alibi", "alibi", {}),
    ("learned", "learned", {}),
    ("sinusoidal", "sinusoidal", {}),
    ("nope", "nope", {}),
)


def comparison() -> str:
    """Everything in it is counted by the code that serves, on a cache without memory."""
    lengths = "|".join(f"work at {length:,}" for length in LENGTHS)
    rows = [
        f"|encoding|changed by appending|{lengths}|shift that keeps {KEPT:,}|reuse elsewhere|",
        "|---|---:|" + "---:|" * len(LENGTHS) + "---:|---|",
    ]
    for label, name, options in COMPARED:
        encoding = example(find(name), SHAPE, 2048, options)
        works = "|".join(work(encoding.work(SHAPE, n, BLOCK_SIZE)) for n in LENGTHS)
        evict = Evict(SEQUENCE, 1, KEPT // BLOCK_SIZE, renumber=True)
        move = Move(SEQUENCE, 0, KEPT // BLOCK_SIZE, OTHER)
        rows.append(f"|{label}|0|{works}|{moved(encoding, evict)}|{moved(encoding, move)}|")
    return "\n".join(rows)


def work(cost: PositionalWork) -> str:
    if cost.rotations:
        return f"{cost.rotations:,} rotations"
    if cost.bias_built:
        return f"{cost.bias_values:,} adds, {cost.bias_built:,} built"
    if cost.bias_values:
        return f"{cost.bias_values:,} adds"
    return f"{cost.flops:,} sums" if cost.flops else "0"


def moved(encoding: PositionalEncoding, operation: Evict | Move) -> str:
    lengths = {SEQUENCE: 2 * KEPT + BLOCK_SIZE, OTHER: BLOCK_SIZE}
    trial = Trial(SHAPE, lengths, block_size=BLOCK_SIZE, dtype=torch.bfloat16)
    try:
        report = trial.operations(encoding).dry_run(operation)
    except Unsupported:
        return "impossible"
    copied = f"{report.copied:,} copied, " if report.copied else ""
    if not report.rewritten:
        return f"{copied}0"
    return f"{copied}{report.rewritten:,} keys rotated, {report.bytes_moved / 1e6:.0f} MB"


# ---- family.md ----


def losses() -> str:
    """Held-out loss within the trained length, what distance costs past it, and the verdict."""
    found = results.read(DOCS.parent / "model" / "family" / "evaluation.json")
    assert found is not None
    rows = [
        "|encoding|loss at 256 to 512|cost of distance at 512 to 640|at 1,024 to 1,536|"
        "at 3,072 to 4,096|past 512 tokens it|",
        "|---|---:|---:|---:|---:|---|",
    ]
    for one in shipped(found.members):
        costs = "|".join(cost_at(one, start) for start in (512, 1024, 3072))
        own = verdict(one)
        assert own is not None and one.held_out is not None
        rows.append(f"|`{one.label}`|{one.held_out.loss.value:.2f}|{costs}|{own.beyond.value}|")
    return "\n".join(rows)


def cost_at(one: Measured, start: int) -> str:
    assert one.losses is not None
    change = next((each.change for each in one.losses.bins if each.start == start), None)
    return "–" if change is None else signed(change.value)


# ---- configuration.md ----


def configuration_page() -> str:
    """docs/configuration.md as the option tables make it."""
    parts = [
        "# Configuration",
        "A flag beats its environment variable, the variable beats the file that `--config` names, "
        "the file beats the default. An empty variable "
        "counts as unset; a variable that begins with `ROPEWALK_` and is not listed here is an "
        "error, but for those that Kubernetes sets for a Service (one called `ropewalk` brings a "
        "`ROPEWALK_PORT`: `enableServiceLinks: false` keeps it away). Lists in variables are "
        "separated by commas. Numbers of tokens may be written `8k`, amounts of memory `512M` or "
        "`1GiB`.",
        "The file is TOML. Its keys are the names of `serve`'s flags, with dashes or underscores: "
        '`port = 9000`, `max-model-len = "8k"`, `models = ["chat=smollm2"]`, '
        "`prefix-sharing = false`. `chat` and `health` read the same file and variables for where "
        "the server listens.",
        "With `--ssl-certfile` the server speaks https. A certificate that no public authority "
        "has issued is trusted by `chat` and `health` when they are given the same flag or "
        "variable, and by them, by curl and by clients that use httpx, such as openai's, when the "
        "variable `SSL_CERT_FILE` names it; requests has `REQUESTS_CA_BUNDLE`. With `--uds` it "
        "listens on a Unix socket: `ropewalk chat --url unix:PATH`, "
        "`curl --unix-socket PATH http://localhost/v1/models`. Behind a proxy that publishes it "
        "below a path, `--root-path` is that path.",
        "`ropewalk completion bash`, `zsh` or `fish` prints a script that completes commands and "
        "flags; its `--help` says where the shell looks for it.",
        "`serve` does not start with a variable `ROPEWALK_API_KEY`, which is what a client sends, "
        "unless it has keys of its own; with fewer `--max-step-tokens` than `--max-seqs`; or with "
        "float16 for T5, whose numbers do not fit. `CXX` names the compiler of the CPU kernels, "
        "`CC` that of Triton.",
        "`ROPEWALK_HOME` is where models, compiled kernels and the history of `chat` are kept: by "
        "default `ropewalk` in "
        "`XDG_CACHE_HOME`, or in the user's cache directory. Models of the Hugging Face hub are in "
        "that library's own cache.",
    ]
    for command in (serve, chat, health):
        rows = [f"## ropewalk {command.name}\n"]
        rows += ["|flag|variable|value|default|meaning|", "|---|---|---|---|---|"]
        for one in settings_of(command):
            words = [*one.opts, *one.secondary_opts]
            flags = "`, `".join("MODEL" if word == "models" else word for word in words)
            cells = (f"`{flags}`", f"`{one.envvar}`", ", ".join(one.values))
            rows.append(f"|{'|'.join(cells)}|{one.default_in_words}|{one.help}|")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


# ---- architecture.md ----


def rooms() -> str:
    """A row for each room, its sentence taken from its __init__.py."""
    rows = ["|room|is for|", "|---|---|"]
    for package in ("server", "model", "cache", "load_tests", "ropewalk/report"):
        for path in sorted((DOCS.parent / package).rglob("__init__.py")):
            said = ast.get_docstring(ast.parse(path.read_text()))
            room = path.parent.relative_to(DOCS.parent)
            rows.append(f"|[`{room}`](../{room})|{said}|")
    return "\n".join(rows)


# ---- all of them ----

TABLES: dict[str, list[Callable[[], str]]] = {
    "architecture.md": [rooms],
    "cache.md": [comparison],
    "checkpoints.md": [defaults_table, disputed_table, gguf_table],
    "encodings.md": [list_table, cost_table, operations_table],
    "family.md": [losses],
}
PAGES = [*TABLES, "configuration.md"]


def current(name: str) -> str:
    """The page with its tables as the code makes them now, each in place of the one that it has.

    Raises:
        ValueError: the page has no table with the same header.
    """
    if name == "configuration.md":
        return configuration_page()
    page = (DOCS / name).read_text()
    for table in TABLES[name]:
        page = replaced(page, table().splitlines())
    return page


def replaced(page: str, table: list[str]) -> str:
    lines = page.splitlines()
    start = lines.index(table[0])
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:start], *table, *lines[end:]]) + "\n"


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(PAGES):
        sys.exit(f"{', '.join(sorted(unknown))}: there are tables in {', '.join(PAGES)}")
    for name in sys.argv[1:] or PAGES:
        (DOCS / name).write_text(current(name))
