"""Starts and stops the servers of a comparison of encodings: one process per setting.

Variants differ only in the encoding: weights (except its own), context and number of cached tokens
are the same. A bias form or key storage is an option of the whole server, so each has a process of
its own. So has the trained family's learned model: its table of positions ends with the trained
context, and a server asked for a longer one does not start. All others share one process.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import (
    Server,
    Unreachable,
    Variant,
    fetch,
    get_json,
)
from ropewalk.load_tests.client.process import ServerProcess, StartFailed
from ropewalk.load_tests.common.memory import free_memory

PROGRAM = (sys.executable, "-m", "ropewalk", "serve")
FAMILY = "family"
TRAINED_CONTEXT = 512  # of the family's models, which a server says only once it is started
SHAPE = "shape:"
TABLE = "learned"  # the family's model of it takes only its trained context
# Encoding → its option that changes no answer, and the values.
SETTINGS = {
    "t5": ("form", ("window", "table", "materialised")),
    "rope": ("storage", ("absolute", "raw", "block")),
}
_END_LIMIT_S = 5.0  # a server closes its connections before it ends
_MEMORY_SHARE = 0.25  # of the free memory, for keys and values of all variants


def parse_serve(text: str) -> str:
    """`family`, `shape:NAME` or the path of a config.json, as a source. Raises ValueError."""
    if text == FAMILY or (text.startswith(SHAPE) and text != SHAPE):
        return text
    if Path(text).is_file():
        return SHAPE + text
    raise ValueError(
        f"{text!r} cannot be served; use {FAMILY}, {SHAPE}smollm2 or the path of a config.json"
    )


def model_of(source: str, encoding: str) -> str:
    """The model that `ropewalk serve` loads: one of the family, or random weights of a shape."""
    if source == FAMILY:
        return f"ropewalk-{encoding.rpartition(':')[2].lower()}"  # as training names them
    return f"{source}:{encoding}"


def setting_names() -> list[str]:
    """All texts that `parse_setting` accepts."""
    return [f"{name}:{each}" for name, (_, settings) in SETTINGS.items() for each in settings]


def parse_setting(text: str) -> tuple[str, str]:
    """`t5:table` → its encoding and the setting. Raises ValueError."""
    if text in setting_names():
        encoding, _, setting = text.partition(":")
        return encoding, setting
    known = ", ".join(setting_names())
    raise ValueError(f"{text!r} is no bias form or key storage; use some of {known}")


@asynccontextmanager
async def serving(
    source: str,
    encodings: Sequence[str],
    settings: Sequence[str],
    logs: Path,
    *,
    context: int,
    timeout_s: float = 600.0,
    tell: Callable[[str], object] = lambda line: None,
) -> AsyncIterator[list[Variant]]:
    """Variants whose servers answer: the encodings, then the settings, in the order given.

    `context` bounds prompt and answer together, in tokens, for all but a trained table of
    positions. All variants share a quarter of the free memory for keys and values equally. Servers
    write to files in `logs`; `tell` is called with what is being waited for. Nothing is left
    running, even after an error, an interrupt or SIGTERM. Raises StartFailed, and ValueError for
    an unknown setting.
    """
    groups = _groups(source, encodings, settings, timeout_s)
    by_label = {variant.label: variant for group in groups for variant in group.variants}
    variants = [by_label[label] for label in (*encodings, *settings)]
    kv_bytes = _free_share(len(variants))
    with terminated_as_interrupted(), ExitStack() as stopping:
        running: list[ServerProcess] = []
        for group in groups:
            started = _start(source, group, logs, context, kv_bytes)
            running.append(stopping.enter_context(started))
        for started in running:  # at exit all are interrupted before any is waited for
            stopping.callback(started.interrupt)
        for group, started in zip(groups, running, strict=True):
            await started.answers(group.server, tell)
            if not group.own_context:
                await _check_context(group, context)
        yield variants


@contextmanager
def serve_alone(*words: str, api_key: str | None = None) -> Iterator[tuple[Server, ServerProcess]]:
    """`ropewalk serve WORDS` at a free port, perhaps not answering yet; stopped afterwards.

    An interrupt or SIGTERM stops it, too. The process's `log` is there until then. Raises
    StartFailed, with the end of the log, where the server has ended and is therefore Unreachable.
    """
    server = Server(process.HOST, process.free_port(), api_key=api_key)
    command = [*PROGRAM, *words, "--host", server.host, "--port", str(server.port)]
    with (
        terminated_as_interrupted(),
        tempfile.TemporaryDirectory() as folder,
        process.start("the server", command, Path(folder, "log")) as started,
    ):
        try:
            yield server, started
        except Unreachable as error:
            try:
                started.popen.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise error from None
            raise started.failed(f"ended: {error}") from None


async def flush(server: Server) -> None:
    """Empty the prefix cache of its model. Raises Unreachable where the server cannot."""
    query = "" if server.model is None else f"?model={quote(server.model, safe='')}"
    await fetch(server, "POST", f"/v1/cache/flush{query}")


@dataclass(frozen=True, slots=True)
class _Group:
    """Variants that share a process."""

    server: Server  # without a choice among its models
    variants: tuple[Variant, ...]
    flags: tuple[str, ...] = ()
    own_context: bool = False  # the trained context of its models, not the one asked for


def _groups(
    source: str, encodings: Sequence[str], settings: Sequence[str], timeout_s: float
) -> list[_Group]:
    def group(*labels: str, setting: str = "", own_context: bool = False) -> _Group:
        """The models are named by the labels."""
        server = Server(process.HOST, process.free_port(), timeout_s=timeout_s)
        variants = tuple(
            Variant(label, replace(server, model=label), label.removesuffix(f":{setting}"), setting)
            for label in labels
        )
        option = f"{SETTINGS[variants[0].encoding][0]}={setting}" if setting else ""
        flags = ("--encoding-option", option) if setting else ()
        return _Group(server, variants, flags, own_context)

    apart = TABLE if source == FAMILY else None
    shared = [name for name in encodings if name != apart]
    groups = [group(*shared)] if shared else []
    if apart in encodings:
        groups.append(group(TABLE, own_context=True))
    return groups + [group(label, setting=parse_setting(label)[1]) for label in settings]


def _start(source: str, group: _Group, logs: Path, context: int, kv_bytes: int) -> ServerProcess:
    words = [
        *PROGRAM,
        *(f"{variant.label}={model_of(source, variant.encoding)}" for variant in group.variants),
    ]
    words += ["--host", group.server.host, "--port", str(group.server.port)]
    words += ["--threads", str(max((os.cpu_count() or 1) - 1, 1))]  # the client needs a core, too
    words += ["--kv-memory", str(kv_bytes * len(group.variants))]
    words += ["--draft-tokens", "0"]  # how often guesses are right depends on what is generated
    if not group.own_context:
        words += ["--max-model-len", str(context)]
    words += ["--request-timeout", f"{group.server.timeout_s:g}", *group.flags]
    title = ", ".join(variant.label for variant in group.variants)
    return process.start(title, words, logs / f"{group.server.port}.log")


async def _check_context(group: _Group, context: int) -> None:
    """Raises StartFailed: with too little memory a server starts with a shorter context."""
    models = (await get_json(group.server, "/v1/models"))["data"]
    for model in models:
        if model["max_model_len"] < context:
            raise StartFailed(
                f"{model['id']} has room for {model['max_model_len']} tokens instead of the "
                f"{context} that the workload needs; ask for shorter contexts or fewer variants"
            )


def _free_share(variants: int) -> int:
    return int(free_memory() * _MEMORY_SHARE) // max(variants, 1)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM, which `timeout` and supervisors send, as an interrupt, to clean up first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
