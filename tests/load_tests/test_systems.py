import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from ropewalk.load_tests.client.client import get_json
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.peers.systems import (
    OURS,
    PEERS,
    System,
    peer_from,
    running,
    session_processes,
    system_from,
)
from tests.load_tests.test_serving import alive

PROGRAMS = {name: Path(f"/p/{name}/bin/program") for name in PEERS}
FAKE = f"{sys.executable} -m tests.load_tests.sse_server {{port}}"


def fake(command: str) -> System:
    return System("fake:1", "openai", command)


def made(spec: str, **programs) -> System:
    return system_from(spec, ours=OURS, peers=programs or PROGRAMS, model=Path("/m"))


def test_commands():
    ours, peer = made("ropewalk:float32"), made("transformers:bfloat16")
    assert ours.command.startswith(f"{sys.executable} -m ropewalk serve /m/bf16 ")
    assert ours.command.endswith("--port {port} --dtype float32")
    assert peer.command.startswith(
        "/p/transformers/bin/program -m transformers.cli.transformers serve /m/bf16-noeos "
    )
    assert "--continuous-batching" in peer.command
    assert "--dtype bfloat16" in peer.command
    assert (ours.dialect, peer.dialect) == ("openai", "transformers")


def test_commands_of_the_peers_that_need_more_than_their_options():
    vllm = made("vllm:bfloat16").command
    assert "LD_PRELOAD=libtcmalloc_minimal.so.4:/p/vllm/lib/libiomp5.so " in vllm
    last = len(os.sched_getaffinity(0)) - 1
    assert f"BIND=0-{last} /p/vllm/bin/program -m vllm.entrypoints" in vllm
    assert " -m /m/float32.gguf " in made("llamacpp:float32").command
    assert made("openvino:float32").command.endswith(f"/m/openvino float32 {last + 1} {{port}}")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_weights_of_few_bits(bits):
    assert made(f"ropewalk:{bits}").command.endswith(f" --dtype bfloat16 --quantize {bits}")
    assert f" -m /m/{bits}.gguf " in made(f"llamacpp:{bits}").command
    assert f" /m/openvino {bits} " in made(f"openvino:{bits}").command
    words = f"vllm:{bits}: {bits} is compared only for llamacpp, openvino"
    with pytest.raises(ValueError, match=words):
        made(f"vllm:{bits}")


@pytest.mark.parametrize("spec", ["ropewalk", "sglang:bfloat16", ""])
def test_other_systems_are_refused(spec):
    with pytest.raises(
        ValueError, match="is not PROGRAM:DTYPE, where PROGRAM is one of ropewalk, "
    ):
        made(spec)


def test_a_peer_without_a_program_is_refused():
    with pytest.raises(ValueError, match="vllm:bfloat16 needs its program: add --peer vllm=PATH"):
        made("vllm:bfloat16", openvino=Path("/p"))


def test_a_peer_is_a_name_and_a_file(tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert peer_from(f"vllm={link}") == ("vllm", link)  # the link itself: it is the environment
    for text in ("vllm", "vllm=", f"sglang={link}"):
        with pytest.raises(ValueError, match="is not PEER=PROGRAM"):
            peer_from(text)
    with pytest.raises(ValueError, match="vllm: there is no file /no/such"):
        peer_from("vllm=/no/such")


def test_a_server_runs_inside_the_block_only(tmp_path):
    async def use() -> int:
        async with running(fake(FAKE), tmp_path, 5.0) as (server, pid):
            assert alive(pid)
            models = await get_json(server, "/v1/models")
            assert models["data"][0]["id"] == "tiny"
            return pid

    assert not alive(asyncio.run(use()))


def test_a_failure_inside_the_block_also_stops_the_server(tmp_path):
    pids = []

    async def use() -> None:
        async with running(fake(FAKE), tmp_path, 5.0) as (_, pid):
            pids.append(pid)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        asyncio.run(use())
    assert not alive(pids[0])


# The child never hears the interrupt that ends its parent.
PARENT = """
import signal, subprocess, sys
from pathlib import Path

heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-m", "tests.load_tests.sse_server", sys.argv[1]])
signal.signal(signal.SIGINT, heard)
Path(sys.argv[2]).write_text(str(child.pid))
child.wait()
"""


def test_what_a_server_started_ends_with_it(tmp_path):
    script, child = tmp_path / "parent.py", tmp_path / "child.pid"
    script.write_text(PARENT)
    command = f"{sys.executable} {script} {{port}} {child}"

    async def use() -> None:
        async with running(fake(command), tmp_path, 5.0) as (_, pid):
            assert alive(int(child.read_text()))
            assert {pid, int(child.read_text())} <= set(session_processes(pid))

    asyncio.run(use())
    deadline = time.monotonic() + 5  # the orphan is reaped by somebody else
    while alive(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(int(child.read_text()))


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path):
    command = f"{sys.executable} -c print('no_such_model',{{port}})"
    starting = running(fake(command), tmp_path, 5.0)
    with pytest.raises(StartFailed, match=r"(?s)fake:1: .* ended at its start.*no_such_model"):
        asyncio.run(starting.__aenter__())


def test_a_missing_program_is_named(tmp_path):
    starting = running(fake("/no/such/python"), tmp_path, 5.0)
    with pytest.raises(StartFailed, match="/no/such/python: No such file"):
        asyncio.run(starting.__aenter__())


def test_thread_counts_of_the_caller_do_not_reach_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ.get('OMP_NUM_THREADS', 'unset'))")
    command = f"{sys.executable} {script} {{port}}"
    starting = running(fake(command), tmp_path, 5.0)
    with pytest.raises(StartFailed, match=r"(?s)ended at its start.*unset"):
        asyncio.run(starting.__aenter__())
