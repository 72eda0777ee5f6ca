"""What caches hold and what operations on them would cost, over HTTP."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from ropewalk.cache.types import Capability
from ropewalk.model.encodings.base import names
from ropewalk.server.scheduling.request import Overflow
from tests.model import encoder_decoders
from tests.model.checkpoints import llama, random_model, save
from tests.model.tiny import CONFIG
from tests.server.fake_engine import (
    BLOCK,
    SPEED,
    engine_app,
    load_one,
    make_engine,
    make_planner,
    make_request,
    slowly,
)
from tests.server.toy import (
    LABELS,
    ScriptedEngine,
    ask,
    asking,
    error_of,
    sample,
    toy,
    toy_app,
    wait_for,
)

ENTRIES = 2 * 3 * 2  # of a token: keys and values of 3 layers of 2 heads
BYTES = ENTRIES * 8 * 4
SHIFT = {"operation": "evict_renumber", "tokens": 38, "first": 4, "count": 8}
MOVE = {"operation": "move_span", "tokens": 38, "first": 4, "count": 8, "offset": 4}
MOVES = ("out", "back", "changed")
JSON = {"content-type": "application/json"}  # which no other site's form can send


class Standing(ScriptedEngine):
    """Engines that somebody else steps, to be looked at."""

    def __init__(self, **engines):
        super().__init__()
        self.engines = engines

    async def ask(self, model, question, *, changes=False):
        return question(self.engines[model])


def app_of(engine=None, **planners):
    return toy_app(engine, planners=planners)


def looked(app, query=""):
    response = ask(app, "GET", f"/v1/cache{query}")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list"
    return body["data"]


def planned(app, **body):
    response = ask(app, "POST", "/v1/cache/plan", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def others(plan):
    """Rows by encoding and key storage, without that of the model's own."""
    return {(row["encoding"], row["key_storage"]): row for row in plan["data"] if not row["own"]}


# ---- GET /v1/cache ----


def test_idle_caches_are_shown() -> None:
    engine = Standing(a=make_engine()[0], b=make_engine(blocks=9)[0])
    app = app_of(engine, a=make_planner(), b=make_planner("nope"))
    first, second = looked(app)
    assert first == {
        "model": "a",
        "encoding": "rope",
        "key_storage": "absolute",
        "block_size": BLOCK,
        "bytes_per_token": BYTES,
        "max_context": 512,
        "limits": {"max_seqs": 16, "max_step_tokens": 64, "lone_factor": 1},
        "blocks": {"free": 39, "active": 0, "cached": 0, "quarantined": 0},
        "audit": {"mode": "full", "sealed_now": 0, "sealed": 0, "verified": 0, "mutated": 0},
        "spill": dict.fromkeys(("blocks", "free", "waiting", "cached", *MOVES), 0),
        "waiting": 0,
        "requests": [],
        "kept": [],
        "shared": [],
    }
    assert (second["model"], second["key_storage"], second["blocks"]["free"]) == ("b", "raw", 8)
    assert looked(app, "?model=b") == [second]


