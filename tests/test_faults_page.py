"""What docs/faults.md promises is what the code has."""

import re
from pathlib import Path

from ropewalk.model.weights.checksums import STEPS
from ropewalk.server.engine import async_engine, integrity
from ropewalk.server.errors import CacheChanged, ModelWithdrawn, ShuttingDown, WeightsChanged
from ropewalk.server.launch import build

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text()


def test_numbers_are_those_of_the_code():
    for said in (
        f"within {STEPS:,} steps",
        f"`full` finds it within {STEPS // integrity.PORTIONS['full']} steps",
        f"found within {-(-STEPS * build.IDLE_S // 60):.0f} minutes",
        f"after {async_engine.STALL_SECONDS:.0f} s `/health/live`",
        f"at most {2 * async_engine.WATCH_SECONDS:.0f} s later",
        f"status {build.ENGINE_FAILED}",
    ):
        assert said in PAGE, said
    assert integrity.PORTIONS["sample"] == 1 and integrity.PORTIONS["off"] == 0
    assert build.IDLE_S == 0.5  # "twice a second"


def test_codes_are_those_of_the_errors():
    for kind in (CacheChanged, WeightsChanged, ModelWithdrawn, ShuttingDown):
        assert f"`{kind.code}`" in PAGE
        assert f"{kind.status} `{kind.code}`" in PAGE or kind is ShuttingDown


def test_every_fault_has_a_test_or_says_how_it_was_tried():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|")]
    assert len(rows) > 12
    for fault, *_, tested in rows[2:]:
        assert re.search(r"test_\w+\.py|by hand", tested), fault
