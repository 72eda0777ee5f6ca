"""Does a server leak when clients of every kind keep it overloaded?

    scripts/soak [--minutes 30]

Starts a server with little memory for its cache, several models and two API keys, finds the rate
that it can answer, and sends one and a half times as much, at random: texts, ids and lists, streams
and whole answers, several answers to a prompt, scores, stop strings, contexts that overflow,
priorities. Some clients leave before or amid their answer, some read slowly, some send what is
malformed or too long. Then everything must be as it was: no request, no held block, no connection
left, and the memory where it was after the warm-up.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ropewalk.load_tests.client.client import (
    Server,
    Unreachable,
    encode_request,
    fetch,
    get_json,
)
from ropewalk.load_tests.client.exchange import Answer, exchange
from ropewalk.load_tests.client.process import ServerProcess, StartFailed
from ropewalk.load_tests.run.options import add, program
from ropewalk.load_tests.run.serving import serve_alone
from ropewalk.load_tests.workload.prompts import WORDS

MODELS = ("ropewalk-rope", "ropewalk-alibi", "ropewalk-t5")
KEYS = ("soak-one", "soak-two")
LEAVING, SLOW, MALFORMED, LONG = 0.3, 0.05, 0.05, 0.05  # shares of the clients
LIMIT_MIB = 20.0
_FLAGS = (
    *("--max-seqs", "16", "--kv-memory", "24MiB", "--max-queue", "64", "--max-queue-time", "2"),
    *("--max-step-tokens", "128", "--log-level", "warning", "--no-access-log"),
)
_WARM_UP = 0.25  # of the time
_WORKERS = 24  # clients at once while the rate is found
_PATIENCE_S = 330.0  # longer than a request may take
_SETTLE_S = 30.0  # until everything must be over
_TELL_S = 60.0
# What a client may be answered, besides 200: 429, and these if its request is wrong.
_WRONG = frozenset({400, 404})


@dataclass(frozen=True, slots=True)
class Client:
    """One request and how its client behaves."""

    path: str
    body: object
    key: str
    wrong: bool = False  # a 400 is the right answer
    leaves_s: float | None = None  # hangs up after so many seconds
    pauses_s: float = 0.0  # reads nothing at first


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class State:
    """What the server holds, by its metrics."""

    running: float
    waiting: float
    held_blocks: float
    descriptors: float
    changed: float  # cache entries that are wrong


def draw(source: random.Random, models: Mapping[str, Mapping[str, Any]]) -> Client:
    """A client at random, of a model by its description in /v1/models."""
    model = source.choice(list(models))
    about = models[model]
    key, lot = source.choice(KEYS), source.random()
    if lot < MALFORMED:
        return Client("/v1/completions", _malformed(source, model), key, wrong=True)
    if lot < MALFORMED + LONG:
        words = _words(source, 4 * about["max_model_len"])
        return Client("/v1/completions", {"model": model, "prompt": words}, key, wrong=True)
    # RoPE's stored keys can be moved now and then, but not in every block.
    overflows = ("shift",) if about["encoding"] == "rope" else ("shift", "slide")
    path, body = _request(source, model, about["vocab_size"], overflows)
    client = Client(path, body, key)
    lot = source.random()
    if lot < LEAVING:
        return replace(client, leaves_s=source.expovariate(2.0))
    if lot < LEAVING + SLOW:
        return replace(client, pauses_s=source.uniform(0.5, 3.0))
    return client


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(WORDS, k=count))


def _malformed(source: random.Random, model: str) -> object:
    good: dict[str, object] = {"model": model, "prompt": "a b c"}
    return source.choice(
        [
            [good],
            good | {"temperature": "hot"},
            good | {"prompt": [[1, 2], "a"]},
            good | {"unheard_of": 1},
            good | {"prompt": [-1]},
            good | {"n": 0},
            good | {"logprobs": 1000},
            {"prompt": "a"},
        ]
    )


def _request(
    source: random.Random, model: str, vocabulary: int, overflows: Sequence[str]
) -> tuple[str, dict[str, object]]:
    lot = source.random()
    length = source.choice([1, 4, 16, 64, 128])
    if lot < 0.03:
        return "/tokenize", {
            "model": model, "prompt": _words(source, 500), "return_token_strs": True,
        }  # fmt: skip
    if lot < 0.05:
        return "/detokenize", {"model": model, "tokens": source.choices(range(vocabulary), k=3000)}
    body: dict[str, object] = {
        "model": model,
        "prompt": _words(source, length),
        "max_tokens": source.choice([1, 8, 32, 64]),
        "temperature": source.choice([0, 0.8]),
        "stream": source.random() < 0.6,
        "priority": source.choice([0, 0, 0, -1, 5]),
    }
    if source.random() < 0.3:
        body["prompt"] = source.choices(range(vocabulary), k=length)
    if source.random() < 0.3:  # a prefix that others have, too
        body["prompt"] = " ".join(WORDS[:64]) + " " + _words(source, 8)
    extras: list[dict[str, object]] = [
        {"n": source.randint(2, 4)},
        {"prompt": [_words(source, length) for _ in range(source.randint(2, 12))]},
        {"logprobs": 5},
        {"logprobs": 2, "echo": True},
        {"stop": ["e", "\n\n"]},
        {"seed": source.randrange(1000), "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"logit_bias": {str(source.randrange(vocabulary)): -100}},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"return_token_ids": True, "ignore_eos": True},
        {"cache_salt": f"salt{source.randrange(4)}"},
        {"overflow": source.choice(overflows), "ignore_eos": True, "max_tokens": 400},
    ]
    for extra in source.sample(extras, source.choice([0, 0, 1, 2])):
        body |= extra
    if "overflow" in body:  # which neither several answers nor scores go with
        body = {name: body[name] for name in body if name not in ("n", "echo", "logprobs")}
    return "/v1/completions", body


class _Visit(Answer):
    """Reads as its client does. `finished` is the status and what was wrong, or "left"."""

    def __init__(self, content: bytes, client: Client) -> None:
        super().__init__(content, _PATIENCE_S)
        self._client = client
        self._timers: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if self._client.leaves_s is not None:
            self._timers.append(self._loop.call_later(self._client.leaves_s, self.end, "left"))
        if self._client.pauses_s:
            transport.pause_reading()
            resume = self._loop.call_later(self._client.pauses_s, transport.resume_reading)
            self._timers.append(resume)

    def end(self, error: str | None) -> None:
        for timer in self._timers:
            timer.cancel()
        super().end(error)

    def verdict(self) -> str | None:
        status = self.reader.status
        if status == 200:
            if self.body.startswith(b"data: ") and not self.body.endswith(b"data: [DONE]\n\n"):
                return f"a stream ended with {self.body[-200:].decode(errors='replace')}"
            return None
        if status == 429 or (status in _WRONG and self._client.wrong):
            return str(status)
        return f"status {status}: {self.body[:300].decode(errors='replace')}"


async def _send(server: Server, client: Client, tally: Tally) -> None:
    keyed = replace(server, api_key=client.key)
    visit = _Visit(encode_request(keyed, "POST", client.path, client.body), client)
    error = await exchange(server.host, server.port, visit, _PATIENCE_S)
    if error is None:
        tally.ends["200"] += 1
    elif error == "left" or error.isdigit():
        tally.ends[error] += 1
    else:
        tally.ends["fault"] += 1
        tally.faults.append(f"{error} ({json.dumps(client.body)[:300]})")


async def _find_rate(server: Server, new: Callable[[], Client], seconds: float) -> float:
    """Clients a second that the server answers when a few are there at once."""
    tally, began = Tally(), time.monotonic()

    async def worker() -> None:
        while time.monotonic() < began + seconds:
            await _send(server, new(), tally)

    await asyncio.gather(*(worker() for _ in range(_WORKERS)))
    return (tally.ends.total() - tally.ends["429"]) / (time.monotonic() - began)


async def _soak(
    args: argparse.Namespace, server: Server, started: ServerProcess, tally: Tally
) -> list[str]:
    """What is wrong in the end. Raises Unreachable, with what was wrong until then in `tally`."""
    await started.answers(server)
    models = {each["id"]: each for each in (await get_json(server, "/v1/models"))["data"]}
    source = random.Random(args.seed)
    seconds = args.minutes * 60
    before = await _state(server)
    rate = await _find_rate(server, lambda: draw(source, models), min(max(seconds / 20, 2), 20))
    print(f"{rate:.1f} clients/s are answered; sending {args.factor:g} times as many", flush=True)
    sending = set[asyncio.Task[None]]()
    memory: list[tuple[float, float]] = []  # seconds, MiB
    began = told = time.monotonic()
    due = began
    looked = 0.0
    while (now := time.monotonic()) < began + seconds:
        while due <= now:
            task = asyncio.create_task(_send(server, draw(source, models), tally))
            sending.add(task)
            task.add_done_callback(sending.discard)
            due += source.expovariate(rate * args.factor)
        if now - looked > min(1.0, seconds / 100):
            looked = now
            memory.append((now - began, _rss(started.popen.pid)))
            await asyncio.gather(
                fetch(server, "GET", "/metrics"), fetch(server, "GET", "/v1/cache")
            )
        if now - told > _TELL_S:
            told = now
            ends = ", ".join(f"{count} {name}" for name, count in sorted(tally.ends.items()))
            print(f"{now - began:5.0f} s: {memory[-1][1]:.1f} MiB, {len(sending)} open, {ends}",
                  flush=True)  # fmt: skip
        await asyncio.sleep(min(max(due - time.monotonic(), 0), 0.25))
    await asyncio.gather(*sending)
    after = await _settled(server, before)
    print(", ".join(f"{count} {name}" for name, count in sorted(tally.ends.items())))
    growth = growth_mib(memory, seconds)
    print(f"memory: {memory[-1][1]:.1f} MiB, {growth:+.1f} since the warm-up")
    return [*tally.faults[:10], *left_behind(before, after), *too_much(growth)]


def left_behind(before: State, after: State) -> list[str]:
    """What the server should have let go."""
    found = []
    for name in ("running", "waiting", "held_blocks", "changed"):
        if value := getattr(after, name):
            found.append(f"{name} is {value:g} instead of 0")
    if after.descriptors > before.descriptors + 2:  # of a scrape and its probe
        found.append(f"{after.descriptors - before.descriptors:g} descriptors stay open")
    return found


def growth_mib(memory: Sequence[tuple[float, float]], seconds: float) -> float:
    """From the end of the warm-up to the end: of the highest in a tenth of the time at each."""
    warm = seconds * _WARM_UP
    first = [mib for at, mib in memory if warm <= at <= warm + seconds / 10]
    last = [mib for at, mib in memory if at >= seconds * 0.9]
    return max(last) - max(first) if first and last else 0.0


def too_much(growth: float) -> list[str]:
    return [f"memory grew by {growth:.1f} MiB"] if growth > LIMIT_MIB else []


async def _settled(server: Server, before: State) -> State:
    """The state once nothing is left, or after a while."""
    until = time.monotonic() + _SETTLE_S
    state = await _state(server)
    while left_behind(before, state) and time.monotonic() < until:
        await asyncio.sleep(0.5)
        state = await _state(server)
    return state


async def _state(server: Server) -> State:
    page = (await fetch(server, "GET", "/metrics")).decode()

    def total(pattern: str) -> float:
        return sum(map(float, re.findall(rf"^{pattern} (\S+)$", page, re.MULTILINE)))

    return State(
        running=total(r"ropewalk_requests_running{.*}"),
        waiting=total(r"ropewalk_requests_waiting{.*}"),
        held_blocks=total(r'ropewalk_kv_blocks{.*state="active".*}'),
        descriptors=total("process_open_fds"),
        changed=total(r"ropewalk_kv_(?:mutated|stale)_entries_total{.*}"),
    )


def _rss(pid: int) -> float:
    """MiB in memory, by Linux. Raises Unreachable for a process that has ended."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if found is None:  # a zombie
        raise Unreachable("its process has ended")
    return int(found[1]) / 1024


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    keys = [word for key in KEYS for word in ("--api-key", key)]
    try:
        with serve_alone(*args.models, *_FLAGS, *keys, api_key=KEYS[0]) as (server, started):
            tally = Tally()
            try:
                wrong = asyncio.run(_soak(args, server, started, tally))
            except Unreachable as error:
                wrong = [*tally.faults[:10], str(started.failed(f"does not answer: {error}"))]
            started.stop()  # its last lines are of its end
            log = started.log.read_text()
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 2
    errors = [line for line in log.splitlines() if " ERROR " in line]
    wrong += [f"the log has {line}" for line in errors[:10]]
    print("\n".join(wrong or ["nothing leaked"]))
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    options = program(
        "scripts/soak",
        __doc__,
        "Exit status: 0 when nothing is wrong, 1 when something is, which is printed, 2 "
        "when the server does not start.",
    )
    options.add_argument("models", nargs="*", default=MODELS, help="as `ropewalk serve` takes them")
    add(options, "--minutes N", float, 30.0, "of load (%(default)s)")
    add(options, "--factor X", float, 1.5, "of what the server can answer (%(default)s)")
    add(options, "--seed TEXT", str, "soak", "of the clients (%(default)s)")
    return options


if __name__ == "__main__":
    sys.exit(main())
