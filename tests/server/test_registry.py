"""Models that come and go in a running server, over HTTP, with tiny checkpoints."""

import ctypes
import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from operator import le
from pathlib import Path
from typing import ClassVar

import click
import httpx
import llguidance
import pytest

from ropewalk.server.config import ModelSource
from ropewalk.server.errors import UsageError
from ropewalk.server.launch import build, registry
from ropewalk.server.metrics.exporter import Metrics
from tests.command_line import configured
from tests.model.checkpoints import llama, random_model, save
from tests.server.toy import TEMPLATE, running, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the models one, two and broken; first is beside it."""
    root = tmp_path_factory.mktemp("models")
    model = random_model(llama(eos_token_id=256, max_position_embeddings=CONTEXT))
    for name in ("first", "more/one", "more/two"):
        (root / name).mkdir(parents=True)
        save(model, root / name)
    (root / "more/broken").mkdir()
    (root / "more/broken/config.json").write_text('{"model_type": "llama"}')
    return root


class Client(httpx.Client):
    """Asks the server whose application is `app`."""

    def __init__(self, url, app, server):
        super().__init__(base_url=url, timeout=60)
        self.app, self.server = app, server

    def change(self, what, name):
        return self.post(f"/v1/models/{what}", json={"model": name})

    def complete(self, name, timeout=60, **more):
        body = {"model": name, "prompt": "abc", "max_tokens": 3, "ignore_eos": True}
        return self.post("/v1/completions", json=body | more, timeout=timeout)

    def statuses(self):
        models = self.get("/v1/models").json()["data"]
        return {each["id"]: each["status"]["value"] for each in models}

    def metric(self, name, model):
        lines = re.findall(
            rf'^{name}{{.*model_name="{model}".*}} (.*)$', self.get("/metrics").text, re.M
        )
        return [float(each) for each in lines]


@contextmanager
def serving(folder, *flags, drain_seconds=5.0, named=("first",)):
    models = [f"{name}={folder / name}" for name in named]
    flags = ("--models-dir", str(folder / "more"), "--kv-memory", "2M", *flags)
    app = build.application(configured(*models, *flags), Metrics(), lambda: None).app
    with (
        running(app, drain_seconds=drain_seconds) as (url, server),
        Client(url, app, server) as client,
    ):
        yield client


def in_background(call):
    """Begins a call; what it returns is what it gave."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result():
        thread.join(60)
        (one,) = found
        return one

    return result


