"""A real server process over a tiny checkpoint, as users meet it: socket, signals, exit status."""

import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.model.checkpoints import llama, random_model, save

READY_SECONDS = 90


class Served:
    """`ropewalk serve` on a free port; its log is kept in a file."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.log = folder / "server.log"
        command = [sys.executable, "-m", "server", "serve", f"m={model}", "--port", "0", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({"model": "m"} | body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Sum over the series whose line begins with `name`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)
        )

    def footprint(self) -> tuple[int, int]:
        """Threads, and open sockets."""
        folder = Path("/proc") / str(self.process.pid)
        sockets = 0
        for descriptor in (folder / "fd").iterdir():
            try:
                sockets += os.readlink(descriptor).startswith("socket:")
            except FileNotFoundError:  # closed meanwhile
                continue
        return len(list((folder / "task").iterdir())), sockets

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = llama(eos_token_id=256, max_position_embeddings=512)
    return save(random_model(config), tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model, tmp_path):
    made = Served(model, tmp_path, "--kv-memory", "4M", "--max-seqs", "16", "--max-queue", "200")
    yield made
    made.stop()


def eventually(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


def streamed(body):
    """Payloads of a finished stream, [DONE] checked and left out."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def one_client(port, i, rng):
    """A third leaves at a random moment; the others read to the end."""
    leaves = i % 3 == 0
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 200)))
    body = {"model": "m", "max_tokens": rng.randint(1, 60), "ignore_eos": True}
    body |= {"stream": i % 2 == 0, "temperature": 0.0 if i % 5 else 1.0, "n": 1 + (i % 7 == 0)}
    path = "/v1/completions"
    data = json.dumps(body | {"prompt": prompt}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        if leaves:
            await asyncio.wait_for(reader.read(-1), rng.random() * 0.6)
            return None
        answer = await reader.read(-1)
        return answer.split(b"\r\n", 1)[0]
    except TimeoutError:
        return None
    finally:
        writer.close()


def test_two_hundred_requests_of_which_a_third_leave(server):
    server.post("/v1/completions", {"prompt": "warm", "max_tokens": 2})
    time.sleep(0.2)
    total = server.metric("ropewalk_kv_blocks{")
    before = server.footprint()
    rng = random.Random(11)

    async def all_of_them():
        async def later(i):
            await asyncio.sleep(i * 0.01)
            return await one_client(server.port, i, random.Random(rng.random()))

        return await asyncio.gather(*(later(i) for i in range(200)))

    answers = asyncio.run(all_of_them())
    stayed = [answer for i, answer in enumerate(answers) if i % 3]
    assert set(stayed) == {b"HTTP/1.1 200 OK"}
    eventually(lambda: server.metric("ropewalk_requests_running{") == 0)
    assert server.metric("ropewalk_requests_waiting{") == 0
    assert server.metric("ropewalk_client_disconnects_total{") > 10
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    (active,) = [line for line in text.splitlines() if 'state="active"' in line]
    assert active.endswith(" 0.0")
    assert server.metric("ropewalk_kv_blocks{") == total
    eventually(lambda: server.footprint()[1] <= before[1])
    assert server.footprint()[0] <= before[0] + 1  # threads: one may be a pool's, kept idle
    log = server.log.read_text()
    assert "ERROR" not in log
    assert "Traceback" not in log


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


def test_sigterm_lets_running_streams_finish(server):
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    _, calm = server.post("/v1/completions", body | {"stream": True})
    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(server.post, "/v1/completions", body | {"stream": True}) for _ in range(4)
        ]
        eventually(lambda: server.metric("ropewalk_requests_running{") == 4)
        server.process.send_signal(signal.SIGTERM)
        answers = [each.result() for each in running]
    assert server.process.wait(timeout=20) == 0
    for status, answer in answers:
        assert status == 200
        assert text_of(answer) == text_of(calm)


def text_of(answer):
    return "".join(c["text"] for chunk in streamed(answer) for c in chunk["choices"])


def test_what_cannot_be_served_is_said_in_one_sentence(model):
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", str(model), "--port", "0", "--kv-memory", "1K"],
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    assert done.returncode == 1
    assert "raise --kv-memory" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
