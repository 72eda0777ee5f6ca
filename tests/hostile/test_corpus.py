"""Every hostile checkpoint is refused in one sentence, or loads: soon, and in little memory."""

import random

import pytest

from tests.hostile.corpus import cases
from tests.hostile.judge import run

NAMES = [case.name for case in cases()]
VALID = [name for name in NAMES if name.startswith("valid")]  # what the others were made from
SAMPLE = sorted(random.Random(43).sample(NAMES, 15))


def faults(verdicts):
    return [f"{each.case}: {each.fault}: {each.outcome[:2000]}" for each in verdicts if each.fault]


def test_the_corpus_is_large():
    assert len(NAMES) == len(set(NAMES)) >= 200


def test_a_sample_of_the_corpus():
    verdicts = run([*VALID, *SAMPLE], seed=0, jobs=1)
    assert faults(verdicts) == []
    assert [each.outcome for each in verdicts if each.case in VALID] == ["loaded"] * len(VALID)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_whole_corpus():
    assert faults(run(NAMES, seed=0, jobs=2)) == []
