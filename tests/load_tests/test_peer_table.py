from dataclasses import asdict, replace

import pytest

from ropewalk.load_tests.common.types import Outcome, Result, Run
from ropewalk.load_tests.peers.peer_table import (
    PROCESSES,
    ROWS,
    WEIGHT_BYTES,
    Lifetime,
    peer_table,
    rows_from,
    sizes,
)
from ropewalk.load_tests.workload.prompts import PromptMaker

STEP = {"ropewalk:a": 0.010, "quick:a": 0.012, "slow:a": 0.030}


def run(variant: str, name: str, round: int, step: float) -> Run:
    """Two requests of 101 tokens, one after the other; the first token takes ten steps."""
    row = ROWS[name]
    outcomes = []
    for start in (0.0, 110 * step):
        chunks = tuple((start + (10 + i) * step, i + 1) for i in range(101))
        outcomes.append(Outcome(start, start, start + 110 * step, chunks, 64, 101))
    return Run(variant, row.load.point, row.profile, round, tuple(outcomes), 0.0, 220 * step)


def result(runs: list[Run], lives: dict[str, list[dict]] | None = None) -> Result:
    variants = {variant: {} for variant in STEP}
    environment = {PROCESSES: lives or {}, WEIGHT_BYTES: 1000}
    return Result("", {}, environment, variants, "ropewalk:a", tuple(runs), ())


def life(**shown: float) -> dict[str, float]:
    return asdict(Lifetime(0, 1.0, 1, 1, 1.0)) | shown


def every(name: str, rounds: int) -> list[Run]:
    return [
        run(variant, name, round, step * (1 + round / 10))
        for round in range(rounds)
        for variant, step in STEP.items()
    ]


def line(text: str, title: str) -> str:
    (found,) = [each for each in text.splitlines() if each.startswith(title)]
    return " ".join(found.split())


def test_a_rate_is_compared_with_the_best_of_the_others():
    text = peer_table(result(every("one", 3)))
    # Rounds drift alike, so their ratios are equal: 1.2 for the quicker of the others.
    assert line(text, "one stream") == (
        "one stream, 128 in, 128 out tokens/s 90.9 75.8 30.3 quick:a 1.20 (1.20 to 1.20)"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("prefill", "prefill of 1,024 tokens/s 640 533 213"),
        ("eight", "8 concurrent, 128 in, 128 out tokens/s 91.8 76.5 30.6"),
        ("shared", "16 sharing 768 tokens s 2.20 2.64 6.60"),
    ],
)
def test_figures_of_the_other_rows(name, shown):
    text = peer_table(result(every(name, 1)))
    title = shown.split(" tokens/s")[0].split(" s ")[0]
    assert line(text, title) == f"{shown} quick:a 1.20 (too few runs for an interval)"


def test_a_run_with_a_failure_has_no_figure():
    runs = every("one", 1)
    first, second = run("quick:a", "one", 0, 0.001).outcomes
    runs[1] = replace(runs[1], outcomes=(first, replace(second, error="status 500")))
    assert line(peer_table(result(runs)), "one stream").endswith(
        "100 – 33.3 slow:a 3.00 (too few runs for an interval)"
    )


def test_a_stream_is_told_as_a_share_of_what_memory_allows():
    lives = {variant: [life(read_bytes_per_s=200_000)] for variant in STEP}
    text = peer_table(result(every("one", 2), lives))  # of the second round there is no reading
    assert line(text, "one stream, of the bound") == (
        "one stream, of the bound % 50.0 41.7 16.7 quick:a 1.20 (too few runs for an interval)"
    )
    unknown = result(every("one", 1), lives)
    assert "bound" not in peer_table(replace(unknown, environment={PROCESSES: lives}))


def test_start_and_memory_are_better_when_less():
    lives = {
        variant: [life(start_s=step * 100, loaded_bytes=2**20, used_bytes=2**21)]
        for variant, step in STEP.items()
    }
    text = peer_table(result([], lives))
    few = "quick:a 1.20 (too few runs for an interval)"
    assert line(text, "start to") == f"start to first completion s 1.00 1.20 3.00 {few}"
    assert line(text, "memory when loaded").startswith("memory when loaded MiB 1.00 1.00 1.00 ")
    assert line(text, "memory after").startswith("memory after the work MiB 2.00 2.00 2.00 ")


def test_work_is_named():
    assert [row.name for row in rows_from("shared,one,shared")] == ["shared", "one"]
    with pytest.raises(ValueError, match="no work 'two'; use some of one, prefill, eight"):
        rows_from("two")


def test_sixteen_requests_share_one_prefix():
    plan = ROWS["shared"].load.plan(PromptMaker("seed", "text"), sizes(2))
    words = [request.prompt.split(" ") for request in plan]
    assert len(words) == 16
    assert len({tuple(each[:768]) for each in words}) == 1
    assert len({tuple(each) for each in words}) == 16
