"""Answers after cache operations: zero where nothing is lost, refusals where it cannot be done."""

import pytest

from ropewalk.cache.types import Capability
from ropewalk.model.family.evaluation import shortened
from ropewalk.model.family.evaluation.texts import texts_of
from tests.model.family.evaluation.trained import ENCODINGS, TRAINED, corpus, random_decoder

TEXTS = texts_of(corpus().held_out, TRAINED + 3 * 16 + 1, 3)


@pytest.fixture(autouse=True)
def few_slides(monkeypatch):
    monkeypatch.setattr(shortened, "SLIDES", (1, 3))
    assert len(TEXTS.tokens[0]) > shortened.needed(TRAINED)


def measured(encoding: str, **changes):
    decoder = random_decoder(ENCODINGS[encoding], **changes)
    calls = []
    found = shortened.measure(decoder, TEXTS, TRAINED, calls.append)
    refused = any(one.refusal for one in found)
    assert len(calls) == (0 if refused else shortened.CASES * len(TEXTS.tokens))
    return {(one.operation, one.times): one for one in found}


@pytest.mark.parametrize("encoding", ["rope", "t5", "alibi", "nope"])
def test_what_follows_differs_by_what_deeper_layers_still_know(encoding) -> None:
    found = measured(encoding)
    assert set(found) == {("shift", 1), ("slide", 1), ("slide", 3), ("move", 1)}
    for one in found.values():
        assert one.refusal == "" and one.divergence is not None and one.loss is not None
        assert 1e-6 < one.divergence.low <= one.divergence.value <= one.divergence.high < 5


@pytest.mark.parametrize("encoding", ["rope", "t5", "alibi", "nope"])
def test_with_one_layer_nothing_differs(encoding) -> None:
    """The first layer's keys and values know their own token and, turned, their position."""
    for one in measured(encoding, layers=1).values():
        assert one.divergence is not None and abs(one.divergence.high) < 1e-5
        assert one.loss is not None and abs(one.loss.value) < 1e-3


@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_absolute_encodings_refuse(encoding) -> None:
    for one in measured(encoding).values():
        assert one.capability == Capability.IMPOSSIBLE.value
        assert "the position is part of" in one.refusal and one.divergence is None