def refused(answer, *, code="model_not_loaded"):
    """The message of a 503, and when the client should come again."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, code), answer.text
    return error["message"], answer.headers.get("retry-after")


@pytest.fixture
def slow(monkeypatch):
    """Every step takes 5 ms, so that a request of the whole context takes a second."""
    from ropewalk.server.engine.engine import Engine

    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.005), step(self))[1])


@pytest.fixture
def gate(monkeypatch):
    """While it is clear, loads do not begin; they look whether they should end. `.loads`: names."""
    found = threading.Event()
    found.loads = []
    load = build._load_one

    def waiting(config, metrics, source, others, check):
        found.loads.append(source.name)
        while not found.wait(0.01):
            check()
        return load(config, metrics, source, others, check)

    monkeypatch.setattr(build, "_load_one", waiting)
    return found


def streaming(client, model, tokens=CONTEXT - 4):
    """A stream that has begun, and a function that reads it to its end: the last two events."""
    begun = threading.Event()

    def read():
        body = {"model": model, "prompt": "abc", "max_tokens": tokens, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = []
            for line in answer.iter_lines():
                begun.set()
                lines += [line[6:]] if line.startswith("data: ") else []
        return lines[-2:]

    result = in_background(read)
    assert begun.wait(20)
    return result


def finished(events):
    return (
        json.loads(events[0])["choices"][0]["finish_reason"] == "length" and events[1] == "[DONE]"
    )


def test_models_come_and_go_by_name(folder):
    with serving(folder, "--max-models", "3") as client:
        names = ("first", "broken", "one", "two")
        assert client.statuses() == dict.fromkeys(names, "unloaded") | {"first": "loaded"}
        alone = client.complete("first", temperature=0).json()["choices"][0]["text"]
        said, after = refused(client.complete("one"))
        assert "POST /v1/models/load" in said and "--models-autoload" in said and after is None
        assert client.complete("one").headers["x-should-retry"] == "false"
        assert client.metric("ropewalk_requests_running", "one") == []

        for _ in range(2):  # the second changes nothing
            assert client.change("load", "one").json() == {"success": True}
        assert client.post("/models/load", json={"model": "two"}).json() == {"success": True}
        assert client.get("/v1/models/one").json()["max_model_len"] == CONTEXT
        same = client.complete("one", temperature=0).json()["choices"][0]["text"]
        assert same == alone
        assert client.metric("ropewalk_generated_tokens_total", "one") == [3.0]
        assert [each["model"] for each in client.get("/v1/cache").json()["data"]] == [
            "first",
            "one",
            "two",
        ]
        plan = {"model": "one", "operation": "truncate", "tokens": 32, "count": 16}
        assert client.post("/v1/cache/plan", json=plan).status_code == 200

        for path in ("/v1/models/unload", "/models/unload"):
            assert client.post(path, json={"model": "one"}).json() == {"success": True}
        assert client.statuses()["one"] == "unloaded"
        refused(client.complete("one"))
        refused(client.get("/v1/cache?model=one"))
        assert '"one"' not in client.get("/metrics").text
        assert client.complete("first").status_code == 200
        client.change("load", "one")
        assert client.metric("ropewalk_generated_tokens_total", "one") == [0.0]
        assert client.get("/health/ready").status_code == 200

        for name in ("other", str(folder / "more/one"), "../first"):
            assert client.change("load", name).status_code == 404
        assert client.change("unload", None).status_code == 404  # which of them?
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/models/load", "/v1/models/unload"} < paths.keys()


def test_without_the_options_nobody_loads_or_unloads(folder):
    config = configured(f"first={folder / 'first'}", "--kv-memory", "2M")
    app = build.application(config, Metrics(), lambda: None).app
    with running(app) as (url, server), Client(url, app, server) as client:
        for path in ("/v1/models/unload", "/models/unload"):
            assert client.post(path, json={"model": "first"}).status_code in (404, 405)
        assert client.statuses() == {"first": "loaded"}


def test_the_least_recently_used_gives_way(folder):
    with serving(folder, "--max-models", "2", "--models-autoload") as client:
        for name, gone in (("one", "two"), ("first", "two"), ("two", "one"), ("one", "first")):
            assert client.complete(name).status_code == 200
            assert client.statuses() == {
                each: "unloaded" if each in (gone, "broken") else "loaded"
                for each in ("first", "broken", "one", "two")
            }


def test_who_loads_a_model_asks_for_it(folder):
    """Also where it was loaded already."""
    with serving(folder, "--max-models", "2", "--models-autoload") as client:
        assert client.complete("first").status_code == 200
        for name in ("one", "one", "two"):
            assert client.change("load", name).status_code == 200
        assert (client.statuses()["one"], client.statuses()["first"]) == ("loaded", "unloaded")
        client.change("load", "one")
        client.change("load", "first")
        assert (client.statuses()["one"], client.statuses()["two"]) == ("loaded", "unloaded")


def test_a_model_that_answers_does_not_give_way(folder, slow):
    with serving(folder, "--max-models", "1", "--models-autoload") as client:
        stream = streaming(client, "first")
        assert client.complete("one").status_code == 200  # once the stream has ended
        assert finished(stream())
        assert client.statuses()["first"] == "unloaded"
    with serving(
        folder, "--max-models", "1", "--models-autoload", "--max-queue-time", "0.1"
    ) as client:
        stream = streaming(client, "first")
        for answer in (client.complete("one"), client.change("load", "one")):
            said, after = refused(answer)
            assert "--max-models" in said and after == "5"
        assert finished(stream())


def test_who_waited_for_a_model_gets_it_before_it_gives_way(folder):
    with serving(folder, "--max-models", "1", "--models-autoload") as client:
        each = [in_background(lambda n=n: client.complete(n)) for n in ("one", "two") * 4]
        assert [answer().status_code for answer in each] == [200] * 8


def test_who_leaves_while_a_model_is_loaded_leaves_no_place_behind(folder, gate):
    flags = ("--models-autoload", "--max-queue", "1", "--max-seqs", "1")
    with serving(folder, *flags) as client:
        for _ in range(4):
            with pytest.raises(httpx.ReadTimeout):
                client.complete("one", timeout=0.3)
        waiting = in_background(lambda: client.complete("one"))
        wait_for(lambda: client.statuses()["one"] == "loading")
        gate.set()
        assert waiting().status_code == 200


def test_a_model_that_is_unloading_is_no_longer_there(folder, slow):
    """Who leaves before it is loaded again leaves no place behind, and who looks loads nothing."""
    flags = ("--models-autoload", "--max-queue", "1", "--max-seqs", "2")
    with serving(folder, *flags, drain_seconds=60.0) as client:
        running = in_background(lambda: client.complete("first", max_tokens=CONTEXT - 10))
        wait_for(lambda: client.metric("ropewalk_requests_running", "first") == [1])
        unloaded = in_background(lambda: client.change("unload", "first"))
        wait_for(lambda: client.statuses()["first"] == "unloading")
        for _ in range(4):
            with pytest.raises(httpx.ReadTimeout):
                client.complete("first", timeout=0.1)
        assert client.get("/v1/cache", params={"model": "first"}).status_code == 503
        assert running().status_code == 200 and unloaded().status_code == 200
        assert client.statuses()["first"] == "unloaded"


def test_to_look_at_a_cache_loads_nothing(folder):
    with serving(folder, "--models-autoload") as client:
        for answer in (
            client.get("/v1/cache", params={"model": "one"}),
            client.get("/v1/cache/stream", params={"model": "one"}),
            client.get("/v1/positions/audit", params={"model": "one"}),
            client.post("/v1/cache/flush", params={"model": "one"}, json={}),
        ):
            assert answer.status_code == 503
        assert client.statuses()["one"] == "unloaded"


def test_to_watch_a_cache_keeps_no_model(folder):
    """It goes at once, and its stream ends with the reason."""
    with serving(folder, "--models-autoload", drain_seconds=60.0) as client:
        with client.stream("GET", "/v1/cache/stream", params={"model": "first"}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert json.loads(next(lines)[6:])["type"] == "snapshot"
            assert client.change("unload", "first").json() == {"success": True}
            *_, last = (json.loads(line[6:]) for line in lines)
            assert last["error"]["code"] == "model_not_loaded"
        assert client.complete("first").status_code == 200  # loaded again
        with client.stream("GET", "/v1/cache/stream", params={"model": "first"}) as response:
            assert '"snapshot"' in next(response.iter_lines())
        assert client.get("/metrics").status_code == 200


def test_requests_wait_for_a_model_that_is_being_loaded(folder, gate):
    with serving(folder, "--models-autoload") as client:
        waiting = [in_background(lambda: client.complete("one")) for _ in range(3)]
        wait_for(lambda: client.statuses()["one"] == "loading")
        assert client.complete("first").status_code == 200  # which is not held up
        gate.set()
        assert [answer().status_code for answer in waiting] == [200] * 3
        assert gate.loads == ["one"]
    gate.clear()
    with serving(folder, "--models-autoload", "--max-queue-time", "0.1") as client:
        said, after = refused(client.complete("one"))
        assert "loading" in said and after == "5"
        gate.set()
        assert client.change("load", "one").status_code == 200  # the load went on


def test_a_load_that_fails_leaves_the_others_serving(folder, gate):
    gate.set()
    with serving(folder, "--models-autoload") as client:
        said, _ = refused(client.change("load", "broken"))
        assert said.startswith("broken could not be loaded: ") and "model.safetensors" in said
        assert client.get("/v1/models/broken").json()["status"] == {
            "value": "unloaded",
            "failed": True,
        }
        answer = client.complete("broken")  # which tries it no sooner
        said, after = refused(answer)
        assert str(folder) not in said and "log says why" in said and after is None
        assert answer.headers["x-should-retry"] == "false"  # a client would wait for a minute
        assert gate.loads == ["broken"]
        assert '"broken"' not in client.get("/metrics").text
        assert [client.complete(name).status_code for name in ("first", "one")] == [200, 200]


def test_no_model_goes_for_one_whose_files_are_no_good(folder, monkeypatch):
    with serving(folder, "--max-models", "1", "--models-autoload") as client:
        for answer in (client.complete("broken"), client.change("load", "broken")):
            refused(answer)
            assert client.statuses()["first"] == "loaded"
    monkeypatch.setattr(registry, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(build, "_look", lambda *_: None)  # what only loading finds out
    with serving(folder, "--max-models", "1", "--models-autoload") as client:
        refused(client.complete("broken"))
        assert client.statuses()["first"] == "unloaded"
        assert client.complete("one").status_code == 200
        began = time.monotonic()
        refused(client.complete("broken"))  # is tried again, as soon as anything that has no room
        assert time.monotonic() - began < 5
        assert client.complete("first").status_code == 200


def test_a_load_without_room_says_so_whatever_happened_before(folder, slow):
    limits = ("--max-models", "1", "--max-queue-time", "0.1")
    with serving(folder, *limits) as client:
        refused(client.change("load", "broken"))
        stream = streaming(client, "first")
        said, _ = refused(client.change("load", "one"))
        assert "--max-models" in said
        assert finished(stream())


def test_a_model_whose_memory_does_not_suffice_fails_alone(folder, gate, monkeypatch):
    gate.set()
    with serving(folder) as client:
        monkeypatch.setattr(build, "warm_up", lambda *_: 1 / 0)
        said, _ = refused(client.change("load", "one"))
        assert "unexpectedly" in said
        monkeypatch.undo()
        assert client.change("load", "one").status_code == 200


def test_unloading_waits_for_streams_and_then_ends_them(folder, slow):
    with serving(folder) as client:
        stream = streaming(client, "first")
        assert client.change("unload", "first").status_code == 200
        assert finished(stream())
    with serving(folder, "--drain-timeout", "0.1") as client:
        client.change("load", "one")
        stream, other = streaming(client, "first"), streaming(client, "one")
        assert client.change("unload", "first").status_code == 200
        assert json.loads(stream()[-1])["error"]["code"] == "model_not_loaded"
        assert finished(other())


def test_sigterm_drains_while_a_model_is_loaded(folder, slow, gate):
    with serving(folder, "--models-autoload", drain_seconds=3.0) as client:
        loading = in_background(lambda: client.change("load", "one"))
        wait_for(lambda: client.statuses()["one"] == "loading")
        stream = streaming(client, "first", tokens=50)
        client.server.handle_exit(signal.SIGTERM, None)
        assert finished(stream())
        assert loading().status_code == 503
    assert not [each for each in threading.enumerate() if each.name.startswith("models")]


def resident():
    """Bytes of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10


