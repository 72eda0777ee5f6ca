"""Starts the servers of a comparison of encodings, and stops them: one process per setting.

What is compared differs in the encoding alone: the same weights but for its own, context and
number of cached tokens. A bias form or RoPE frame is a flag of the whole server, so each one asked
for is a process of its own. So is the trained family's learned model: its table of positions ends
with training, and a server that is asked for more does not start. All others share one process.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from load_tests import process
from load_tests.client import DIALECTS, Arm, Server, fetch, get_json
from load_tests.process import ServerProcess, StartFailed

PROGRAM = (sys.executable, "-m", "server", "serve")
FAMILY = "family"
SHAPE = "shape:"
TABLE = "learned"  # of the family, it takes its trained context and no other
# Encoding → the server's flag for its settings, and those.
SETTINGS = {
    "t5": ("--bias-form", ("window", "table", "materialised")),
    "rope": ("--rope-frame", ("absolute", "raw", "block")),
}
_MEMORY_SHARE = 0.25  # of what is free, for keys and values of all arms

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """One model under any encoding: the trained family, or random weights of a shape."""

    source: str

    def model(self, encoding: str) -> str:
        """What `ropewalk serve` is to load."""
        if self.source == FAMILY:
            return f"ropewalk-{encoding.rpartition(':')[2].lower()}"  # as they are trained
        return f"{self.source}:{encoding}"


def parse_serve(text: str) -> ServeSpec:
    """`family`, `shape:NAME` or the path of a config.json. Raises ValueError."""
    if text == FAMILY or (text.startswith(SHAPE) and text != SHAPE):
        return ServeSpec(text)
    if Path(text).is_file():
        return ServeSpec(SHAPE + text)
    raise ValueError(
        f"{text!r} is nothing to serve; use {FAMILY}, {SHAPE}smollm2 or the path of a config.json"
    )


def parse_setting(text: str) -> tuple[str, str]:
    """`t5:table` → its encoding and the setting. Raises ValueError."""
    encoding, _, setting = text.partition(":")
    if encoding in SETTINGS and setting in SETTINGS[encoding][1]:
        return encoding, setting
    known = (f"{name}:{each}" for name, (_, settings) in SETTINGS.items() for each in settings)
    raise ValueError(f"{text!r} is no bias form or RoPE frame; use some of {', '.join(known)}")


@asynccontextmanager
async def serving(
    spec: ServeSpec,
    encodings: Sequence[str],
    settings: Sequence[str],
    logs: Path,
    *,
    context: int,
    timeout_s: float = 600.0,
    kv_bytes: int | None = None,
    tell: Tell = lambda line: None,
) -> AsyncIterator[list[Arm]]:
    """Arms of servers that answer: the encodings, then the settings, in the order given.

    `context` is the longest prompt and answer together, in tokens, of all but a trained table.
    `kv_bytes`, of keys and values of one arm, is by default an equal share of a quarter of the
    free memory. Servers write to files in `logs`; `tell` hears what is awaited. Nothing is left
    running, also after an error, an interrupt or SIGTERM. Raises StartFailed, and ValueError for
    an unknown setting.
    """
    groups = _groups(spec, encodings, settings, timeout_s)
    order = [*encodings, *settings]
    arms = sorted(
        (arm for group in groups for arm in group.arms), key=lambda a: order.index(a.label)
    )
    each = kv_bytes or _free_share(len(arms))
    with terminated_as_interrupted(), ExitStack() as stopping:
        running: list[ServerProcess] = []
        for group in groups:
            running.append(_start(spec, group, logs, context, each))
            stopping.callback(running[-1].stop)
        for started in running:  # run first at the end: all are asked before any is waited for
            stopping.callback(started.interrupt)
        for group, started in zip(groups, running, strict=True):
            await started.answers(group.server, tell)
            if not group.own_context:
                await _check_context(group, context)
        yield arms


async def flush(arm: Arm) -> None:
    """Empty the prefix cache of an arm. Raises Unreachable where the server cannot."""
    query = "" if arm.server.model is None else f"?model={quote(arm.server.model, safe='')}"
    await fetch(arm.server, "POST", f"/v1/cache/flush{query}")


@dataclass(frozen=True, slots=True)
class _Group:
    """Arms that share a process."""

    title: str
    server: Server  # whichever of its models
    flags: tuple[str, ...]
    arms: tuple[Arm, ...]
    own_context: bool = False  # the one that its models were trained with


def _groups(
    spec: ServeSpec, encodings: Sequence[str], settings: Sequence[str], timeout_s: float
) -> list[_Group]:
    apart = {TABLE} & set(encodings) if spec.source == FAMILY else set()
    shared = [(name, name, "") for name in encodings if name not in apart]
    groups = [_group(shared, (), timeout_s)] if shared else []
    for name in apart:
        groups.append(replace(_group([(name, name, "")], (), timeout_s), own_context=True))
    for label in settings:
        encoding, setting = parse_setting(label)
        flags = (SETTINGS[encoding][0], setting)
        groups.append(_group([(label, encoding, setting)], flags, timeout_s))
    return groups


def _group(
    named: Sequence[tuple[str, str, str]], flags: tuple[str, ...], timeout_s: float
) -> _Group:
    """`named`: label, encoding and setting of each arm. Models have the labels as names."""
    server = Server(process.HOST, process.free_port(), DIALECTS["openai"], timeout_s=timeout_s)
    arms = tuple(
        Arm(label, replace(server, model=label), encoding, setting)
        for label, encoding, setting in named
    )
    return _Group(", ".join(label for label, _, _ in named), server, flags, arms)


def _start(
    spec: ServeSpec, group: _Group, logs: Path, context: int, kv_bytes: int
) -> ServerProcess:
    words = [*PROGRAM, *(f"{arm.label}={spec.model(arm.encoding)}" for arm in group.arms)]
    words += ["--host", group.server.host, "--port", str(group.server.port)]
    words += ["--threads", str(max((os.cpu_count() or 1) - 1, 1))]  # the client needs a core, too
    words += ["--kv-memory", str(kv_bytes * len(group.arms))]
    if not group.own_context:
        words += ["--max-model-len", str(context)]
    words += ["--request-timeout", f"{group.server.timeout_s:g}", *group.flags]
    return process.start(group.title, words, logs / f"{group.server.port}.log")


async def _check_context(group: _Group, context: int) -> None:
    """A server that has too little memory starts with a shorter context."""
    models = (await get_json(group.server, "/v1/models"))["data"]
    for model in models:
        if model["max_model_len"] < context:
            raise StartFailed(
                f"{model['id']} has room for {model['max_model_len']} tokens instead of the "
                f"{context} that the workload needs; ask for shorter contexts or fewer arms"
            )


def _free_share(arms: int) -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * _MEMORY_SHARE) // max(arms, 1)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which `timeout` and supervisors send, would otherwise end us without cleaning up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
