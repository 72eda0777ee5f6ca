"""What is said follows from the numbers: made-up ones, whose finding is known."""

import math
from dataclasses import replace

import pytest

from ropewalk.model.family.evaluation.curves import Curve, Point
from ropewalk.model.family.evaluation.losses import LossBin
from ropewalk.model.family.evaluation.report.card import text, write
from ropewalk.model.family.evaluation.report.findings import (
    Beyond,
    about_length,
    differing,
    verdict,
)
from ropewalk.model.family.evaluation.report.pictures import look, pictures
from ropewalk.model.family.evaluation.report.tables import seeds, training
from ropewalk.model.family.evaluation.results import Evaluation, Measured
from ropewalk.model.family.training.recipe import ENCODINGS
from ropewalk.report.statistics import Estimate
from tests.model.family.evaluation.made_up import family, losses, measured


@pytest.mark.parametrize(
    ("costs", "half", "expected"),
    [
        ([0.0, -0.2], 0.02, Beyond.HOLDS),
        ([0.0, 0.04], 0.02, Beyond.OPEN),
        ([0.02, 0.1, 0.0], 0.02, Beyond.DEGRADES),
        ([1.5], 0.02, Beyond.BREAKS),
        ([1.1], 0.2, Beyond.DEGRADES),  # not more than 1 for certain
        ([0.6], 0.6, Beyond.OPEN),
        (None, 0.02, Beyond.REFUSES),
    ],
)
def test_a_verdict_needs_its_whole_interval(costs, half, expected) -> None:
    own = replace(measured("x", [0.0]), losses=losses(costs, half=half))
    found = verdict(own)
    assert found is not None and found.beyond is expected


def test_every_length_counts_and_not_the_worst_alone() -> None:
    def changed(*costs):
        bins = losses([0.0]).bins
        first = next(n for n, one in enumerate(bins) if one.change is not None)
        changes = [replace(b, change=c) for b, c in zip(bins[first:], costs, strict=False)]
        whole = replace(losses([0.0]), bins=(*bins[:first], *changes))
        return replace(measured("x", [0.0]), losses=whole)

    narrow, wide = Estimate(0.04, 0.035, 0.045), Estimate(0.035, 0.0, 0.07)
    found = verdict(changed(narrow, wide))
    assert found is not None and found.beyond is Beyond.OPEN
    certain, unsure = Estimate(0.3, 0.25, 0.35), Estimate(0.6, 0.0, 1.2)
    found = verdict(changed(certain, unsure))
    assert found is not None and found.beyond is Beyond.DEGRADES
    assert found.worst is not None and found.worst.change == unsure
    assert found.first is None  # further on it is not certain
    found = verdict(changed(unsure, certain, certain))
    assert found is not None and found.first is not None and found.first.change == certain
    assert found.first.start == 640


def test_the_literature_is_confirmed_or_contradicted_by_numbers() -> None:
    assert differing(family().members) == []
    rope = measured("rope", [0.0])
    alibi = measured("alibi", [0.0, 0.3])
    own = measured("mine", [2.0])  # of which nothing was published
    assert differing([rope, alibi, own]) == ["rope", "alibi"]
    assert "differs from the literature**, by which it degrades" in about_length(rope)
    said = about_length(alibi)
    assert said.startswith("alibi degrades: at worst +0.30 nats per token (+0.28 to +0.32)")
    assert "more than 0.05 from position 640 on" in said
    assert "literature" not in about_length(own) and "published" not in about_length(own)
    open_yet = replace(measured("t5", [0.0]), losses=losses([0.04], half=0.02))
    assert differing([open_yet]) == []
    assert about_length(open_yet).endswith("512 to 640.")  # neither as published nor otherwise
    assert about_length(measured("learned", None)) == (
        "learned refuses past 512 tokens: it has no more positions. That is as published."
    )
    assert about_length(replace(own, losses=None)).endswith("not measured past the trained length.")


def straight(label, tokens, seed=None, until=100):
    """Comes down to 3 after so many million tokens, and is trained with `until` million."""
    points = tuple(
        Point(10**6 * step, 60.0 * step, 6 - 3 * min(step / tokens, 1))
        for step in range(1, until + 1)
    )
    return replace(measured(label, [0.0], seed=seed), curve=Curve(100, points, ()))


