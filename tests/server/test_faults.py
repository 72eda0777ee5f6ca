"""Faults of the machine, tried on real server processes: docs/faults.md has the figures."""

import json
import os
import threading
import time

import pytest

from tests.model.checkpoints import llama, random_model, save
from tests.server.test_end_to_end import Served, exchange

CLIENTS = 16
FLAGS = ("--kv-memory", "4M", "--max-seqs", "32", "--no-access-log")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = llama(eos_token_id=256, max_position_embeddings=1024)
    return save(random_model(config), tmp_path_factory.mktemp("model"))


class Streams:
    """Clients that read long streams: how each ended, and when."""

    def __init__(self, port):
        self.begun = 0
        self.ends = []
        self._port = port
        self._threads = [threading.Thread(target=self._read, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _read(self, number):
        body = {"model": "m", "prompt": [number + 1] * 9, "max_tokens": 1000, "ignore_eos": True}
        status, answer = exchange(
            self._port, "POST", "/v1/completions", json.dumps(body | {"stream": True})
        )
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        code = "done"
        if events[-1] != "[DONE]":
            code = json.loads(events[-1])["error"]["code"]
        self.ends.append((status, code, time.monotonic()))

    def join(self):
        for thread in self._threads:
            thread.join(30)
        assert len(self.ends) == CLIENTS


@pytest.mark.parametrize("fault", ["error", "exit", "stuck"])
def test_without_its_engine_a_server_tells_everybody_and_ends(fault, model, tmp_path, capsys):
    told = tmp_path / "fault"
    server = Served(model, tmp_path, *FLAGS, program="tests.server.serve_faulty", FAULT=str(told))
    try:
        streams = Streams(server.port)
        while server.metric("ropewalk_generated_tokens_total") < 50:
            time.sleep(0.01)
        began = time.monotonic()
        partial = tmp_path / "written"
        partial.write_text(fault)
        partial.rename(told)
        streams.join()
        last = max(end for _, _, end in streams.ends) - began
        assert server.process.wait(timeout=10) == 70
        ended = time.monotonic() - began
    finally:
        server.stop()
    assert {(status, code) for status, code, _ in streams.ends} == {(200, "shutting_down")}
    log = server.log.read_text()
    assert ("the engine is stuck" if fault == "stuck" else f"an injected {fault}") in log
    with capsys.disabled():
        if os.environ.get("FIGURES"):
            print(f"\n{fault}: {CLIENTS} streams ended {last:.2f} s later, process {ended:.2f} s")
    assert last < 3 and ended < 5
