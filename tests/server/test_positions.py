"""POST /v1/positions/explain over HTTP. That scores are right: tests/model/test_scores.py."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ropewalk.model.inspect import scores
from ropewalk.server.engine import openmp
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.server.fake_engine import loaded_app
from tests.server.toy import ask, error_of, running, toy_app

ROOT = Path(__file__).parents[2]
PATH = "/v1/positions/explain"
MODELS = [f"ropewalk-{name}" for name in ("rope", "t5", "alibi", "learned", "nope")]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = save(
        encoder_decoders.random_model(encoder_decoders.t5()), tmp_path_factory.mktemp("t5")
    )
    return loaded_app(*MODELS, f"both={folder}", "--kv-memory", "16M")


@pytest.fixture(scope="module")
def url(app):
    with running(app) as (url, _):
        yield url


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
    whole = explained(app, model=model, input=text)
    assert whole["split"]["possible"] and (whole["query"], whole["key"]) == (
        len(found["tokens"]) - 1,
        None,
    )
    for head in whole["heads"]:
        assert (head["terms"] is None) == (kind != "embedding")
    count = len(found["tokens"])
    assert (found["model"], found["kind"], found["query"], found["key"]) == (model, kind, 3, 1)
    assert found["side"] == ("encoder" if model == "both" else "decoder")
    assert found["causal"] == (model != "both")
    assert found["key_storage"] == ("absolute" if kind == "rotation" else None)
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


@pytest.mark.parametrize("storage", ["raw", "block"])
def test_how_keys_are_stored_is_said(storage) -> None:
    option = ("--encoding-option", f"storage={storage}", "--kv-memory", "16M")
    found = explained(loaded_app("ropewalk-rope", *option), input="Once upon a time")
    assert (found["kind"], found["key_storage"]) == ("rotation", storage)


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


def test_appending_is_audited(app) -> None:
    path = "/v1/positions/audit"
    listed = ask(app, "GET", f"{path}?model=ropewalk-rope").json()
    arms = {each["arm"]: each["note"] for each in listed["data"]}
    assert listed["model"] == "ropewalk-rope" and "rope:dynamic" in arms and arms["own"]
    body = {"model": "ropewalk-rope", "prompt": "Once upon a time", "append": 20, "steps": 2}
    for arm, stale in (("own", False), ("rope:dynamic", True)):
        answer = ask(app, "POST", path, json={**body, "arm": arm})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["arm"], found["appended_tokens"], len(found["steps"])) == (arm, 20, 2)
        written = 20 * found["entries_per_token"]
        assert found["totals"]["written"] == written and not found["totals"]["changed"]
        assert bool(found["totals"]["stale"]) == stale
        assert found["blocks"] and all(block["equal"] for block in found["blocks"])
    for change, param in (
        ({"arm": "os:system"}, "arm"),
        ({"append": 129}, "append"),
        ({"prompt": [1] * 129}, "prompt"),
        ({"append": [10**6]}, "append"),
        ({"model": "both"}, "model"),
    ):
        error = error_of(ask(app, "POST", path, json=body | change), 400)
        assert error["param"] == param, error
        assert "os:system" not in error["message"]
    assert error_of(ask(app, "GET", f"{path}?model=both"), 400)["param"] == "model"


def test_files_that_changed_are_not_what_is_served(app, tmp_path) -> None:
    (served,) = [each for each in app.state.models if each.name == "both"]
    body = {"model": "both", "input": "a"}
    file = served.in_use.checkpoint.path / "model.safetensors"
    data, before = file.read_bytes(), file.stat()
    assert ask(app, "POST", PATH, json=body).status_code == 200
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert "changed" in error_of(ask(app, "POST", PATH, json=body), 400)["message"]
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ask(app, "POST", PATH, json=body).status_code == 200


def test_a_model_without_files_is_not_explained() -> None:
    assert error_of(ask(toy_app(), "POST", PATH, json={"input": "x"}), 400)["param"] == "model"


def test_one_is_computed_at_a_time_and_few_wait(url, monkeypatch) -> None:
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
    with httpx.Client(base_url=url, timeout=30) as client:

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


@pytest.mark.parametrize("model", ["ropewalk-rope", "ropewalk-t5", "ropewalk-learned"])
def test_the_example_draws_what_the_routes_say(url, model, tmp_path) -> None:
    picture = tmp_path / "picture.png"
    script = ROOT / "docs" / "examples" / "cache_and_positions.py"
    command = [sys.executable, str(script), url, "--model", model, "--out", str(picture)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000