class MallocUse(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_: ClassVar = [("counts", ctypes.c_size_t * 10)]


def allocated():
    """Bytes that malloc has given and not got back, and those of mappings for huge pages.

    What is resident can be more: malloc_trim leaves the top of all arenas but the first, up to
    64 MiB, and which threads' arenas a load uses is a matter of timing.
    """
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = MallocUse
    _, _, _, _, mapped, _, _, taken, _, _ = tell().counts
    maps = Path("/proc/self/smaps").read_text()
    huge = re.findall(r"\nSize: +(\d+) kB(?:\n(?!Size:).*)*\nVmFlags:.* hg\b", maps)
    return mapped + taken + (sum(map(int, huge)) << 10)


def all_gone(alive):
    llguidance.LLTokenizer.json_slices()  # the library frees what it was told to when next called
    return all(each() is None for each in alive)


def test_memory_threads_and_processes_come_back(tmp_path):
    """In a process of its own: what other tests have freed comes and goes as it likes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        alone.submit(load_and_unload, tmp_path).result()


def load_and_unload(tmp_path):
    """Loaded, it takes some 90 MB."""
    gc.set_threshold(700, 10, 10)  # as in a server; for tests it is more
    config = llama(eos_token_id=256, hidden_size=510, intermediate_size=4096)
    save(random_model(config), tmp_path / "more/one")
    config = {"chat_template": TEMPLATE}
    (tmp_path / "more/one/tokenizer_config.json").write_text(json.dumps(config))
    answered = {"guided_json": {"type": "object"}, "max_tokens": 20}

    def footprint():
        own = [f"/proc/self/{name}" for name in ("task", "fd")]
        children = 0
        for each in Path("/proc/self/task").glob("*/children"):
            with suppress(FileNotFoundError):  # of a thread that has ended meanwhile
                children += len(each.read_text().split())
        return [*map(len, map(os.listdir, own)), children]

    with serving(tmp_path, "--dtype", "float32", named=()) as client:
        kept, alive = [], []
        for _ in range(4):
            client.change("load", "one")
            assert client.complete("one", **answered).status_code == 200
            registry = client.app.state.models
            (loaded,) = registry._loaded.values()
            served = loaded.served
            parts = (loaded.engine, served.tokenizer, served.chat_template, served.grammars)
            alive += map(weakref.ref, parts)
            held = resident()
            del loaded, served, parts
            client.change("unload", "one")
            assert held - resident() > 60 << 20
            assert all_gone(alive)
            kept.append(allocated())
            if len(kept) == 1:
                first = footprint()
        # Ended processes and threads take a moment, at the first time too; and two more threads may
        # be kept for any work. One that stayed each time would have made three.
        most = [count + 2 for count in first]
        wait_for(lambda: all(map(le, footprint(), most)))
        assert max(kept) - kept[0] < 1 << 20


@pytest.mark.parametrize(
    ("words", "at_start", "others", "most"),
    [
        ("a=x b=y", ["a", "b"], [], 2),
        ("a=x b=y c=z --max-models 2", ["a", "b"], ["c"], 2),
        ("a=x --max-models 5", ["a"], [], 5),
        ("--models-dir {}", [], ["more", "one"], 4),
        ("a=x --models-dir {} --max-models 1", ["a"], ["more", "one"], 1),
    ],
)
def test_which_models_are_loaded_at_the_start(tmp_path, words, at_start, others, most):
    (tmp_path / "more.gguf").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "one/config.json").touch()
    config = configured(*words.format(tmp_path).split())
    assert [each.name for each in config.models] == at_start
    assert [each.name for each in config.others] == others
    assert config.max_models == most


def test_a_folder_of_models_is_checked_at_the_start(tmp_path):
    with pytest.raises(click.BadParameter, match="holds no models"):
        configured("--models-dir", str(tmp_path))
    with pytest.raises(click.BadParameter, match=r"there is no folder .*/none"):
        configured("--models-dir", str(tmp_path / "none"))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UsageError, match="two models are called 'a'"):
        configured("a=x", "--models-dir", str(tmp_path))
    assert configured().others == () and configured().models == (ModelSource("smollm2", "smollm2"),)
    assert not configured().come_and_go
