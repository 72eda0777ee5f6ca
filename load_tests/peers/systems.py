"""Starts and stops the servers of a comparison, Ropewalk and its peers; and their memory.

A system runs alone while it is measured, with every core, the same weights and the same precision.
How each peer is installed: docs/load-testing-peers.md.
"""

import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Dialect, Server

OURS = (
    "{python} -m ropewalk serve {model}/bf16 --draft-tokens 0 "  # the peers guess none either
    "--host {host} --port {port} --dtype {dtype}"
)
ROPEWALK = "ropewalk"
# In place of a dtype: weights in that many bits, all else in bfloat16; and which systems can.
_FEW_BITS = ("int8", "int4")
_ROUND = frozenset({ROPEWALK, "llamacpp", "openvino"})
_PROC = Path("/proc")
_SESSION = 3  # index in the fields after the name: state, parent, group, session
# Peer → its command with {program} for what `--peer` names.
PEERS: Mapping[str, str] = {
    # It has no ignore_eos: only a copy of the model without end-of-text keeps answers from
    # ending early.
    "transformers": (
        "{program} -m transformers.cli.transformers serve {model}/bf16-noeos "
        "--continuous-batching --device cpu --dtype {dtype} --attn-implementation sdpa "
        "--cb-max-batch-tokens 2048 --cb-num-blocks 1024 --cb-block-size 32 "
        "--host {host} --port {port}"
    ),
    # By default it leaves one core unused. Its own documentation recommends both libraries on a
    # CPU.
    "vllm": (
        "env LD_PRELOAD=libtcmalloc_minimal.so.4:{prefix}/lib/libiomp5.so "
        "VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-{last_core} "
        "{program} -m vllm.entrypoints.openai.api_server --model {model}/bf16 "
        "--served-model-name m --dtype {dtype} --max-model-len 4096 --max-num-seqs 32 "
        "--host {host} --port {port}"
    ),
    # Computes in the type of its file's weights. Room for 1,280 tokens in each of 32 slots.
    "llamacpp": (
        "{program} -m {model}/{dtype}.gguf -a m -t {cores} -tb {cores} -np 32 --no-kv-unified "
        "-c 40960 -fa on --cache-ram 0 --host {host} --port {port}"
    ),
    "openvino": (
        "{program} -m ropewalk.load_tests.peers.openvino_server "
        "{model}/openvino {dtype} {cores} {port}"
    ),
}


@dataclass(frozen=True, slots=True)
class System:
    """One server program with one precision. In `command`, {port} is still to fill in."""

    name: str
    dialect: Dialect
    command: str


def peer_from(text: str) -> tuple[str, Path]:
    """`vllm=/path/to/python` → the peer and the program to run it with. Raises ValueError."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise ValueError(f"{text!r} is not PEER=PROGRAM, where PEER is one of {', '.join(PEERS)}")
    if not Path(path).is_file():
        raise ValueError(f"{name}: there is no file {path}; name its Python or server program")
    return name, Path(path).absolute()  # a resolved link would leave the virtual environment


def system_from(spec: str, *, ours: str, peers: Mapping[str, Path], model: Path) -> System:
    """`PROGRAM:DTYPE` → how to start it. Raises ValueError.

    `ours` is the template of Ropewalk's command, `peers` the programs by peer, `model` the folder
    with the weights in each system's format.
    """
    name, _, dtype = spec.partition(":")
    if name not in (ROPEWALK, *PEERS) or not dtype:
        known = ", ".join((ROPEWALK, *PEERS))
        raise ValueError(f"{spec!r} is not PROGRAM:DTYPE, where PROGRAM is one of {known}")
    rounds = dtype in _FEW_BITS
    if rounds and name not in _ROUND:
        raise ValueError(f"{spec}: {dtype} is compared only for {', '.join(sorted(_ROUND))}")
    if name != ROPEWALK and name not in peers:
        raise ValueError(f"{spec} needs its program: add --peer {name}=PATH")
    template = ours if name == ROPEWALK else PEERS[name]
    program = peers.get(name, Path(sys.executable))
    cores = len(os.sched_getaffinity(0))
    command = template.format(
        python=shlex.quote(sys.executable),
        program=shlex.quote(str(program)),
        prefix=shlex.quote(str(program.parent.parent)),
        model=shlex.quote(str(model)),
        dtype=f"bfloat16 --quantize {dtype}" if rounds and name == ROPEWALK else dtype,
        cores=cores,
        last_core=cores - 1,
        host=process.HOST,
        port="{port}",
    )
    return System(spec, "transformers" if name == "transformers" else "openai", command)


@asynccontextmanager
async def running(
    system: System, logs: Path, timeout_s: float
) -> AsyncIterator[tuple[Server, int]]:
    """Start a system, wait until it answers, stop it afterwards. Raises StartFailed.

    The number is its process's, and that of the session with all that it starts. Its output goes
    to a file in `logs`; `timeout_s` is the limit of each request to it.
    """
    port = process.free_port()
    words = shlex.split(system.command.format(port=port))
    log = logs / f"{system.name.replace(':', '-')}.log"
    with process.start(system.name, words, log) as started:
        server = Server(process.HOST, port, dialect=system.dialect, timeout_s=timeout_s)
        await started.answers(server)
        yield server, started.popen.pid


def resident_bytes(session: int) -> int:
    """Memory of all processes of a session, in bytes; a page that they share counts once.

    This is the proportional set size: a shared page is divided among all processes that map it, so
    one shared with a process outside counts in part. 0 without such a session or without /proc.
    """
    return sum(_pss(process) for process in session_processes(session))


def session_processes(session: int) -> list[int]:
    return [
        int(folder.name)
        for folder in _PROC.glob("[0-9]*")
        if _session_of(folder / "stat") == session
    ]


def _session_of(stat: Path) -> int | None:
    """None for a process that has ended, or a zombie, which holds no memory any more."""
    with suppress(OSError):
        # The name is in brackets and may contain anything.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[_SESSION])
    return None


def _pss(process: int) -> int:
    with suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
