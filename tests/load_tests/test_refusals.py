import asyncio

import pytest

from ropewalk.load_tests.client.client import Server
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.run.runner import why_not
from tests.load_tests.sse_server import good, serving, whole

SHIFT = {"overflow": "shift"}


def asked(request, *, context, answer=good):
    with serving(answer) as running:
        server = Server("127.0.0.1", running.port, "tiny")
        reason = asyncio.run(why_not(server, context, [request]))
    return reason, running.bodies


def made(prompt_tokens, output_tokens, **extra):
    return Request(tuple(range(prompt_tokens)), prompt_tokens, output_tokens, extra=extra)


def test_what_fits_is_measured_and_nothing_is_asked():
    assert asked(made(60, 40), context=100) == (None, [])
    assert asked(made(60, 40), context=None) == (None, [])
    assert asked(Request("some words", None, 40), context=100) == (None, [])


def test_what_does_not_fit_is_not():
    assert asked(made(60, 41), context=100) == (
        "its context holds 100 tokens, but this needs 101",
        [],
    )


def test_a_shift_is_tried_on_one_token():
    reason, (body,) = asked(made(60, 80, **SHIFT), context=100)
    assert reason is None
    assert (body["prompt"], body["max_tokens"], body["overflow"]) == ([0], 1, "shift")


@pytest.mark.parametrize("prompt", [(1, 2, 3), "some words"])
def test_a_server_that_refuses_says_why(prompt):
    def refuse(path, body):
        error = {"message": 'keys hold "their" position.', "filler": "x" * 400}
        return whole("400 Bad Request", {"error": error})

    request = Request(prompt, 3, 400, extra=SHIFT)
    reason, _ = asked(request, context=100, answer=refuse)
    assert reason == 'keys hold "their" position'


def test_an_answer_of_another_form_is_quoted():
    reason, _ = asked(
        made(3, 400, **SHIFT), context=100, answer=lambda path, body: whole("404 Not Found", "no")
    )
    assert reason == 'status 404: "no"'


def test_a_shift_needs_a_prompt_that_fits():
    assert "this needs 101" in asked(made(100, 40, **SHIFT), context=100)[0]
    assert asked(made(99, 40, **SHIFT), context=100)[0] is None
