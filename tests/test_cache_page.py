"""What docs/cache.md says is true: the comparison is made again, and the rules name what exists."""

import re
from pathlib import Path

import torch

from ropewalk.cache.types import BLOCK_SIZE, Evict, Move, Unsupported
from ropewalk.model.catalogue import LENGTHS, SHAPE, example
from ropewalk.model.dry_run import OTHER, SEQUENCE, Trial
from ropewalk.model.encodings.base import PositionalEncoding, find
from ropewalk.model.encodings.common.cost import PositionalWork
from tests.server.test_metrics import families, metrics_of_toy

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cache.md").read_text()
RULES = (ROOT / "deploy" / "prometheus" / "recording.yaml").read_text()
KEPT = 1024  # tokens that a shift or a move takes along
ARMS = (
    ("rope, `absolute`", "rope", {"frame": "absolute"}),
    ("rope, `raw`", "rope", {"frame": "raw"}),
    ("rope, `block`", "rope", {"frame": "block"}),
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
    for label, name, options in ARMS:
        encoding = example(find(name), SHAPE, 2048, options)
        works = "|".join(work(encoding.work(SHAPE, n, BLOCK_SIZE)) for n in LENGTHS)
        evict = Evict(SEQUENCE, 1, KEPT // BLOCK_SIZE, renumber=True)
        move = Move(SEQUENCE, 0, KEPT // BLOCK_SIZE, OTHER)
        rows.append(f"|{label}|0|{works}|{moved(encoding, evict)}|{moved(encoding, move)}|")
    return "\n".join(rows)


def work(cost: PositionalWork) -> str:
    if cost.rotations:
        return f"{cost.rotations:,} turns"
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
    return f"{copied}{report.rewritten:,} keys turned, {report.bytes_moved / 1e6:.0f} MB"


def test_the_comparison_is_what_the_code_counts() -> None:
    assert comparison() in PAGE


def test_recording_rules_name_what_is_exported() -> None:
    exported = set()
    for name, family in families(metrics_of_toy()).items():
        exported |= {name, *(sample.name for sample in family.samples)}
    used = set(re.findall(r"\bropewalk_[a-z0-9_]+", RULES))
    assert len(used) > 8
    assert used <= exported
    recorded = re.findall(r"record: (ropewalk:\S+)", RULES)
    assert len(recorded) == len(set(recorded)) > 8
    assert set(re.findall(r"ropewalk:[a-z0-9_:]+", RULES)) == set(recorded)
    missing = [record for record in recorded if record not in PAGE]
    assert missing == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    local = [link for link in links if not link.startswith("https://arxiv.org/abs/")]
    assert [link for link in local if not (ROOT / "docs" / link).exists()] == []
