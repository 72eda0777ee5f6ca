"""What docs/family.md says is true: commands would run, and the table is what was measured."""

import re
import shlex
from pathlib import Path

import pytest

from ropewalk.model.family.evaluation import results
from ropewalk.model.family.evaluation.report.findings import shipped, verdict
from ropewalk.model.family.evaluation.report.words import signed
from ropewalk.model.family.evaluation.results import Measured
from tests.test_readme import options_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "family.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/ropewalk (.*?)(?: &)?$", PAGE, re.M)


def table() -> str:
    """Held-out loss within the trained length, what distance costs past it, and the verdict."""
    found = results.read(ROOT / "model" / "family" / "evaluation.json")
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


def test_table_is_what_was_measured() -> None:
    assert table() in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_one_that_would_be_understood(command: str) -> None:
    options_of(shlex.split(command))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE)
    assert len(links) > 3
    own = [link for link in links if not link.startswith("https://")]
    assert [link for link in own if not (ROOT / "docs" / link).exists()] == []