def test_an_unknown_model_is_refused() -> None:
    app = app_of(Standing(a=make_engine()[0]), a=make_planner())
    for name in ("c", ""):
        error = error_of(ask(app, "GET", f"/v1/cache?model={name}"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_running_requests_are_shown_with_what_they_share() -> None:
    """And not one of their tokens."""
    engine, _ = make_engine(max_seqs=2)
    prompt = [n % 50 for n in range(1000, 1009)]
    for name in "xyz":
        engine.submit(make_request(name, prompt))
        engine.step()
    app = app_of(Standing(a=engine), a=make_planner())
    (seen,) = looked(app)
    older, newer = (request.pop("blocks") for request in seen["requests"])
    alike = {"dropped_tokens": 0, "overflow": "refuse", "bases": [0, 4, 8], "source": None}
    assert seen["requests"] == [
        {"id": "x", "known_tokens": 12, "computed_tokens": 11, **alike},
        {"id": "y", "known_tokens": 11, "computed_tokens": 10, **alike},
    ]
    assert seen["waiting"] == 1
    assert older[:2] == newer[:2] and older[2] != newer[2]
    assert seen["shared"] == [
        {"block": block, "holders": ["x", "y"]} for block in sorted(older[:2])
    ]
    assert seen["blocks"] == {"free": 35, "active": 4, "cached": 0, "quarantined": 0}
    assert seen["audit"]["sealed_now"] == seen["audit"]["sealed"] == 2
    assert seen["audit"]["verified"] > 0


def test_what_was_dropped_is_shown() -> None:
    engine, _ = make_engine(max_context=24)
    engine.submit(make_request("x", range(10), max_tokens=90, overflow=Overflow.SHIFT))
    engine.step()
    while not (dropped := engine.view().running[0].dropped):
        engine.step()
    app = app_of(Standing(a=engine), a=make_planner())
    (request,) = looked(app)[0]["requests"]
    assert request["overflow"] == "shift"
    assert request["dropped_tokens"] == dropped == 8
    assert request["known_tokens"] == request["computed_tokens"] + 1 + dropped
    assert request["bases"] == [4 * n for n in range(len(request["blocks"]))]


def test_both_sides_of_an_encoder_decoder_are_shown(tmp_path) -> None:
    folder = save(encoder_decoders.random_model(encoder_decoders.t5()), tmp_path / "t5")
    loaded = load_one(folder, "--kv-memory", "1M")
    loaded.engine.submit(make_request("x", [0], max_tokens=9, source=tuple(range(3, 21))))
    loaded.engine.step()
    app = app_of(Standing(a=loaded.engine), a=loaded.planner)
    (seen,) = looked(app)
    (request,) = seen["requests"]
    assert (request["computed_tokens"], len(request["blocks"])) == (1, 1)
    assert (request["source"]["computed_tokens"], request["source"]["bases"]) == (18, [0, 16])
    assert (seen["encoding"], seen["shared"]) == ("rope", [])  # the toy's own word
    assert seen["bytes_per_token"] == loaded.facts.kv_bytes_per_token
    own = planned(app, **{**SHIFT, "first": 16, "count": 16})["data"][0]
    assert (own["encoding"], own["capability"], own["bytes_moved"]) == ("t5", "free", 0)


def test_a_cache_is_shown_while_its_model_computes() -> None:
    """No text in any answer: ids and numbers alone."""
    app = engine_app(make_engine(slowly)[0], toy("a"), planners={"a": make_planner()})
    words = "not to be told"
    body = {"prompt": words, "max_tokens": 80, "ignore_eos": True, "overflow": "slide"}
    with asking(app) as client:

        def look():
            answer = client.get("/v1/cache")
            assert "told" not in answer.text and str(list(words.encode()))[1:-1] not in answer.text
            return answer.json()["data"][0]

        thread = threading.Thread(
            target=client.post, args=("/v1/completions",), kwargs={"json": body}
        )
        thread.start()
        lengths = []
        wait_for(lambda: look()["requests"])
        while requests := look()["requests"]:
            (request,) = requests
            assert request["overflow"] == "slide"
            assert len(request["blocks"]) == -(-request["computed_tokens"] // BLOCK)
            lengths.append(request["computed_tokens"])
        thread.join(20)
        assert len(lengths) > 3 and lengths == sorted(lengths)
        assert look()["blocks"]["active"] == 0


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/cache"), ("POST", "/v1/cache/flush")])
def test_an_engine_that_is_stuck_is_not_waited_for(method, path) -> None:
    class Stuck(ScriptedEngine):
        async def ask(self, model, question, *, changes=False):
            await asyncio.sleep(20)

    app = toy_app(Stuck(), planners={"a": make_planner()}, request_timeout_s=0.05)
    assert error_of(ask(app, method, path, headers=JSON), 504)["code"] == "deadline_exceeded"


def test_without_planners_there_are_no_such_routes() -> None:
    assert ask(toy_app(), "GET", "/v1/cache").status_code == 404
    assert ask(toy_app(), "POST", "/v1/cache/plan", json={}).status_code == 404


# ---- POST /v1/cache/flush ----


def flushed(app, query="", body=b""):
    response = ask(app, "POST", f"/v1/cache/flush{query}", headers=JSON, content=body)
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "list"
    return {row["model"]: row["flushed_blocks"] for row in response.json()["data"]}


def cached_engine(name):
    """Whose cache holds three blocks for nobody."""
    engine, _ = make_engine()
    engine.submit(make_request(name, range(3 * BLOCK), max_tokens=2))
    while engine.busy:
        engine.step()
    return engine


def test_caches_are_flushed_one_by_one_or_all() -> None:
    engine = Standing(a=cached_engine("x"), b=cached_engine("y"), c=cached_engine("z"))
    app = app_of(engine, a=make_planner(), b=make_planner(), c=make_planner())
    assert flushed(app, "?model=b") == {"b": 3}
    assert [view["blocks"]["cached"] for view in looked(app)] == [3, 0, 3]
    assert flushed(app) == {"a": 3, "b": 0, "c": 3}
    assert flushed(app, body=b'{"model": "b"}') == {"b": 0}
    assert flushed(app, body=b'{"model": null}') == {"a": 0, "b": 0, "c": 0}
    for wrong in (b"garbage{", b'{"modell": "a"}', b'{"model": 3}'):
        error_of(ask(app, "POST", "/v1/cache/flush", headers=JSON, content=wrong), 400)
    error_of(ask(app, "POST", "/v1/cache/flush", headers=JSON, content=b'{"model": ""}'), 404)
    error = error_of(ask(app, "POST", "/v1/cache/flush?model=d", headers=JSON), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_flushing_needs_a_key_where_there_is_one() -> None:
    engine = Standing(a=cached_engine("x"))
    app = toy_app(engine, planners={"a": make_planner()}, api_keys=frozenset({"k"}))
    error_of(ask(app, "POST", "/v1/cache/flush", headers=JSON), 401)
    assert engine.engines["a"].view().blocks.cached == 3


def test_another_site_cannot_flush() -> None:
    engine = Standing(a=cached_engine("x"))
    error_of(ask(app_of(engine, a=make_planner()), "POST", "/v1/cache/flush"), 415)
    assert engine.engines["a"].view().blocks.cached == 3


def test_a_prefix_is_not_hit_after_a_flush() -> None:
    """Over HTTP and through the engine's thread, and counted as such."""
    app = engine_app(make_engine()[0], planners={"toy": make_planner()})
    metrics = app.state.metrics
    with asking(app) as client:

        def hits():
            body = {"prompt": list(range(3 * BLOCK)), "max_tokens": 2, "ignore_eos": True}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

        assert (hits(), hits()) == (0, 2 * BLOCK)
        assert client.post("/v1/cache/flush", headers=JSON).json()["data"] == [
            {"model": "toy", "flushed_blocks": 3}
        ]
        assert sample(metrics, "kv_evicted_blocks_total", reason="flush", **LABELS) == 3
        assert sample(metrics, "kv_blocks", state="cached", **LABELS) == 0
        assert (hits(), hits()) == (0, 2 * BLOCK)


# ---- POST /v1/cache/plan ----


def test_a_plan_of_a_shift_for_every_encoding() -> None:
    """38 tokens, of which 8 go after the first 4: 26 have their 6 keys turned."""
    plan = planned(app_of(a=make_planner()), **SHIFT)
    rows = plan.pop("data")
    assert plan.pop("measured").pop("rests_on")
    assert plan == {
        "model": "a",
        "object": "cache.plan",
        "operation": "evict_renumber",
        "tokens": 38,
        "first": 4,
        "count": 8,
        "block_size": BLOCK,
        "bytes_per_token": BYTES,
        "dtype": "float32",
        "context_error": True,
    }
    turned = {
        "capability": "rewrite",
        "reason": None,
        "copied_entries": 0,
        "rewritten_entries": 26 * 6,
        "bytes_moved": 2 * 26 * 6 * 32,
        "estimated_seconds": 26 / BLOCK * SPEED.turn,
        "recompute": None,
    }
    free = dict.fromkeys(turned, 0) | {"capability": "free", "reason": None, "recompute": None}
    impossible = dict.fromkeys(turned) | {
        "capability": "impossible",
        "reason": "the position is part of every stored key and value",
        "recompute": {
            "tokens": 26,
            "bytes": 26 * BYTES,
            "estimated_seconds": 26 / BLOCK * SPEED.compute,
        },
    }
    expected = {
        ("alibi", "raw"): free,
        ("cope", "raw"): free,
        ("forgetting", "raw"): free,
        ("learned", "raw"): impossible,
        ("nope", "raw"): free,
        ("rope", "absolute"): turned,
        ("rope", "block"): free,
        ("rope", "raw"): free,
        ("sinusoidal", "raw"): impossible,
        ("t5", "raw"): free,
    }
    assert {name for name, _ in expected} == set(names())
    for row in rows:
        about = {key: row.pop(key) for key in ("encoding", "key_storage", "own")}
        assert row == expected[about["encoding"], about["key_storage"]], about
    assert len(rows) == len(expected) + 1


@pytest.mark.parametrize(
    ("body", "copied", "rewritten", "context_error"),
    [
        ({"operation": "evict_keep", "tokens": 38, "first": 4, "count": 8}, 0, 0, True),
        ({"operation": "evict_keep", "tokens": 16, "first": 8, "count": 8}, 0, 0, False),
        ({"operation": "fork", "tokens": 38, "count": 38}, 2, 0, False),
        ({"operation": "fork", "tokens": 38, "count": 36}, 0, 0, False),
        ({"operation": "truncate", "tokens": 38, "count": 7}, 0, 0, False),
        ({**MOVE, "first": 8, "count": 12}, 12, 12, True),
        ({**MOVE, "first": 8, "count": 12, "offset": 8}, 0, 0, True),
        ({"operation": "evict_renumber", "tokens": 38, "first": 0, "count": 36}, 0, 2, True),
    ],
    ids=lambda value: value["operation"] if isinstance(value, dict) else None,
)  # fmt: skip
def test_plans_of_the_others(body, copied, rewritten, context_error) -> None:
    plan = planned(app_of(a=make_planner()), model="a", **body)
    assert plan["context_error"] is context_error
    own = plan["data"][0]
    assert (own["encoding"], own["key_storage"], own["own"]) == ("rope", "absolute", True)
    entries, keys = copied * ENTRIES, rewritten * ENTRIES // 2
    assert (own["copied_entries"], own["rewritten_entries"]) == (entries, keys)
    assert own["bytes_moved"] == 2 * (entries + keys) * 32
    assert own["estimated_seconds"] == (copied * SPEED.copy + rewritten * SPEED.turn) / BLOCK


def test_what_recomputing_a_moved_span_writes() -> None:
    learned = others(planned(app_of(a=make_planner()), **MOVE))["learned", "raw"]
    assert learned["recompute"]["tokens"] == 8


def test_a_plan_of_appending_says_what_one_token_writes_and_computes() -> None:
    t5 = make_planner("t5", buckets=32, max_distance=128)
    plan = planned(app_of(a=t5), operation="append", tokens=9)
    assert plan["context_error"] is False
    for row in plan["data"]:
        assert (row["capability"], row["reason"]) == ("free", None)
        assert (row["written_entries"], row["written_bytes"]) == (ENTRIES, BYTES)
    rows = others(plan)
    # 3 layers of 6 heads, ten keys with the new one; queries and keys of rope, 6 + 2 heads.
    assert rows["t5", "raw"]["work"]["bias_values"] == 3 * 6 * 10
    assert rows["rope", "absolute"]["work"]["rotations"] == 3 * 8
    assert rows["rope", "block"]["work"]["rotations"] == 3 * (6 * 3 + 2)
    assert rows["nope", "raw"]["work"]["flops"] == 0


def test_a_storage_is_the_models_own() -> None:
    plan = planned(app_of(a=make_planner(storage="block")), **SHIFT)
    own = plan["data"][0]
    assert (own["key_storage"], own["capability"], own["bytes_moved"]) == ("block", "free", 0)


def test_encodings_that_such_a_model_cannot_have_are_left_out() -> None:
    """Sinusoidal vectors need four columns."""
    narrow = make_planner("nope", shape=replace(CONFIG, hidden_size=2))
    plan = planned(app_of(a=narrow), operation="append", tokens=1)
    assert {row["encoding"] for row in plan["data"]} == set(names()) - {"sinusoidal"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "operation", "is missing"),
        ({"operation": "append"}, "tokens", "is missing"),
        ({"operation": "shuffle", "tokens": 9}, "operation", "append"),
        ({**SHIFT, "tokens": 38.5}, "tokens", "integer"),
        ({**SHIFT, "tokens": 0}, "tokens", "greater"),
        ({**SHIFT, "first": -4}, "first", "greater"),
        ({**SHIFT, "count": True}, "count", "integer"),
        ({**SHIFT, "colour": 1}, "colour", "not a parameter"),
        ({**SHIFT, "count": None}, "count", "count is missing; evict_renumber needs it"),
        ({**SHIFT, "offset": 4}, "offset", "does not apply to evict_renumber"),
        ({"operation": "append", "tokens": 9, "first": 0}, "first", "does not apply to append"),
        ({**SHIFT, "first": 5}, "first", "first is 5, but operations work on whole blocks of 4"),
        ({**SHIFT, "count": 10}, "count", "send a multiple of 4"),
        ({**MOVE, "offset": 6}, "offset", "send a multiple of 4"),
        (
            {**SHIFT, "count": 36},
            "count",
            "at token 40, but the full blocks of 38 tokens end at 36",
        ),
        ({**SHIFT, "tokens": 101}, "tokens", "tokens is 101, but the served context holds 100"),
        ({"operation": "append", "tokens": 100}, "tokens", "tokens is 100 and one comes after"),
        ({**MOVE, "offset": 96}, "offset", "served context of 100 tokens"),
        ({"operation": "fork", "tokens": 9, "count": 10}, "count", "the context has only 9"),
        ({"operation": "truncate", "tokens": 9, "count": 10}, "count", "send at most that many"),
        ({"operation": "fork", "tokens": 9, "count": 1000}, "count", "the context has only 9"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_refused_plans(body, param, words) -> None:
    app = app_of(a=make_planner())
    error = error_of(ask(app, "POST", "/v1/cache/plan", json=body), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_the_longest_contexts_are_answered() -> None:
    app = app_of(a=make_planner())
    assert planned(app, **{**SHIFT, "tokens": 100})
    assert planned(app, operation="append", tokens=99)
    assert planned(app, **{**MOVE, "offset": 92})


def test_plans_name_their_model() -> None:
    app = app_of(a=make_planner(), b=make_planner("alibi"))
    assert planned(app, model="b", **SHIFT)["data"][0]["encoding"] == "alibi"
    for body in (SHIFT, {**SHIFT, "model": "c"}):
        assert error_of(ask(app, "POST", "/v1/cache/plan", json=body), 404)["param"] == "model"


@pytest.mark.parametrize("storage", ["absolute", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_foretells_what_a_live_shift_reports(tmp_path, dtype, storage) -> None:
    """And touches no cache."""
    folder = save(random_model(llama()), tmp_path / "llama")
    flags = ["--dtype", dtype, "--kv-memory", "1M", "--max-model-len", "64"]
    flags += ["--encoding-option", f"storage={storage}"]
    loaded = load_one(folder, *flags)
    app = app_of(Standing(a=loaded.engine), a=loaded.planner)
    loaded.engine.submit(make_request("x", range(40), max_tokens=60, overflow=Overflow.SHIFT))
    while not (shifts := loaded.engine.step().stats.shifts):
        before = looked(app)[0]
    (shift,) = shifts
    tokens = before["requests"][0]["computed_tokens"]
    body = {"operation": "evict_renumber", "tokens": tokens, "first": 16, "count": shift.dropped}
    stood = looked(app)
    own = planned(app, **body)["data"][0]
    assert looked(app) == stood
    report = shift.report
    assert (own["capability"], own["key_storage"]) == (report.capability.value, storage)
    assert (own["copied_entries"], own["rewritten_entries"], own["bytes_moved"]) == (
        report.copied,
        report.rewritten,
        report.bytes_moved,
    )
    moves = report.capability is not Capability.FREE
    assert moves == (storage == "absolute") == (report.rewritten > 0)
    assert (own["estimated_seconds"] > 0) == moves


def test_speed_is_measured_when_a_model_is_loaded(tmp_path) -> None:
    folder = save(random_model(llama()), tmp_path / "llama")
    loaded = load_one(folder, "--kv-memory", "1M")
    plan = planned(app_of(a=loaded.planner), operation="append", tokens=1)
    measured = plan["measured"]
    assert "measured when the model was loaded" in measured.pop("rests_on")
    assert set(measured) == {"turn", "copy", "compute"}
    assert all(seconds > 0 for seconds in measured.values())