def test_trainings_are_listed_by_their_tokens() -> None:
    long = [straight("rope", 40), straight("t5", 60)]
    short = [straight(label, n, seed=1, until=50) for label, n in (("rope", 20), ("t5", 10))]
    alone = straight("nope", 5, seed=2, until=50)
    rows = training([*short, alone, *long]).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == ["100.0 M"] * 2 + ["50.0 M"] * 3


def test_a_seed_that_was_trained_for_less_says_so() -> None:
    rope, other, *_ = family().members
    short = replace(other, curve=Curve(9, (Point(10**6, 5.0, 4.0),), ()))
    assert seeds(rope, [rope, short]) == "3.55 at 1.0 M"
    assert seeds(rope, [rope, other]) == "3.55"


def test_a_training_too_short_for_a_comparison_is_in_the_table() -> None:
    short = replace(measured("t5", [0.0]), curve=Curve(9, (Point(40_000, 60.0, 7.0),), ()))
    row = training([measured("rope", [0.0]), short]).splitlines()[-1]
    assert row == "| ropewalk-t5 | 9 | 0.0 M | 1 | 7.000 | not measured |"
    assert training([replace(short, curve=None)]) == "not measured"


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_model_that_is_lost_past_its_length_breaks(all_of_them, tmp_path) -> None:
    bins = losses([0.0]).bins
    first = next(n for n, one in enumerate(bins) if one.change is not None)
    nothing = (Estimate(math.nan, math.nan, math.nan),) * 3
    until = len(bins) if all_of_them else first + 1
    lost = [LossBin(one.start, one.stop, *nothing) for one in bins[first:until]]
    whole = replace(losses([0.0]), bins=(*bins[:first], *lost, *bins[until:]))
    own = replace(measured("x", [0.0]), losses=whole, recalls=None, curve=None)
    found = verdict(own)
    assert found is not None and found.beyond is Beyond.BREAKS and found.worst == lost[0]
    card, *drawn = write(replace(family(), members=(own,)), None, None, tmp_path)
    assert "x breaks" in card.read_text() and drawn


def test_a_card_without_figures_says_so() -> None:
    whole = family()
    bare = tuple(
        Measured(one.name, one.label, one.seed, one.digest, one.encoding, 7, one.config)
        for one in whole.members
    )
    card = text(Evaluation(1, "f", whole.sizes, bare), None)
    for section in card.split("\n## ")[2:-2]:
        assert "not measured" in section, section
    assert "svg" not in card


def test_a_card_has_every_figure_and_models_of_any_name() -> None:
    own = measured("kerple", [0.0], memory=500)
    card = text(replace(family(), members=(*family().members, own)), "the data card")
    assert "| ropewalk-kerple | kerple | scale 4.0, layout split | 4,300,000 |" in card
    assert "| 512 tokens, learned |" in card and "| 1,024 tokens, learned | refused |" in card
    assert "| learned | shift | impossible | refused |" in card
    assert "| ropewalk-rope.seed1 | 4,882 | 40.0 M | 40 |" in card
    assert "| rope | float32 | 4 of 1,023 | 3.61234 | 3.61234 | 2e-07 |" in card
    assert "+0.02 (0.00 to +0.04)" in card
    assert "- Held-out loss above 3.6 nats: learned and nope." in card and "the data card" in card
    assert "\n| position | 512 to 640 | 640 to 768 |" in card
    assert "| encoding | held-out loss | more than rope | other seeds |" in card
    assert "| rope | 3.55 (3.35 to 3.75) |  | 3.55 |" in card
    assert "| learned | 3.85 (3.65 to 4.05) | +0.30 (+0.30 to +0.30) | not measured |" in card
    assert "- t5: *My friends,* the sea is blue.\n" in card
    assert "| t5 | 4.1 | 3.5000 | 3.5012 | +0.0012 |" in card
    assert "in the notes" not in card  # nothing differs


def test_colours_are_those_of_the_encoding_in_every_picture() -> None:
    labels = ["kerple", "rope", "fire"]
    assert look("rope", labels) == look("rope", ["rope"])
    assert len({look(label, [*labels, *ENCODINGS]) for label in (*labels, *ENCODINGS)}) == 8
    assert [one.key for one in pictures(family().members)] == [
        "loss",
        "recall",
        "training",
        "operations",
    ]
    assert pictures([replace(measured("t5", [0.0]), curve=None)])[-1].key == "operations"
