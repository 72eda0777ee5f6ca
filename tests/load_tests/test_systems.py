import asyncio
import os
import sys
from pathlib import Path

import pytest

from load_tests.client import DIALECTS, get_json
from load_tests.systems import OURS, Running, StartFailed, System, system

PATHS = {"peer_python": Path("/p/python"), "model": Path("/m/bf16"), "noeos": Path("/m/noeos")}
FAKE = f"{sys.executable} -m tests.load_tests.sse_server {{port}}"


def test_commands():
    ours = system("ropewalk:float32", ours=OURS, **PATHS)
    peer = system("transformers:bfloat16", ours=OURS, **PATHS)
    assert ours.command.startswith(f"{sys.executable} -m server serve /m/bf16 ")
    assert ours.command.endswith("--port {port} --dtype float32")
    assert peer.command.startswith("/p/python -m transformers.cli.transformers serve /m/noeos ")
    assert "--continuous-batching" in peer.command
    assert "--dtype bfloat16" in peer.command
    assert (ours.dialect.name, peer.dialect.name) == ("openai", "transformers")


@pytest.mark.parametrize("spec", ["ropewalk", "vllm:bfloat16", ""])
def test_other_systems_are_refused(spec):
    with pytest.raises(ValueError, match="is not ropewalk:DTYPE"):
        system(spec, ours=OURS, **PATHS)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_runs_inside_the_block_only(tmp_path):
    async def use() -> int:
        running = Running(System("fake:1", DIALECTS["openai"], FAKE), tmp_path, 5.0)
        async with running as server:
            assert alive(running.pid)
            models = await get_json(server, "/v1/models")
            assert models["data"][0]["id"] == "tiny"
            return running.pid

    assert not alive(asyncio.run(use()))


def test_a_failure_inside_the_block_also_stops_the_server(tmp_path):
    pids = []

    async def use() -> None:
        running = Running(System("fake:1", DIALECTS["openai"], FAKE), tmp_path, 5.0)
        async with running:
            pids.append(running.pid)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        asyncio.run(use())
    assert not alive(pids[0])


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path):
    command = f"{sys.executable} -c print('no_such_model',{{port}})"
    running = Running(System("fake:2", DIALECTS["openai"], command), tmp_path, 5.0)
    with pytest.raises(StartFailed, match=r"(?s)fake:2 ended at its start.*no_such_model"):
        asyncio.run(running.__aenter__())


def test_a_missing_program_is_named(tmp_path):
    running = Running(System("fake:3", DIALECTS["openai"], "/no/such/python"), tmp_path, 5.0)
    with pytest.raises(StartFailed, match="/no/such/python: No such file"):
        asyncio.run(running.__aenter__())


def test_thread_counts_of_the_caller_do_not_reach_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ.get('OMP_NUM_THREADS', 'unset'))")
    command = f"{sys.executable} {script} {{port}}"
    running = Running(System("fake:4", DIALECTS["openai"], command), tmp_path, 5.0)
    with pytest.raises(StartFailed, match=r"(?s)ended at its start.*unset"):
        asyncio.run(running.__aenter__())
