"""A real server process over a tiny checkpoint, as users meet it: socket, signals, exit status."""

import asyncio
import gc
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.catalogue import Place
from ropewalk.server import listen
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.http import protocol
from ropewalk.server.launch import build
from ropewalk.server.launch.banner import ModelFacts
from tests.model.checkpoints import llama, random_model, save
from tests.model.tiny import tiny
from tests.server.fake_engine import configured, counting, make_engine, make_planner
from tests.server.toy import CONTEXT, TEMPLATE, toy, toy_app

READY_SECONDS = 90


class Served:
    """`ropewalk serve` on a free port; its log is kept in a file."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, program: str = "ropewalk", **environ: str
    ) -> None:
        self.log = folder / "server.log"
        command = [sys.executable, "-m", program, "serve", f"m={model}", "--port", "0", *flags]
        # What it imports and how OpenMP waits is logged, too.
        env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "OMP_DISPLAY_ENV": "verbose"} | environ
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        self.port = self._wait()

    def _wait(self) -> int:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log.read_text().splitlines():
                if line.startswith("curl"):
                    return int(line.split("127.0.0.1:")[1].split("/")[0])
            time.sleep(0.1)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def post(self, path: str, body: dict[str, object]) -> tuple[int, bytes]:
        return exchange(self.port, "POST", path, json.dumps({"model": "m"} | body))

    def metric(self, name: str, label: str = "") -> float:
        """Sum over the series of this name whose labels contain `label`."""
        _, text = exchange(self.port, "GET", "/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(name + "{")]
        assert lines, f"no series {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)

    def footprint(self) -> tuple[int, int]:
        """Threads, and open file descriptors, sockets among them."""
        folder = Path("/proc") / str(self.process.pid)
        return len(os.listdir(folder / "task")), len(os.listdir(folder / "fd"))

    def settled(self) -> tuple[int, int]:
        """The footprint once it stays the same: closing a connection takes the server a moment."""
        seen = [self.footprint()]
        while len(seen) < 10 or len(set(seen[-10:])) > 1:
            assert len(seen) < 400
            time.sleep(0.03)
            seen.append(self.footprint())
        return seen[-1]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def exchange(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = llama(eos_token_id=256, max_position_embeddings=512)
    folder = save(random_model(config), tmp_path_factory.mktemp("model"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    made = Served(model, folder, "--kv-memory", "4M", "--max-seqs", "16", "--max-queue", "200")
    yield made
    made.stop()


def eventually(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def streamed(body):
    """Payloads of a finished stream, [DONE] checked and left out."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def one_client(port, i, rng, longest_wait):
    """Status line of the answer, read to its end; every third client leaves at a random moment.

    It asks for so much that a fast server has not done with it.
    """
    leaves = i % 3 == 0
    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 200)))
    body = {"model": "m", "max_tokens": 250 if leaves else rng.randint(1, 60), "ignore_eos": True}
    body |= {"stream": i % 2 == 0, "temperature": 0.0 if i % 5 else 1.0, "n": 1 + (i % 7 == 0)}
    if i % 4 == 0:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        async with asyncio.timeout(rng.random() * longest_wait if leaves else 60):
            return (await reader.read(-1)).split(b"\r\n", 1)[0]
    except TimeoutError:
        assert leaves
        return None
    finally:
        writer.close()


async def clients(port, count, longest_wait=0.6):
    """All of them, started a hundredth of a second apart; the answers of those who stayed."""

    async def later(i):
        await asyncio.sleep(i * 0.01)
        return await one_client(port, i, random.Random(i), longest_wait)

    answers = await asyncio.gather(*(later(i) for i in range(count)))
    assert answers.count(None) > count // 20
    return [answer for i, answer in enumerate(answers) if i % 3]


def test_two_hundred_requests_of_which_a_third_leave(server):
    for path, content in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        what = "warm" if content == "prompt" else [{"role": "user", "content": "warm"}]
        assert server.post(path, {content: what, "max_tokens": 2, "n": 2})[0] == 200
    total = server.metric("ropewalk_kv_blocks")
    before = server.settled()
    with socket.create_connection(("127.0.0.1", server.port)):
        eventually(lambda: server.footprint()[1] == before[1] + 1)  # it would see one left over
    assert server.settled() == before
    assert set(asyncio.run(clients(server.port, 200))) == {b"HTTP/1.1 200 OK"}
    eventually(lambda: server.metric("ropewalk_requests_running") == 0)
    assert server.metric("ropewalk_requests_waiting") == 0
    assert server.metric("ropewalk_client_disconnects_total") > 10
    assert server.metric("ropewalk_kv_blocks", 'state="active"') == 0
    assert server.metric("ropewalk_kv_blocks") == total
    assert server.settled() == before
    log = server.log.read_text()
    assert "ERROR" not in log
    assert "Traceback" not in log


def unhurried(batch, kv):
    time.sleep(0.002)
    return counting(batch, kv)


