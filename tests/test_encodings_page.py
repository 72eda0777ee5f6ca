"""What docs/encodings.md says is true: tables are made again, the example and the commands run."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropewalk.cache.types import BLOCK_SIZE, Op
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.catalogue import LENGTHS, SHAPE, Ability, Place, example, facts
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import create, find, names
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.encodings.common.rope_scaling import scaling_from
from ropewalk.server.cli import main
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.studies.encodings import by_frame
from tests.command_line import configured, understood
from tests.model.checkpoints import llama, random_model, save
from tests.server.fake_engine import make_request

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "encodings.md").read_text()
PLACE = Place([SdpaAttention, ReferenceAttention], torch.float32, torch.device("cpu"))
VARIANTS = (  # how the row is called, the encoding, options besides the usual ones
    ("alibi, `hf_exact`", "alibi", {"hf_exact": True}),
    ("t5, `per_layer`", "t5", {"per_layer": True}),
    ("t5, form `table`", "t5", {"form": "table"}),
    ("t5, form `materialised`", "t5", {"form": "materialised"}),
    ("rope, frame `raw`", "rope", {"frame": "raw"}),
    ("rope, frame `block`", "rope", {"frame": "block"}),
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
    columns = SHAPE.layers * SHAPE.heads * SHAPE.head_dim
    attention = [PositionalWork(flops=4 * columns * n, bytes=4 * columns * n) for n in LENGTHS]
    rows.append(row("*attention itself, bfloat16 cache*", attention))
    matrices = SHAPE.layers * (4 * SHAPE.width**2 + 2 * SHAPE.width * SHAPE.ffn_width)
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
        both = by_frame(facts(name, PLACE)), by_frame(facts(name, half))
        for (label, abilities), (_, halves) in zip(*both, strict=True):
            pairs = zip(abilities, halves, strict=True)
            rows.append(f"|{label}|{'|'.join(one(*pair) for pair in pairs)}|")
    return "\n".join(rows)


def one(wide: Ability, half: Ability) -> str:
    if wide.capability is half.capability:
        return wide.capability.value
    return f"{wide.capability.value}; in half precision {half.capability.value}"


def test_operations_are_what_the_encodings_declare() -> None:
    assert operations_table() in PAGE


def test_list_is_what_the_classes_say() -> None:
    assert list_table() in PAGE


def test_costs_are_what_the_code_counts() -> None:
    assert cost_table() in PAGE


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) > 5
    local = [link for link in links if not link.startswith("https://arxiv.org/abs/")]
    assert [link for link in local if not (ROOT / "docs" / link).exists()] == []


# ---- figures in the text ----


def stale(length: int) -> float:
    """How far a key at position 1,000, turned for 4,096 positions, is from that for `length`."""
    options = {"type": "dynamic", "factor": 2.0, "original_context": 4096}
    speeds = [scaling_from(options).frequencies(1e4, 128, n).double() for n in (4096, length)]
    kept, wanted = (torch.polar(torch.ones(64).double(), 1000 * one) for one in speeds)
    # A random key: every pair weighs alike.
    return float((kept - wanted).abs().square().mean().sqrt())


def test_stale_keys_of_dynamic_rope_are_as_wrong_as_said() -> None:
    said = [float(number) for number in re.findall(r"\*\*([\d.]+)%\*\* of its norm", PAGE)]
    assert said == [round(100 * stale(4097), 1), round(100 * stale(4224))]


def test_longest_turns_are_as_said() -> None:
    slow, slower = (2 * torch.pi * base ** (126 / 128) for base in (1e4, 5e5))
    said = (
        f"{slow:,.0f} positions with base 10,000 and {slower / 1e6:.2f} million with base 500,000"
    )
    assert said in PAGE


# ---- the example ----


def code() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def kerple(tmp_path, monkeypatch):
    """The page's example in a file of its own, in the folder one works in."""
    (tmp_path / "kerple.py").write_text(code())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kerple:Kerple"
    sys.modules.pop("kerple", None)


def test_example_is_short() -> None:
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) <= 32


def test_example_computes_what_it_says(kerple) -> None:
    encoding = example(find(kerple), SHAPE, 100, {"r1": 2.0, "r2": 0.5})
    positions = torch.arange(100)
    found = encoding.score_bias().between(positions, positions)
    distance = (positions[:, None] - positions).clamp(min=0).double()
    assert torch.allclose(found.double(), -2 * torch.log(1 + 0.5 * distance), atol=1e-5)
    assert encoding.max_positions == 100
    assert encoding.work(SHAPE, 50, BLOCK_SIZE).flops == SHAPE.layers * SHAPE.heads * 50
    with pytest.raises(ValueError, match="kerple takes"):
        example(find(kerple), SHAPE, 100, {"r3": 1})


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
def test_example_is_served(kerple, tmp_path, attention) -> None:
    folder = save(random_model(llama()), tmp_path / "llama")
    flags = ["--dtype", "float32", "--kv-memory", "1M", "--attention", attention]
    answers = []
    for encoding in (kerple, "nope"):
        (loaded,) = load_models(configured(str(folder), "--encoding", encoding, *flags), Metrics())
        assert loaded.served.encoding == encoding
        request = make_request("a", list(range(40)), max_tokens=12)
        loaded.engine.submit(request)
        while loaded.engine.busy:
            loaded.engine.step()
        answers.append(request.tokens[40:])
    assert len(answers[0]) == 12
    assert answers[0] != answers[1]  # distance does count


def test_example_may_be_in_a_checkpoint(kerple) -> None:
    """Reading one asks for a decoder without memory."""
    encoding = create(EncodingSpec(kerple, {"r1": 2}), SHAPE, 64, torch.device("meta"))
    assert encoding.score_bias().table.shape == (SHAPE.heads, 64)


def commands() -> list[list[str]]:
    """Words of every `ropewalk` line, without the environment before it."""
    shell = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in shell.splitlines() if line.strip()]
    program = ".venv/bin/ropewalk"
    assert all(program in words for words in lines)
    return [words[words.index(program) + 1 :] for words in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_understood_and_run(words, kerple, capsys, monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.server.studies.encodings.this_machine", lambda: PLACE)
    assert understood(*words).info_name == words[0]
    if words[0] == "serve" or "--model" in words:
        return  # needs weights
    if words[0] == "explain" and kerple not in words:  # drawn in tests of their own
        monkeypatch.setattr("ropewalk.server.studies.explain.pictures", lambda subject: [])
    assert main.main(words) == 0
    said = capsys.readouterr()
    # On a busy machine a long measurement may say that it is one.
    assert said.out and "Error" not in said.err
    if words[0] == "explain":
        assert Path(said.out.strip()).stat().st_size > 1000


def test_page_is_one_page() -> None:
    assert len(PAGE.splitlines()) < 150
