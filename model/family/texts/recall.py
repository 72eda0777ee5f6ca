"""Synthetic texts that can only be completed from earlier context: how far back does a model look?

Two kinds. *Pairs*: who keeps what where, asked later. *Copy*: words to remember, to be repeated
later. Filler stands between. Every text ends with the answer, so a model is prompted with what
comes before `question`; `distance` is measured in the caller's own unit.
"""

import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Measure = Callable[[str], int]  # such as a text's tokens; should be nearly additive over sentences
_TOLD = tomllib.loads(Path(__file__).with_name("recall.toml").read_text(encoding="utf-8"))
_NAMES, _THINGS, _PLACES, _DOERS = (
    _TOLD[kind].split() for kind in ("names", "things", "places", "doers")
)
_DEEDS, _TIMES = _TOLD["deeds"], _TOLD["times"]
FACTS, OTHERS, WORDS = 6, 3, 8  # pairs in a text, questions before the last, words to copy
KINDS = ("pairs", "copy")


@dataclass(frozen=True, slots=True)
class Recall:
    """`text[question:]` is the answer and a full stop; `distance` is how far back it was stated.

    In the measure's unit, from the end of that statement to the question.
    """

    kind: str
    text: str
    question: int  # in characters
    answer: str  # with its leading space
    distance: int


def recalls(seed: int, distances: Iterator[int], measure: Measure) -> Iterator[Recall]:
    """One text per distance, pairs and copies alternating; deterministic in the arguments.

    A text's actual distance is the wanted one or up to a sentence more, and at least the length
    of the last question.
    """
    drawn = random.Random(seed)
    counted = cache(measure)
    for number, distance in enumerate(distances):
        make = _pairs if number % 2 == 0 else _copy
        yield make(drawn, distance, counted)


def _pairs(drawn: random.Random, distance: int, measure: Measure) -> Recall:
    names, things = drawn.sample(_NAMES, FACTS), drawn.sample(_THINGS, FACTS)
    places = drawn.sample(_PLACES, FACTS)
    facts = [
        f" {name} keeps the {thing} in the {place}."
        for name, thing, place in zip(names, things, places, strict=True)
    ]
    asked = [
        f" Where does {name} keep the {thing}? In the"
        for name, thing in zip(names, things, strict=True)
    ]
    # As many facts and other questions in between as fit; but not all, as a question must not
    # precede its fact.
    room = max(distance - max(map(measure, asked)), 0)
    later = drawn.randint(0, min(FACTS - 1, room // (2 * max(map(measure, facts)))))
    target = FACTS - 1 - later
    others = [f"{asked[one]} {places[one]}." for one in range(FACTS) if one != target]
    fit = (room - sum(map(measure, facts[target + 1 :]))) // max(map(measure, others))
    others = drawn.sample(others, max(min(fit, OTHERS), 0))
    between = facts[target + 1 :]
    fixed = sum(map(measure, [*between, *others, asked[target]]))
    between += [*_filler(drawn, distance - fixed, measure), *others, asked[target]]
    return _finished("pairs", facts[: target + 1], between, f" {places[target]}", measure)


def _copy(drawn: random.Random, distance: int, measure: Measure) -> Recall:
    words = drawn.sample([*_THINGS, *_PLACES], WORDS)
    said = f" Remember these words: {' '.join(words)}."
    cue = " Say the words again:"
    between = [*_filler(drawn, distance - measure(cue), measure), cue]
    return _finished("copy", [said], between, f" {' '.join(words)}", measure)


def _finished(
    kind: str, before: list[str], between: list[str], answer: str, measure: Measure
) -> Recall:
    prompt = "".join([*before, *between]).lstrip()
    distance = sum(map(measure, between))
    return Recall(kind, f"{prompt}{answer}.\n", len(prompt), answer, distance)


def _filler(drawn: random.Random, wanted: int, measure: Measure) -> list[str]:
    found: list[str] = []
    held = 0
    while held < wanted:
        found.append(f" {drawn.choice(_TIMES)} the {drawn.choice(_DOERS)} {drawn.choice(_DEEDS)}.")
        held += measure(found[-1])
    return found
