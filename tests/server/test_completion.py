"""One choice: text held back and released, scores, usage, and how it ends."""

import json
import random

import pytest

from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import RequestFailed
from ropewalk.server.openai.answers import Choice, CompletionWire, Usage, total_usage
from ropewalk.server.openai.scores import LOWEST_LOGPROB, spelled
from ropewalk.server.scheduling.request import FinishReason, Request, TokenEvent
from tests.server.toy import END, ByteTokenizer, score


def choice(prompt=b"ab", *, index=0, logprobs=None, **options) -> Choice:
    params = SamplingParams(max_tokens=99, logprobs=logprobs)
    request = Request(str(index), list(prompt), len(prompt), params, 0.0, random.Random(0))
    return Choice(index, request, ByteTokenizer(), **options)


def tokens(text: bytes, finish: FinishReason | None = None) -> list[TokenEvent]:
    """One event per byte; the last one carries `finish`."""
    ends = [None] * (len(text) - 1) + [finish]
    return [TokenEvent("0", token, end) for token, end in zip(text, ends, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("data", "stop", "text", "finish"),
    [
        (b"hello", (), "hello", "length"),
        ("añ世😀".encode(), (), "añ世😀", "length"),
        (b"one two three", ("two",), "one ", "stop"),
        (b"aaab", ("aab",), "a", "stop"),
        (b"ends with thr", ("three",), "ends with thr", "length"),
        ("x世".encode()[:-1], (), "x\ufffd", "length"),
        ("x世y".encode(), ("世",), "x", "stop"),
    ],
)
def test_pieces_join_to_the_text_for_any_split(size, data, stop, text, finish):
    one = choice(stop=stop)
    events = tokens(data, FinishReason.LENGTH)
    pieces = []
    for start in range(0, len(events), size):
        pieces.append(one.take(events[start : start + size]))
        if one.finished:
            break
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [finish]
    assert not any(stopping in "".join(piece.text for piece in pieces) for stopping in stop)


def test_a_stop_string_asks_for_a_cut_unless_the_engine_is_done():
    one = choice(stop=["b"])
    one.take(tokens(b"abc"))
    assert one.cut and one.tokens == 2
    two = choice(stop=["b"])
    two.take(tokens(b"ab", FinishReason.LENGTH))
    assert not two.cut and two.finished


@pytest.mark.parametrize(
    ("reason", "wire"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTEXT, "length"),
    ],
)
def test_finish_reasons_on_the_wire(reason, wire):
    assert choice().take([TokenEvent("0", None, reason)]).finish == wire


def test_errors_of_events_are_raised():
    with pytest.raises(RequestFailed):
        choice().take([TokenEvent("0", None, FinishReason.ERROR, error=RequestFailed("x"))])


def test_the_ending_token_is_scored_but_not_text():
    one = choice(logprobs=1)
    event = TokenEvent("0", END, FinishReason.STOP, logprob=score(END, 1))
    piece = one.take([event])
    assert (piece.text, one.tokens, piece.scored) == ("", 1, [(END, event.logprob)])


def test_usage():
    first, second = choice(b"abc"), choice(b"abc", index=1)
    for one, cached in ((first, 2), (second, 3)):
        one.take([TokenEvent("0", 65, cached_tokens=cached), TokenEvent("0", 66)])
    assert first.usage == Usage(3, 2, 2)
    assert total_usage([first, second], n=2) == Usage(3, 4, 2)
    assert total_usage([first, second], n=1) == Usage(6, 4, 5)


def test_impossible_tokens_have_a_finite_score():
    one = choice(logprobs=1)
    event = TokenEvent("0", 65, logprob=score(65, 1))
    low = event.logprob.__class__(65, float("-inf"), ((66, 0.0), (65, float("-inf"))))
    piece = one.take([TokenEvent("0", 65, logprob=low)])
    chunk = CompletionWire("id", "toy", 0).chunk(one, piece, "")
    assert str(LOWEST_LOGPROB) in chunk and "Infinity" not in chunk


def test_tokens_that_spell_the_same_keep_the_likelier_score():
    one = choice(logprobs=2)
    top = ((200, -1.0), (201, -2.0))  # both are bytes that are no character alone
    low = score(65, 1).__class__(65, -3.0, top)
    whole = CompletionWire("id", "toy", 0).whole
    done = one.take([TokenEvent("0", 65, FinishReason.LENGTH, logprob=low)])
    answer = json.loads(whole([(one, done)], Usage(1, 1, 0)))
    scores = answer["choices"][0]["logprobs"]
    assert scores["top_logprobs"] == [{"\ufffd": -1.0, "A": -3.0}]
    assert spelled(ByteTokenizer(), 200) == "\ufffd"
