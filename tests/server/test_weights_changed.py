"""Weights that change in memory: who is told what, from the engine to HTTP."""

import contextlib
import ctypes
import json
import threading
from functools import partial

import pytest
import torch

from ropewalk.cache.types import Audit
from ropewalk.model.decoder import Decoder
from ropewalk.model.weights.checksums import PORTIONS, STEPS, Seals
from ropewalk.server.engine import integrity
from ropewalk.server.errors import ModelWithdrawn, WeightsChanged
from ropewalk.server.launch import build
from ropewalk.server.scheduling.request import FinishReason
from tests.model.checkpoints import llama, random_model, save
from tests.server.fake_engine import loaded_app, make_request
from tests.server.test_auditing import Watched, counted_from
from tests.server.toy import asking, sample, wait_for


def flip(tensor, byte=0):
    ctypes.c_uint8.from_address(tensor.data_ptr() + byte).value ^= 4


class Weighed(Watched):
    """An engine over a fake model that has weights, which it does not read."""

    def __init__(self, mode=Audit.FULL, **options):
        self.weights = {"norm": torch.ones(8), "head": torch.ones(50, 8)}
        super().__init__(mode, weights=self.weights, **options)


def test_every_answer_under_way_ends_and_no_other_begins(caplog):
    world = Weighed(max_seqs=2)
    for name in ("running", "also", "waiting"):
        world.engine.submit(make_request(name, range(5), max_tokens=30))
    world.step()
    flip(world.weights["head"], 70)
    ended = world.step()
    assert sorted(event.request_id for event in ended.events) == ["also", "running", "waiting"]
    for event in ended.events:
        assert isinstance(event.error, WeightsChanged) and event.token is None
    assert ended.stats.changed_weights == 1 and ended.stats.generated_tokens == 0
    assert world.engine.weights_changed and not world.engine.busy
    assert world.manager.counts().active == 0
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "the weights of fake changed in memory: head bytes 0 to 1599; it answers nothing until the "
        "server is restarted"
    )
    with pytest.raises(ModelWithdrawn, match="The weights of fake changed"):
        world.engine.submit(make_request("late", [1]))
    for _ in range(5):  # said once
        assert world.step().stats.changed_weights == 0
    assert len(caplog.records) == 1


def test_an_answer_that_was_complete_in_this_very_step_is_an_error():
    world = Weighed()
    world.engine.submit(make_request("a", range(5), max_tokens=2))
    world.step()
    flip(world.weights["norm"])
    (event,) = world.step().events
    assert event.finish is FinishReason.ERROR and event.token is None


def test_with_steps_launched_ahead():
    world = Weighed(ahead=True)
    world.engine.submit(make_request("a", range(5), max_tokens=30))
    for _ in range(4):
        world.step()
    flip(world.weights["norm"])
    world.run()
    assert world.failed() == ["a"]
    assert 0 < len(world.tokens("a")) < 10


