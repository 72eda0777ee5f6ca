"""Faults of the machine, tried on real server processes: docs/faults.md has the figures."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.model.checkpoints import llama, random_model, save
from tests.server.serve_faulty import TOO_LARGE
from tests.server.test_end_to_end import Served, eventually, exchange

CLIENTS = 16
FLAGS = ("--kv-memory", "4M", "--max-seqs", "32")
CLOCK = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
/* The real-time clock, as many seconds off as the file CLOCK says. */
int clock_gettime(clockid_t id, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, id, now);
  FILE *file = id == CLOCK_REALTIME ? fopen(getenv("CLOCK"), "r") : NULL;
  long off = 0;
  if (file) {
    if (fscanf(file, "%ld", &off) == 1) now->tv_sec += off;
    fclose(file);
  }
  return failed;
}
"""


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
        body = {"model": "m", "prompt": [number + 1] * 9, "max_tokens": 500, "ignore_eos": True}
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


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """(a library that moves a process's wall clock, the file that says by how much)"""
    compiler = shutil.which("g++") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", library, folder / "clock.c"]
    subprocess.run(command, check=True)
    return library, folder / "offset"


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of 256 KiB."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        if subprocess.run(command, capture_output=True).returncode == 0:
            yield folder
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            return
    pytest.skip("nothing can be mounted here")


@contextlib.contextmanager
def filled(disk):
    """No byte is left on it meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    ballast.unlink()


def answer(server, **more):
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    status, said = server.post("/v1/completions", body | more)
    return status, json.loads(said)


def test_a_clock_that_jumps(model, clock, tmp_path):
    """An hour ahead and then one back, both while streams are under way."""
    library, offset = clock
    offset.write_text("0")
    server = Served(model, tmp_path, *FLAGS, LD_PRELOAD=str(library), CLOCK=str(offset))
    try:
        _, before = answer(server)
        streams = Streams(server.port)
        for jump in ("3600", "-3600"):
            moved = offset.with_name("next")
            moved.write_text(jump)
            moved.rename(offset)
            _, after = answer(server)
            assert abs(after["created"] - before["created"] - int(jump)) < 60  # it has jumped
            assert after["choices"][0]["text"] == before["choices"][0]["text"]
        streams.join()
        assert {(status, code) for status, code, _ in streams.ends} == {(200, "done")}
        for time_of in ("e2e", "queue", "prefill", "decode"):
            name = f"ropewalk_request_{time_of}_seconds"
            assert 0 <= server.metric(f"{name}_sum") < 60 * server.metric(f"{name}_count")
        verified = server.metric("ropewalk_weights_verified_bytes_total")
        eventually(lambda: server.metric("ropewalk_weights_verified_bytes_total") > verified)
        assert exchange(server.port, "GET", "/health/ready")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=10) == 0
    finally:
        server.stop()


def test_a_log_on_a_full_disk_and_a_request_without_memory(model, disk, tmp_path):
    """The log loses lines; of many requests, one fails."""
    server = Served(model, disk, *FLAGS, program="tests.server.serve_faulty", FAULT="none")
    try:
        _, before = answer(server)
        with filled(disk):
            size = server.log.stat().st_size
            streams = Streams(server.port)
            eventually(lambda: server.metric("ropewalk_requests_running") == CLIENTS)
            status, failed = answer(server, prompt=[1] * TOO_LARGE)
            assert (status, failed["error"]["code"]) == (500, "internal_error")
            streams.join()
            assert {(status, code) for status, code, _ in streams.ends} == {(200, "done")}
            assert answer(server)[1]["choices"] == before["choices"]
            assert server.log.stat().st_size < size + 4096
        answer(server)
        # A request is logged after its answer is sent.
        eventually(lambda: "POST /v1/completions 200" in server.log.read_text()[size:])
        with filled(disk):
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=10) == 0
    finally:
        server.stop()


def test_standard_output_that_takes_nothing(model, tmp_path, disk):
    """It goes on without its banner; here the port is known from elsewhere."""
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "ropewalk", "serve", f"m={model}", "--uds", str(path), *FLAGS]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: path.exists() or process.poll() is not None, 90)
        eventually(lambda: "cannot be written" in process.stderr.readline(), 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_command_whose_output_takes_nothing():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ropewalk", "--version"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr == b"ropewalk: no space is left on a disk; free some and try again\n"


@pytest.mark.parametrize("fault", ["error", "stuck", pytest.param("exit", marks=pytest.mark.full)])
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
