import asyncio
import json
import socket
from dataclasses import replace

import pytest

from ropewalk.load_tests.client.client import (
    Server,
    Unreachable,
    complete,
    encode_request,
    fetch,
    get_json,
    split_base_url,
)
from ropewalk.load_tests.common.types import Outcome, Request
from tests.load_tests.sse_server import (
    HEAD,
    chunk,
    counts,
    event,
    good,
    serving,
    stream,
    text_event,
    usage_event,
    whole,
)

REQUEST = Request((5, 6, 7), 3, 2)
TEXTS = [text_event(" a"), text_event(" b")]
USAGE = usage_event(3, 2)
DONE = event("[DONE]")


def ask(answer, *, dialect="openai", request=REQUEST, pause_s=0.0, **options) -> Outcome:
    with serving(answer, pause_s) as running:
        server = Server("127.0.0.1", running.port, dialect=dialect, **options)
        return asyncio.run(complete(server, request))


def says(*events: bytes):
    return lambda path, body: stream(events)


def test_a_good_stream_counts_its_tokens_and_times():
    outcome = ask(good, pause_s=0.02, model="tiny")
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 2)
    (first, one), (second, two) = outcome.chunks
    assert (one, two) == (1, 2)
    assert outcome.intended == outcome.sent < first < second < outcome.ended
    assert outcome.ended - first > 0.01


def test_every_byte_in_its_own_packet():
    def bytewise(path, body):
        return [bytes([byte]) for byte in b"".join(good(path, body))]

    assert ask(bytewise, pause_s=0.0001).error is None


def test_only_chunks_with_text_are_chunks():
    empty, late = text_event(""), text_event("x")
    outcome = ask(says(empty, empty, empty, empty, late, USAGE, DONE), pause_s=0.02)
    assert outcome.error is None
    ((first, _),) = outcome.chunks
    assert first - outcome.sent > 0.08


def test_an_answer_without_text_is_seen_at_its_end():
    outcome = ask(says(text_event(""), USAGE, DONE))
    assert outcome.error is None
    assert outcome.chunks == ((outcome.ended, 2),)


def test_usage_in_a_chunk_says_how_many_tokens_it_brought():
    request = Request((5, 6, 7), 3, 5)
    chunks = [text_event("ab", counts(3, 2)), text_event("cde", counts(3, 5))]
    outcome = ask(says(*chunks, usage_event(3, 5), DONE), request=request)
    assert [tokens for _, tokens in outcome.chunks] == [2, 5]


def test_cached_tokens_are_what_the_server_says():
    assert ask(says(*TEXTS, usage_event(3, 2, cached=1), DONE)).cached_tokens == 1
    assert ask(says(*TEXTS, USAGE, DONE)).cached_tokens is None


def test_the_intended_start_is_kept_beside_the_real_one():
    with serving() as running:
        server = Server("127.0.0.1", running.port)
        outcome = asyncio.run(complete(server, REQUEST, intended=1.0))
    assert outcome.intended == 1.0
    assert outcome.sent > 1.0


def test_a_client_that_leaves_hangs_up_and_has_been_served():
    chunks = [text_event("x", counts(3, number)) for number in range(1, 9)]
    answer = [HEAD, *(chunk(data) for data in chunks), 60.0]
    outcome = ask(lambda path, body: answer, request=Request((5, 6, 7), 3, 99, leaves_after=4))
    assert (outcome.left, outcome.error) == (True, None)
    assert [tokens for _, tokens in outcome.chunks] == [1, 2, 3, 4]
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 4)


def test_a_client_that_could_not_leave_is_judged_like_any_other():
    patient = Request((5, 6, 7), 3, 2, leaves_after=9)
    whole_answer = ask(says(*TEXTS, USAGE, DONE), request=patient)
    assert (whole_answer.left, whole_answer.error) == (False, None)
    cut = ask(says(TEXTS[0]), request=patient)
    assert (cut.left, cut.error) == (False, "the stream ended without [DONE]")


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([*TEXTS, USAGE], "without \\[DONE\\]"),
        ([*TEXTS, DONE], "without a usage chunk"),
        ([TEXTS[0], usage_event(3, 1), DONE], "1 tokens instead of 2"),
        ([*TEXTS, event({"error": {"message": "no blocks"}}), USAGE, DONE], "no blocks"),
        ([event({"error": "worker died"})], "worker died"),
        ([event('{"error": "half'), USAGE, DONE], "not a completion chunk"),
        ([event("[" * 100_000), USAGE, DONE], "not a completion chunk"),
        ([b"data: \xff\xfe\n\n", USAGE, DONE], "not a completion chunk"),
        ([event([1, 2]), USAGE, DONE], "not a completion chunk"),
        ([event({"choices": [3]}), USAGE, DONE], "not a completion chunk"),
        ([*TEXTS, event({"usage": {"prompt_tokens": "x"}}), DONE], "not a completion chunk"),
        ([*TEXTS, USAGE, DONE, TEXTS[0]], "went on after \\[DONE\\]"),
        ([b"data: " + b"x" * 2_000_000, USAGE, DONE], "an event exceeds"),
    ],
)
def test_a_stream_that_went_wrong_is_a_failure(events, reason):
    error = ask(says(*events)).error
    assert error is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(error)


def test_the_word_error_in_the_text_is_no_error():
    assert ask(says(text_event("error"), text_event('"error": 1'), USAGE, DONE)).error is None