@pytest.mark.parametrize("mode", [Audit.SAMPLE, Audit.FULL])
def test_it_is_found_within_the_promised_steps(mode, monkeypatch):
    world = Weighed(mode)
    monkeypatch.setattr("ropewalk.model.weights.checksums.START", 1)
    weights = {str(n): torch.ones(3) for n in range(3000)}
    world.engine._auditor._weights = seals = Seals(weights)
    assert PORTIONS // 2 < seals.portions <= PORTIONS
    promised = STEPS // integrity.PORTIONS[mode]
    for _ in range(promised // 2):
        world.step()
    flip(weights["1234"])  # has just been passed
    steps = 0
    while not world.engine.weights_changed:
        world.step()
        steps += 1
    assert promised // 3 < steps <= promised


def test_off_looks_at_nothing():
    world = Weighed(Audit.OFF)
    flip(world.weights["norm"])
    world.engine.submit(make_request("a", range(5), max_tokens=20))
    world.run()
    assert world.tokens("a") == counted_from(5, 20)
    assert world.total("verified_weights") == 0


# ------------------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(random_model(llama()), tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def serving(monkeypatch, *flags, idle_s=30.0):
    """Models as `serve` makes them: (client, metrics, the first model's fixed tensors)."""
    held = []

    fixed_tensors = Decoder.fixed_tensors

    def recorded(decoder):
        held.append(fixed_tensors(decoder))
        return held[-1]

    monkeypatch.setattr(Decoder, "fixed_tensors", recorded)
    monkeypatch.setattr(build, "IDLE_S", idle_s)
    app = loaded_app(*flags, "--kv-memory", "2M")
    with asking(app) as client:
        yield client, app.state.metrics, (held or [None])[0]


def asked(model="m", **body):
    return {"model": model, "prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": 5} | body


def test_over_http_streams_break_off_and_the_model_is_withdrawn(folder, monkeypatch, caplog):
    flags = (f"m={folder}", f"other={folder}")
    with serving(monkeypatch, *flags) as (client, metrics, weights):
        post = partial(client.post, "/v1/completions")
        assert post(json=asked()).status_code == 200
        assert client.get("/health/ready").status_code == 200
        answers = []
        whole = threading.Thread(target=lambda: answers.append(post(json=asked(max_tokens=250))))
        with client.stream("POST", "/v1/completions", json=asked(stream=True, max_tokens=250)) as s:
            lines = s.iter_lines()
            next(lines)
            whole.start()
            flip(weights["layers.1.mlp.down.panels"], 99)
            said = [line.removeprefix("data: ") for line in lines if line]
        whole.join()
        error = json.loads(said[-1])["error"]
        assert (error["code"], error["type"]) == ("weights_changed", "server_error")
        assert "send the request to another server" in error["message"]
        (answer,) = answers
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] in ("weights_changed", "model_withdrawn")
        refused = post(json=asked())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "model_withdrawn"
        assert post(json=asked("other")).status_code == 200
        for path in ("/health/ready", "/health"):
            health = client.get(path)
            assert health.status_code == 503
            assert "the weights of m changed in memory" in health.json()["error"]["message"]
        assert client.get("/health/live").status_code == 200
        labels = {"model_name": "m", "encoding": "rope"}
        assert sample(metrics, "weights_changed_total", **labels) == 1
        assert sample(metrics, "weights_verified_bytes_total", **labels) > 0
        assert sample(metrics, "kv_blocks", **labels, state="active") == 0
        refusals = {"reason": "other", "code": "model_withdrawn"}
        assert sample(metrics, "request_rejections_total", **labels, **refusals) >= 1
    logged = [
        record.message
        for record in caplog.records
        if record.name == "ropewalk.server.engine.integrity"
    ]
    (line,) = logged
    assert line.startswith(
        "the weights of m changed in memory: layers.1.mlp.down.panels bytes 0 to "
    )


def test_a_server_that_nobody_asks_finds_out_too(folder, monkeypatch):
    """Of two models only the other is asked, all the time."""
    flags = (f"m={folder}", f"other={folder}")
    with serving(monkeypatch, *flags, idle_s=0.01) as (client, _, weights):
        flip(weights["embed.weight"], 1000)
        for _ in range(5):
            body = asked("other", max_tokens=100)
            assert client.post("/v1/completions", json=body).status_code == 200
        wait_for(lambda: client.get("/health/ready").status_code == 503, 5)


def test_when_idle_all_weights_are_seen_within_ten_minutes():
    assert STEPS * build.IDLE_S < 600


def test_with_the_audit_off_nothing_is_sealed_and_an_idle_engine_sleeps(folder, monkeypatch):
    with serving(monkeypatch, f"m={folder}", "--audit", "off", idle_s=0.001) as (
        client,
        metrics,
        weights,
    ):
        assert weights is None
        assert client.post("/v1/completions", json=asked()).status_code == 200
        labels = {"model_name": "m", "encoding": "rope"}
        assert sample(metrics, "weights_verified_bytes_total", **labels) == 0