def test_no_task_is_left_behind(caplog):
    """The same in this process, over an engine that counts: every task of the loop is looked at."""
    made, manager = make_engine(unhurried, blocks=400, max_context=CONTEXT, max_queue=300)
    engine = AsyncEngine({"m": made}, lambda model, stats: None)
    app = toy_app(engine, [toy("m")])
    threads = set(threading.enumerate())

    async def settled(tasks):
        async with asyncio.timeout(10):
            while asyncio.all_tasks() != tasks or engine.active() or manager.counts().active:
                await asyncio.sleep(0.01)

    async def run():
        config = protocol.uvicorn_config(app, host="127.0.0.1", port=0, log_config=None)
        server = protocol.Server(config, app.state.drain, 5.0)
        listener = listen.bind("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks()
        assert serving in tasks
        answers = await clients(listener.getsockname()[1], 50, longest_wait=0.3)
        assert set(answers) == {b"HTTP/1.1 200 OK"}
        await settled(tasks)
        assert app.state.drain.in_flight == 0 and not app.state.drain.lifelines
        server.should_exit = True
        await serving
        return asyncio.all_tasks()

    assert len(asyncio.run(run())) == 1  # its own
    assert set(threading.enumerate()) <= threads
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_lost_device_ends_the_process_with_status_70(monkeypatch, capsys, caplog):
    steps = itertools.count()

    def lost(batch, kv):
        if next(steps) == 20:
            raise torch.AcceleratorError("an illegal memory access")
        return unhurried(batch, kv)

    engine, _ = make_engine(lost)
    listener = listen.bind("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def load_models(config, metrics):
        facts = ModelFacts(
            *("m", "fake", "rope", 100, 100, "cpu", "float32", "none", "float32", 8, 39, 4, False)
        )
        build._register(metrics, facts, tiny("nope"))
        place = Place([ReferenceAttention], torch.float32, torch.device("cpu"))
        served = toy("m", max_context=100)
        return [build.Loaded(served, engine, facts, place, make_planner(), None)]

    monkeypatch.setattr(build, "load_models", load_models)
    status = []
    thread = threading.Thread(
        target=lambda: status.append(build.run(configured("any"), listener, None)), daemon=True
    )
    gc.disable()  # as `serve` does until all is loaded
    thread.start()
    eventually(lambda: "curl" in capsys.readouterr().out)
    assert gc.isenabled()
    body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 90, "stream": True})
    code, answer = exchange(port, "POST", "/v1/completions", body)
    assert code == 200
    assert answer.count(b"data: ") > 10
    assert b"shutting_down" in answer.splitlines()[-2]
    thread.join(timeout=5)
    assert status == [70]
    assert "illegal memory access" in caplog.text


def test_streams_join_to_the_whole_answer_and_seeds_repeat(server):
    for seed in (1, 2):
        body = {"prompt": "rope walks", "max_tokens": 60, "seed": seed, "n": 3, "temperature": 1.2}
        status, whole = server.post("/v1/completions", body)
        assert status == 200
        texts = [choice["text"] for choice in json.loads(whole)["choices"]]
        assert len(set(texts)) == 3
        _, chunks = server.post("/v1/completions", body | {"stream": True})
        joined = ["", "", ""]
        for chunk in streamed(chunks):
            for choice in chunk["choices"]:
                joined[choice["index"]] += choice["text"]
        assert joined == texts


def test_chat_is_served(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "seed": 3}
    status, whole = server.post("/v1/chat/completions", body)
    assert status == 200
    _, chunks = server.post("/v1/chat/completions", body | {"stream": True})
    deltas = [choice["delta"] for chunk in streamed(chunks) for choice in chunk["choices"]]
    joined = "".join(delta.get("content") or "" for delta in deltas)
    assert joined == json.loads(whole)["choices"][0]["message"]["content"] != ""


def test_what_only_compiling_needs_is_not_imported(server):
    """Some operations on "meta" have torch import it: seconds of each start, and memory."""
    log = server.log.read_text()
    imported = {line.rpartition(" ")[2] for line in log.splitlines()}
    assert "ropewalk.server.launch.build" in imported and not imported & {"sympy", "torch._dynamo"}


@pytest.mark.skipif(
    bool({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()), reason="told otherwise"
)
def test_its_threads_wait_briefly(server):
    log = server.log.read_text()
    if "OPENMP DISPLAY ENVIRONMENT" not in log or "GOMP_" not in log:
        pytest.skip("not GNU's OpenMP")
    assert "GOMP_SPINCOUNT = '30000'" in log


def test_sigterm_lets_running_streams_finish(server):
    """Stops the server of this file: the last test that uses it."""
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "stream": True}
    _, calm = server.post("/v1/completions", body)
    running = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(4)]
    for each in running:
        asked = json.dumps(body | {"model": "m"})
        each.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    begun = [each.getresponse() for each in running]  # their headers, while tokens are computed
    server.process.send_signal(signal.SIGTERM)
    for response in begun:
        assert response.status == 200
        assert text_of(response.read()) == text_of(calm)
    assert server.process.wait(timeout=20) == 0
    for each in running:
        each.close()


def text_of(answer):
    return "".join(c["text"] for chunk in streamed(answer) for c in chunk["choices"])


@pytest.mark.full  # test_placement.py shows the sentence, test_cli.py how one is said
def test_what_cannot_be_served_is_said_in_one_sentence(model):
    done = subprocess.run(
        [sys.executable, "-m", "ropewalk", "serve", str(model), "--port", "0", "--kv-memory", "1K"],
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    assert done.returncode == 1
    assert "raise --kv-memory" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