def test_a_refusal_shows_status_and_body():
    outcome = ask(lambda path, body: whole("429 Busy", {"error": {"message": "queue is full"}}))
    assert outcome.error is not None
    assert "status 429" in outcome.error
    assert "queue is full" in outcome.error


def test_a_connection_closed_in_the_middle_is_a_failure():
    outcome = ask(lambda path, body: [HEAD, chunk(TEXTS[0]), b"ff\r\ndata"])
    assert outcome.error == "the server closed the connection in the middle of its answer"


def test_bytes_that_are_not_http_are_a_failure():
    assert "not an HTTP/1.1" in str(ask(lambda path, body: [b"220 mail ready\r\n\r\n"]).error)


def test_a_connection_reset_before_the_head_is_a_failure():
    error = ask(lambda path, body: []).error
    assert error == "the server closed the connection before it answered"


def test_a_slow_server_is_given_up_after_the_limit():
    endless = [HEAD, *[chunk(TEXTS[0]), 0.02] * 200]
    outcome = ask(lambda path, body: endless, timeout_s=0.1)
    assert outcome.error == "no complete answer within 0.1 s"
    assert outcome.ended - outcome.sent >= 0.1


@pytest.mark.parametrize("before", [[], [HEAD], [HEAD, chunk(TEXTS[0])], [HEAD, chunk(DONE)]])
def test_a_server_that_stalls_is_given_up_after_the_idle_limit(before):
    outcome = ask(lambda path, body: [*before, 60.0], idle_s=0.1)
    assert outcome.error == "the server sent nothing for 0.1 s"
    assert outcome.ended - outcome.sent >= 0.1


def test_whoever_talks_is_not_idle():
    assert ask(good, pause_s=0.06, idle_s=0.15).error is None  # six pieces


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = Server("127.0.0.1", taken.getsockname()[1])
        outcome = asyncio.run(complete(server, REQUEST))
    assert "cannot connect" in str(outcome.error)


def test_what_is_sent():
    with serving() as running:
        server = Server("127.0.0.1", running.port, "tiny", api_key="k")
        asyncio.run(complete(server, REQUEST))
    assert running.bodies == [
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 2,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
        }
    ]
    assert "Authorization: Bearer k\r\n" in running.heads[0]


def test_more_fields_of_a_request_reach_the_wire():
    with serving() as running:
        server = Server("127.0.0.1", running.port)
        asyncio.run(complete(server, replace(REQUEST, extra={"overflow": "shift"})))
    assert running.bodies[0]["overflow"] == "shift"


def test_the_transformers_dialect_sends_no_unknown_field_and_needs_no_done():
    last = {"choices": [{"finish_reason": "length", "text": ""}]}
    last["usage"] = {"prompt_tokens": 2, "completion_tokens": 2}

    with serving(says(*TEXTS, event(last))) as running:
        server = Server("127.0.0.1", running.port, dialect="transformers")
        outcome = asyncio.run(complete(server, Request("a b", 2, 2)))
    assert outcome.error is None
    assert set(running.bodies[0]) == {"prompt", "max_tokens", "temperature", "stream"}


def test_fetch_posts_and_hands_back_the_body():
    bodies = []

    def answer(path, body):
        bodies.append((path, body))
        return whole("200 OK", "done")

    with serving(answer) as running:
        server = Server("127.0.0.1", running.port)
        assert asyncio.run(fetch(server, "POST", "/flush", {"model": "m"})) == b'"done"'
    assert bodies == [("/flush", {"model": "m"})]


def test_get_json_reads_and_refuses():
    def answer(path, body):
        pages = {"/good": whole("200 OK", {"a": 1}), "/bad": whole("404 No", {})}
        return pages.get(path, [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n<"])

    with serving(answer) as running:
        server = Server("127.0.0.1", running.port)
        assert asyncio.run(get_json(server, "/good")) == {"a": 1}
        with pytest.raises(Unreachable, match="status 404"):
            asyncio.run(get_json(server, "/bad"))
        with pytest.raises(Unreachable, match="right port"):
            asyncio.run(get_json(server, "/page"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("http://localhost:81/v1/", ("localhost", 81)),
        ("box:9", ("box", 9)),
        ("http://box", ("box", 80)),
        ("http://box:0", ("box", 0)),
        ("http://[::1]:81", ("::1", 81)),
    ],
)
def test_base_urls(url, expected):
    assert split_base_url(url) == expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", ""),
        ("ftp://box", ""),
        ("https://box:1", "without a path is spoken; give the address behind the"),
        ("http://box/api", "without a path is spoken; give the address behind the"),
    ],
)
def test_other_urls_are_refused(url, reason):
    with pytest.raises(ValueError, match=f"is not a base URL.*{reason}"):
        split_base_url(url)


def test_the_host_of_an_ipv6_address_has_brackets():
    server = Server("::1", 81)
    assert b"\r\nHost: [::1]:81\r\n" in encode_request(server, "GET", "/health")
    assert split_base_url(server.url) == ("::1", 81)


def test_no_connection_is_left_open():
    with serving(pause_s=0.01) as running:
        server = Server("127.0.0.1", running.port)

        async def several() -> list[Outcome]:
            return await asyncio.gather(*(complete(server, REQUEST) for _ in range(8)))

        assert all(outcome.error is None for outcome in asyncio.run(several()))
        assert running.most_in_flight == 8
    assert running.in_flight == 0
    assert all("Connection: close" in head for head in running.heads)
    assert len({json.dumps(body) for body in running.bodies}) == 1
