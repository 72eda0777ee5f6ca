"""What Ray's proxy and controller are told. Nothing here needs Ray but the replica's options."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ropewalk.server.errors import UsageError
from ropewalk.server.ray.proxy import BEGINNING, Finished, Keyed, session
from ropewalk.server.ray.scaling import BySequences

SYSTEM, HI = {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}
MORE = [{"role": "assistant", "content": "yes?"}, {"role": "user", "content": "why?"}]
LONG = "long " * BEGINNING
DIGITS, DEEP = b'{"prompt":[%s]}' % (b"9" * 9000), b'{"prompt":' + b"[" * 9000


def named(**fields) -> str | None:
    return session(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"messages": [HI]}, {"messages": [HI, *MORE], "stream": True, "n": 2}, True),
        ({"messages": [SYSTEM, HI]}, {"messages": [SYSTEM, HI, *MORE]}, True),
        ({"messages": [SYSTEM, HI]}, {"messages": [HI]}, False),
        ({"messages": [HI], "model": "a"}, {"messages": [HI], "model": "b"}, False),
        ({"messages": [HI], "system": "a"}, {"messages": [HI], "system": "b"}, False),
        ({"input": "hi", "instructions": "a"}, {"input": "hi", "instructions": "b"}, False),
        ({"prompt": f"{LONG} why?"}, {"prompt": f"{LONG} how?"}, True),
        ({"prompt": f"why? {LONG}"}, {"prompt": f"how? {LONG}"}, False),
        ({"prompt": [*range(BEGINNING), 1]}, {"prompt": [*range(BEGINNING), 2]}, True),
        ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "b", "prompt_cache_key": "k"}, True),
        ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "a", "prompt_cache_key": "l"}, False),
        ({"prompt": [1, 2]}, {"prompt": [2, 1]}, False),
        ({"prompt": [[1, 2], [3]]}, {"prompt": [[1, 2], [4]]}, False),
    ],
)
def test_prompts_that_begin_alike_share_a_session(one, other, same):
    assert named(**one) is not None and (named(**one) == named(**other)) is same


def test_a_long_body_is_named_by_its_beginning():
    whole = json.dumps({"messages": [HI | {"content": "é" * 3000}]}, ensure_ascii=False).encode()
    assert session(whole) is not None
    assert {session(whole[:cut]) for cut in range(4000, 4010)} == {session(whole)}


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{}", b"no JSON", b'{"messages":[]}', b"\xff", DIGITS, DEEP]
)
def test_a_body_without_a_prompt_has_no_session(body):
    assert session(body) is None


def asked(app, messages, *, path="/v1/chat/completions", headers=(), wrapped=Keyed, **options):
    """(What the client got, the scope that `app` saw, the messages that it received)."""
    arriving, sent, seen = iter(messages), [], {}

    async def receive():
        found = next(arriving, None)
        if found is None:
            await asyncio.sleep(60)
        return found

    async def send(message):
        sent.append(message)

    async def inner(scope, receive, send):
        seen["scope"] = scope
        await app(scope, receive, send)

    scope = {"type": "http", "path": path, "headers": list(headers)}
    asyncio.run(wrapped(inner, **options)(scope, receive, send))
    return sent, seen.get("scope")


def part(body: bytes, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


BODY = json.dumps({"messages": [SYSTEM, HI]}).encode()
PARTS = [part(BODY[:9], True), part(BODY[9:], True), part(b"")]


@pytest.mark.parametrize(
    ("path", "headers", "added"),
    [
        ("/v1/chat/completions", (), True),
        ("/llm/v1/messages/", (), True),
        ("/v1/embeddings", (), False),
        ("/v1/chat/completions", [(b"x-session-id", b"mine")], False),
    ],
)
def test_a_session_is_added_and_the_body_arrives_as_it_was_sent(path, headers, added):
    received = []

    async def app(scope, receive, send):
        for _ in PARTS:
            received.append(await receive())

    _, scope = asked(app, PARTS, path=path, headers=headers)
    own = [(b"x-session-id", (session(BODY) or "").encode())] if added else []
    assert scope["headers"] == [*headers, *own]
    assert received == PARTS


def test_a_body_that_does_not_arrive_is_refused_before_it_is_routed():
    sent, scope = asked(None, PARTS[:1], seconds=0.05)
    assert scope is None and sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


def start(kind: bytes) -> dict:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def chunk(body: bytes, more: bool) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


EVENTS = b"text/event-stream; charset=utf-8"
STREAM = [start(EVENTS), chunk(b"data: 1\n\n", True)]


@pytest.mark.parametrize(
    ("answers", "path", "added"),
    [
        ([], "/v1/completions", [503, '"code": "not_ready"']),
        ([], "/v1/messages", [503, '"type": "overloaded_error"']),
        (STREAM, "/v1/completions", ['data: {"error": {"message"']),
        (STREAM, "/v1/messages", ['event: error\ndata: {"type": "error"']),
        ([*STREAM, chunk(b"", False)], "/v1/completions", []),
        ([start(b"application/json"), chunk(b"{", True)], "/v1/models", []),
    ],
)
def test_what_a_lost_replica_leaves_ends_with_an_error(answers, path, added):
    async def app(scope, receive, send):
        for message in answers:
            await send(message)

    sent, _ = asked(app, [], path=path, wrapped=Finished)
    assert sent[: len(answers)] == answers
    found = [each.get("status") or each["body"].decode() for each in sent[len(answers) :]]
    assert len(found) == len(added)
    for have, want in zip(found, added, strict=True):
        assert have == want if isinstance(want, int) else want in have


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(429, 429, "queue_full"), (503, 503, "not_ready"), (408, 504, "deadline_exceeded")],
)
def test_ray_s_own_refusals_are_told_as_the_api_tells_them(status, told, code):
    async def app(scope, receive, send):
        head = [(b"content-type", b"text/plain"), (b"retry-after", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send(chunk(b"Request dropped due to backpressure", False))

    (begun, body), _ = asked(app, [], wrapped=Finished)
    assert (begun["status"], json.loads(body["body"])["error"]["code"]) == (told, code)
    assert dict(begun["headers"]).get(b"retry-after") == {429: b"7", 503: b"5"}.get(told)


def test_an_id_that_is_there_twice_is_told_once():
    async def app(scope, receive, send):
        await send(start(EVENTS) | {"headers": [(b"x-request-id", b"a"), [b"x-request-id", b"a"]]})
        await send(chunk(b"", False))

    sent, _ = asked(app, [], wrapped=Finished)
    assert sent[0]["headers"] == [(b"x-request-id", b"a")]


def test_nobody_is_told_who_has_left():
    async def app(scope, receive, send):
        await send(STREAM[0])
        await receive()

    sent, _ = asked(app, [{"type": "http.disconnect"}], wrapped=Finished)
    assert sent == STREAM[:1]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [({}, 3), ({"a": 0, "b": 0}, 0), ({"a": 32, "b": 0}, 1), ({"a": 70, "b": 10}, 3)],
)
def test_there_are_as_many_replicas_as_the_sequences_need(found, wanted):
    metrics = {"sequences": found} if found else None
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)
    assert BySequences(most=32)(context) == (wanted, {})


def test_a_replica_takes_the_options_of_serve_but_not_those_of_its_socket():
    pytest.importorskip("ray.serve")
    from ropewalk.server.ray.application import application, configuration

    found = configuration({"models": ["ropewalk-rope"], "kv_memory": "1GiB", "max_seqs": 8})
    assert (found.cache.kv_memory, found.limits.max_seqs) == (1 << 30, 8)
    assert found.http.allowed_hosts == frozenset()
    with pytest.raises(UsageError, match="not an option of a replica"):
        application({"port": 9000})
    with pytest.raises(UsageError, match="not an option of ropewalk serve"):
        application({"kv_size": 1})


@pytest.mark.parametrize(
    ("alive", "failure", "unsound", "why"),
    [
        (True, None, None, None),
        (False, "The engine failed.", None, "The engine failed."),
        (False, None, None, "not making progress"),
        (True, None, "4 cached blocks changed", "4 cached blocks changed"),
    ],
)
def test_ray_learns_whether_a_replica_is_well_and_what_it_has_to_do(alive, failure, unsound, why):
    pytest.importorskip("ray.serve")
    from ropewalk.server.ray.application import Replica

    engine = SimpleNamespace(alive=alive, failure=failure, unsound=unsound, active=lambda: 5)
    replica = SimpleNamespace(_made=SimpleNamespace(engine=engine))
    assert asyncio.run(Replica.record_autoscaling_stats(replica)) == {"sequences": 5}
    with pytest.raises(RuntimeError, match=why) if why else nullcontext():
        asyncio.run(Replica.check_health(replica))
