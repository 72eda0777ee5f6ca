import math

import numpy as np
import pytest

from ropewalk.load_tests.common.statistics import figures
from ropewalk.load_tests.common.types import Outcome, Point, Profile, Run
from ropewalk.load_tests.report.differences import (
    Difference,
    corrected,
    difference,
    paired,
    unknown,
)

POINT = Point("longctx", "512", 512)
SYNC = Profile("sync")
TRIALS = 200


def run_at(seconds, round, variant="rope", *, lag=0.0, gaps=(0.01,)):
    """One request whose TTFT is `seconds`."""
    times = [seconds + sum(gaps[:index]) for index in range(len(gaps) + 1)]
    outcome = Outcome(
        intended=0.0,
        sent=lag,
        ended=times[-1],
        chunks=tuple((time, index) for index, time in enumerate(times, 1)),
        prompt_tokens=512,
        output_tokens=len(times),
    )
    return Run(variant, POINT, SYNC, round, (outcome,), 0.0, times[-1])


def runs_at(*seconds, variant="rope", **changes):
    return [run_at(value, round, variant, **changes) for round, value in enumerate(seconds)]


def compared(baseline, variant, metric):
    return paired(
        *({run.round: figures(run) for run in runs} for runs in (baseline, variant)), metric
    )


def test_runs_are_compared_within_their_round():
    drift = (1.0, 1.6, 1.2, 0.9)  # a machine whose speed changes by more than the variants differ
    slow = runs_at(*(1.2 * each for each in drift))
    found = compared(runs_at(*drift), slow, "ttft_p50")
    assert found.verdict == "slower"
    assert found.value == pytest.approx(1.2)
    assert found.low <= 1.2 <= found.high
    shuffled = compared(runs_at(*drift), list(reversed(slow)), "ttft_p50")
    assert shuffled == found  # by round number, not by place


def test_less_throughput_is_slower():
    found = compared(runs_at(1, 1, 1), runs_at(2, 2.01, 1.99), "output_tokens_per_s")
    assert found.verdict == "slower"
    assert found.value == pytest.approx(0.5, rel=0.02)
    assert compared(runs_at(2, 2, 2), runs_at(1, 1, 1), "ttft_p50").verdict == "faster"


def test_noise_as_large_as_the_difference_is_no_compared():
    found = compared(runs_at(1, 1, 1), runs_at(1.3, 0.9, 1.1), "ttft_p50")
    assert found.verdict == "no difference"
    assert found.low < 1 < found.high


def test_equal_figures_are_no_compared():
    found = compared(runs_at(1, 1, 1), runs_at(1, 1, 1), "ttft_p50")
    assert (found.verdict, found.value) == ("no difference", 1.0)


def test_what_cannot_be_concluded_is_said():
    few = compared(runs_at(1, 1), runs_at(2, 2), "ttft_p50")
    assert (few.verdict, few.reason[:8]) == ("unknown", "2 rounds")
    other_rounds = [run_at(1, round) for round in (7, 8, 9)]
    none = compared(runs_at(1, 1, 1), other_rounds, "ttft_p50")
    assert (none.verdict, none.reason) == ("unknown", "no round has this figure")
    late = compared(runs_at(1, 1, 1), runs_at(2, 2, 2, lag=0.2), "ttft_p50")
    assert (late.verdict, late.reason[:20]) == ("unknown", "the client sent late")
    absent = compared(runs_at(1, 1, 1, gaps=()), runs_at(1, 1, 1), "itl_p50")
    assert absent.verdict == "unknown"


def test_verdicts_read_together_need_more_evidence():
    def verdicts(*chances):
        alone = [Difference(1.1, 1.0, 1.2, p, "slower" if p <= 0.05 else "no difference")
                 for p in chances]  # fmt: skip
        return [d.verdict for d in corrected([*alone, unknown("late")])]

    assert verdicts(0.04) == ["slower", "unknown"]
    assert verdicts(0.04, 0.5, 0.6, 0.7) == ["no difference"] * 4 + ["unknown"]
    assert verdicts(0.04, 0.04) == ["slower", "slower", "unknown"]
    assert verdicts(0.001, 0.2, 0.9) == ["slower", "no difference", "no difference", "unknown"]


def logs(source, rounds, *, heavy):
    """log(variant / baseline) of `rounds` rounds of a drifting machine; 4 requests of 16 gaps each
    run.

    Rounds differ by up to 1.6 times. Between the two runs of a round the speed wanders by 3 %,
    requests of one run share 2 %, and every gap has 10 % of its own: one in twenty of them, in
    the heavy case, is several times as long, and some runs are disturbed as a whole.
    """
    round = source.uniform(0, math.log(1.6), (rounds, 1))
    run = 0.03 * source.standard_normal((rounds, 2))
    if heavy:
        run = 0.03 * source.standard_t(3, (rounds, 2))
    request = 0.02 * source.standard_normal((rounds, 2, 4, 1))
    gap = 0.1 * source.standard_normal((rounds, 2, 4, 16))
    if heavy:
        gap += np.where(source.random(gap.shape) < 0.05, source.pareto(2.0, gap.shape), 0.0)
    gaps = np.exp((round + run)[..., None, None] + request + gap)
    tpot = np.median(gaps.mean(3), axis=2)
    return np.log(tpot[:, 1] / tpot[:, 0])


def alarms(rounds, *, heavy=False, effect=0.0):
    """Share of trials with a verdict other than no difference."""
    source = np.random.default_rng(rounds)
    trials = [difference([logs(source, rounds, heavy=heavy) + effect], "x") for _ in range(TRIALS)]
    return sum(trial.verdict != "no difference" for trial in trials) / TRIALS


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_false_alarms_stay_at_their_level(rounds, heavy):
    assert alarms(rounds, heavy=heavy) <= 0.1


@pytest.mark.parametrize(("rounds", "at_least"), [(5, 0.5), (10, 0.9)])
def test_a_tenth_more_is_found(rounds, at_least):
    assert alarms(rounds, effect=math.log(1.1)) >= at_least


def test_false_alarms_between_two_results():
    source = np.random.default_rng(4)
    trials = [difference([logs(source, 5, heavy=False), logs(source, 5, heavy=True)], "x")
              for _ in range(TRIALS)]  # fmt: skip
    assert sum(trial.verdict != "no difference" for trial in trials) / TRIALS <= 0.1
