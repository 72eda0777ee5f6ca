"""POST /v1/positions/explain over HTTP. That scores are right: tests/model/test_scores.py."""

import threading
import time

import httpx
import pytest

from ropewalk.model.inspect import scores
from ropewalk.server.engine import openmp
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.server.fake_engine import loaded_app
from tests.server.test_app import error_of
from tests.server.toy import ask, running, toy_app

PATH = "/v1/positions/explain"
MODELS = [f"ropewalk-{name}" for name in ("rope", "t5", "alibi", "learned", "nope")]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = save(
        encoder_decoders.random_model(encoder_decoders.t5()), tmp_path_factory.mktemp("t5")
    )
    return loaded_app(*MODELS, f"both={folder}", "--kv-memory", "16M")


def explained(app, **body):
    answer = ask(app, "POST", PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("model", "kind", "pairs", "bias"),
    [
        ("ropewalk-rope", "rotation", 32, None),
        ("ropewalk-t5", "bias", None, range(512)),
        ("ropewalk-alibi", "bias", None, range(512)),
        ("ropewalk-learned", "embedding", None, None),
        ("ropewalk-nope", "none", None, None),
        ("both", "bias", None, range(-511, 512)),
    ],
)
def test_a_query_is_explained(app, model, kind, pairs, bias) -> None:
    text = "Once upon a time" if model != "both" else [3, 4, 5, 6, 7]
    found = explained(app, model=model, input=text, layer=1, query=3, key=1)
    count = len(found["tokens"])
    assert (found["model"], found["kind"], found["query"], found["key"]) == (model, kind, 3, 1)
    assert found["side"] == ("encoder" if model == "both" else "decoder")
    if model != "both":
        assert "".join(each["text"] for each in found["tokens"][1:]).strip() == text
    for index, head in enumerate(found["heads"]):
        assert head["head"] == index and len(head["scores"]) == count
        assert sum(head["weights"]) == pytest.approx(1, abs=1e-6)
        assert all(head["weights"][4:]) == (model == "both")
        if kind == "embedding":
            assert head["content"] is head["position"] is None
        else:
            for content, position, score in zip(
                head["content"], head["position"], head["scores"], strict=True
            ):
                assert content + position == pytest.approx(score, abs=2e-6 * (1 + abs(score)))
    assert (found["split"]["reason"] is None) == found["split"]["possible"] == (kind != "embedding")
    assert pairs == (found["pairs"] and len(found["pairs"]))
    if pairs:
        angles = [(pair["query_angle"], pair["key_angle"]) for pair in found["pairs"]]
        assert angles == [(3 * pair["frequency"], pair["frequency"]) for pair in found["pairs"]]
    assert (bias and list(bias)) == (found["bias"] and found["bias"]["distances"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"layer": 99}, "layer"),
        ({"query": 99}, "query"),
        ({"key": 99}, "key"),
        ({"input": "a " * 400}, "input"),
        ({"input": "a" * 60_000}, "input"),
        ({"input": [1] * 257}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[1]]}, "input"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=str,
)
def test_what_cannot_be_explained_is_refused(app, body, param) -> None:
    given = {"model": "ropewalk-t5", "input": "x", "add_special_tokens": False}
    error = error_of(ask(app, "POST", PATH, json=given | body), 400)
    assert error["param"].startswith(param)


def test_a_model_without_files_is_not_explained() -> None:
    assert error_of(ask(toy_app(), "POST", PATH, json={"input": "x"}), 400)["param"] == "model"


def test_one_is_computed_at_a_time_and_few_wait(app, monkeypatch) -> None:
    """Beside the event loop: completions and health checks go on meanwhile."""
    at_once, most, release = 0, 0, threading.Event()
    computed = scores.explain

    def held(*arguments):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        release.wait(20)
        at_once -= 1
        return computed(*arguments)

    monkeypatch.setattr("ropewalk.server.app.positions.explain", held)
    monkeypatch.setattr(openmp, "MOST_WAITING", 2)
    body = {"model": "ropewalk-rope", "input": "Once", "max_tokens": 2}
    statuses: list[int] = []
    with running(app) as (url, _), httpx.Client(base_url=url, timeout=30) as client:

        def post():
            statuses.append(
                client.post(PATH, json={k: body[k] for k in ("model", "input")}).status_code
            )

        threads = [threading.Thread(target=post) for _ in range(5)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        completion = {"model": body["model"], "prompt": "Once", "max_tokens": 2}
        assert client.post("/v1/completions", json=completion).status_code == 200
        assert statuses == [429, 429]
        release.set()
        for thread in threads:
            thread.join(30)
    assert (sorted(statuses), most) == ([200, 200, 200, 429, 429], 1)
