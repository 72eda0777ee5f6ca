"""One choice on the wire: scores that JSON or a dictionary has no place for, and a full context."""

import json

from ropewalk.server.openai.answers import Choice, CompletionWire, Usage
from ropewalk.server.openai.scores import LOWEST_LOGPROB
from ropewalk.server.scheduling.request import FinishReason, TokenEvent, TokenLogprob
from tests.server.fake_engine import make_request
from tests.server.toy import ByteTokenizer


def answered(scored: TokenLogprob, finish: FinishReason = FinishReason.LENGTH) -> dict:
    """The whole answer of one token."""
    choice = Choice(0, make_request("a", b"ab", logprobs=2), ByteTokenizer())
    piece = choice.take([TokenEvent("a", scored.token, finish, logprob=scored)])
    whole = CompletionWire("id", "toy", 0).whole([(choice, piece)], Usage(1, 1, 0))
    assert b"Infinity" not in whole
    return json.loads(whole)["choices"][0]


def test_a_full_context_is_a_length_on_the_wire():
    assert answered(TokenLogprob(65, -1.0), FinishReason.CONTEXT)["finish_reason"] == "length"


def test_impossible_tokens_have_a_finite_score():
    low = TokenLogprob(65, float("-inf"), ((66, 0.0), (65, float("-inf"))))
    assert answered(low)["logprobs"]["token_logprobs"] == [LOWEST_LOGPROB]


def test_tokens_that_spell_the_same_keep_the_likelier_score():
    top = ((200, -1.0), (201, -2.0))  # both are bytes that are no character alone
    scores = answered(TokenLogprob(65, -3.0, top))["logprobs"]
    assert scores["top_logprobs"] == [{"\ufffd": -1.0, "A": -3.0}]
