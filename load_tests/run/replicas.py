"""What a router in front of replicas makes of prompts that begin alike, and of replicas that end.

    python -m ropewalk.load_tests.run.replicas --url http://127.0.0.1:8000 --save one.json
    python -m ropewalk.load_tests.run.replicas --url http://127.0.0.1:9000 --like one.json

Sends several questions about each of some long beginnings, in random order, as greedy streams. The
same arguments make the same requests, so answers of one server and of replicas can be compared.
Knows no engine: the router is a URL, and so are the replicas' /metrics, if they can be reached.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ropewalk.load_tests.client.client import (
    Server,
    completion_body,
    encode_request,
    split_base_url,
)
from ropewalk.load_tests.client.exchange import Answer as Exchange
from ropewalk.load_tests.client.exchange import exchange
from ropewalk.load_tests.client.http1 import BadResponse, EventReader
from ropewalk.load_tests.client.scrape import snapshot, total, view
from ropewalk.load_tests.common.statistics import percentile
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.report.table import markdown

_HITS = "ropewalk_prefix_cache_hit_tokens_total"
_PROMPTS = "ropewalk_prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts, and lengths in words: how many tokens a word has, the servers say."""

    requests: int = 500
    prefixes: int = 50
    prefix_words: int = 200
    suffix_words: int = 16
    output_tokens: int = 16
    workers: int = 8
    seed: str = "replicas"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request ended. `error` is None where the stream was complete."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    ended: float = 0.0  # seconds after the load began
    error: str | None = None
    begun: bool = False  # whether text came before the error


@dataclass(frozen=True, slots=True)
class Sent:
    """A whole load. `hit_rate` is of prompt tokens; by the replicas' metrics, where they are."""

    title: str
    answers: list[Answer]
    seconds: float
    counted: tuple[float, float] | None = None  # hits and prompt tokens, by the metrics
    whole_s: float | None = None  # from what was done to the replicas until all ran again
    sizes: Sizes | None = None  # None: its file does not say
    model: str | None = None

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def answered(self) -> str:
        return f"{len(self.good)} of {len(self.answers)}"

    @property
    def hit_rate(self) -> float:
        hits, tokens = self.counted or (
            sum(answer.cached_tokens for answer in self.good),
            sum(answer.prompt_tokens for answer in self.good),
        )
        return hits / tokens if tokens else 0.0

    def same(self, other: "Sent") -> int:
        """How many answers are complete and equal in both."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(a.error is None and b.error is None and a.text == b.text for a, b in pairs)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Sent":
        """What `save` wrote."""
        fields = json.loads(path.read_text())
        answers = [Answer(**each) for each in fields["answers"]]
        sizes = fields.get("sizes")
        known = None if sizes is None else Sizes(**sizes)
        return cls(**{**fields, "answers": answers, "sizes": known})


async def kept(
    path: Path, model: str, sizes: Sizes, measure: Callable[[], Awaitable[Sent]]
) -> Sent:
    """What `path` has of that model and those sizes, else what is measured now and kept there."""
    if path.exists():
        found = Sent.load(path)
        if (found.model, found.sizes) == (model, sizes):
            return found
    sent = replace(await measure(), model=model, sizes=sizes)
    sent.save(path)
    return sent


def requests_of(sizes: Sizes) -> list[Request]:
    """Every prefix equally often, in random order: the same for the same sizes."""
    prompts = PromptMaker(sizes.seed, "text")
    prefixes = [prompts.pieces(sizes.prefix_words) for _ in range(sizes.prefixes)]
    chosen = [prefixes[number % sizes.prefixes] for number in range(sizes.requests)]
    prompts.random.shuffle(chosen)
    words = sizes.prefix_words + sizes.suffix_words
    return [Request(prompts.prompt(words, each), None, sizes.output_tokens) for each in chosen]


async def send_all(
    title: str,
    server: Server,
    sizes: Sizes,
    metrics: Sequence[Server] = (),
    tell: Callable[[int], object] = lambda done: None,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> Sent:
    """Send every request of `sizes`; `tell` gets the number of those that have ended."""
    requests = requests_of(sizes)
    found: dict[int, Answer] = {}
    queue = iter(enumerate(requests))
    before = await _snapshots(metrics)
    began = time.perf_counter()

    async def work() -> None:
        for number, request in queue:
            found[number] = await _ask(server, request, began, fields)
            tell(len(found))

    async with asyncio.TaskGroup() as group:
        for _ in range(sizes.workers):
            group.create_task(work())
    seconds = time.perf_counter() - began
    counted = _counted(before, await _snapshots(metrics)) if metrics else None
    answers = [found[number] for number in range(len(requests))]
    return Sent(title, answers, seconds, counted, sizes=sizes)


async def send_disturbed(
    title: str, server: Server, sizes: Sizes, act: Callable[[], Awaitable[float | None]]
) -> Sent:
    """Send longer answers, and call `act` when a third of them are there.

    It returns after how many seconds all replicas ran again, or None where they do not.
    """
    sizes, third = replace(sizes, output_tokens=64), asyncio.Event()

    def tell(done: int) -> None:
        if done >= sizes.requests // 3:
            third.set()

    load = asyncio.create_task(send_all(title, server, sizes, tell=tell))
    await third.wait()
    whole_s = await act()
    return replace(await load, whole_s=whole_s)


def table(sent: Sequence[Sent], one: Sent | None = None) -> str:
    """In Markdown; `one` is the server whose answers and hits the others are compared with."""
    rows = [["load", "answered", "same answers", "hit rate", "median, p99", "requests/s"]]
    for each in sent:
        times = [answer.seconds for answer in each.good] or [0.0]
        same = "" if one is None else f"{each.same(one)}"
        took = f"{percentile(times, 50):.2f}, {percentile(times, 99):.2f} s"
        rate = f"{len(each.good) / each.seconds:.1f}"
        rows.append([each.title, each.answered, same, f"{each.hit_rate:.1%}", took, rate])
    return markdown(rows)


def disturbed_table(sent: Iterable[Sent]) -> str:
    """In Markdown, for loads during which something was done to the replicas."""
    lost = ("lost in their streams", "before a token")
    rows = [("under load, a replica is", "answered", *lost, "longest request", "whole again after")]
    for each in sent:
        begun = [answer.begun for answer in each.answers if answer.error is not None]
        counts = f"{sum(begun)}", f"{len(begun) - sum(begun)}"
        longest = f"{max(answer.seconds for answer in each.answers):.1f} s"
        whole = "" if each.whole_s is None else f"{each.whole_s:.0f} s"
        rows.append((each.title, each.answered, *counts, longest, whole))
    return markdown(rows)


def conclude(
    one: Sent, routed: Mapping[str, Sent], blind: str, best: str, disturbed: Mapping[str, Sent]
) -> list[str]:
    """Print what the disturbed loads lost; returns the `faults`."""
    print(f"\n{disturbed_table(disturbed.values())}\n")
    for sent in disturbed.values():
        print("\n".join(failures(sent)))
    return list(faults(one, routed, blind, best, disturbed))


def faults(
    one: Sent, routed: Mapping[str, Sent], blind: str, best: str, disturbed: Mapping[str, Sent]
) -> Iterator[str]:
    """What should hold and does not, a sentence each.

    `routed` is by the way to route: `blind` knows no prefixes, `best` does. `disturbed` is by what
    was done; only if a replica was killed or frozen, requests may be lost: those that it had.
    """
    for sent in (one, *routed.values()):
        if len(sent.good) < len(sent.answers):
            yield f"{sent.title}: not all requests were answered."
        if sent.same(one) < len(sent.good):
            yield f"{sent.title}: some answers differ from those of one server."
    if routed[best].hit_rate < 0.9 * one.hit_rate:
        yield f"{best}: the hit rate is less than 90 % of one server's."
    if routed[best].hit_rate < 1.5 * routed[blind].hit_rate:
        yield f"{best}: the hit rate is less than 1.5 times that of {blind}."
    for what, sent in disturbed.items():
        if any("no complete answer within" in (answer.error or "") for answer in sent.answers):
            yield f"{sent.title}: a request hung until its timeout."
        lost = len(sent.answers) - len(sent.good)
        if lost > (Sizes().workers if what in ("killed", "frozen") else 0):
            yield f"{sent.title}: {lost} requests were lost."


def failures(sent: Sent) -> Iterator[str]:
    """Each request that was lost, as a line."""
    for number, answer in enumerate(sent.answers):
        if answer.error is not None:
            where = "in its stream" if answer.begun else "before its first token"
            yield (
                f"request {number} at {answer.ended:.1f} s, after {answer.seconds:.1f} s, {where}: "
                f"{answer.error}"
            )


class _Stream(Exchange):
    """Collects a stream of completion chunks."""

    def __init__(self, content: bytes, idle_s: float) -> None:
        super().__init__(content, idle_s)
        self.text = ""
        self.usage: dict[str, Any] = {}
        self._events = EventReader()
        self._done = False

    def take(self, body: bytes) -> None:
        if self.reader.status != 200:
            return super().take(body)
        for payload in self._events.feed(body):
            if payload == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = json.loads(payload)
                if error := chunk.get("error"):
                    raise BadResponse(f"error in the stream: {error.get('message', error)}")
                self.text += "".join(each["text"] for each in chunk["choices"])
                self.usage = chunk.get("usage") or self.usage
            except (ValueError, KeyError, AttributeError, TypeError):
                raise BadResponse(f"not a completion chunk: {payload[:80]!r}") from None

    def verdict(self) -> str | None:
        return super().verdict() or (None if self._done else "the stream ended without [DONE]")


async def _ask(
    server: Server, request: Request, began: float, fields: Mapping[str, object]
) -> Answer:
    body = {**completion_body(server, request), **fields}
    body["stream_options"] = {"include_usage": True}
    stream = _Stream(encode_request(server, "POST", "/v1/completions", body), server.idle_s)
    sent = time.perf_counter()
    error = await exchange(server.host, server.port, stream, server.timeout_s)
    ended = time.perf_counter()
    details = stream.usage.get("prompt_tokens_details") or {}
    return Answer(
        text=stream.text,
        prompt_tokens=stream.usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        seconds=ended - sent,
        ended=ended - began,
        error=error,
        begun=bool(stream.text),
    )


async def _snapshots(metrics: Sequence[Server]) -> list[str]:
    return [await snapshot(server) for server in metrics]


def _counted(before: Sequence[str], after: Sequence[str]) -> tuple[float, float]:
    """Hits and prompt tokens of all replicas in between."""
    views = [view(old, (), new, None, ()) for old, new in zip(before, after, strict=True)]
    hits, tokens = (
        sum(total(each.counters, family) or 0.0 for each in views) for family in (_HITS, _PROMPTS)
    )
    return hits, tokens


def server_at(url: str, timeout_s: float, model: str | None = None) -> Server:
    """Raises ValueError for what is no base URL."""
    host, port = split_base_url(url)
    return Server(host, port, model, timeout_s=timeout_s, idle_s=timeout_s)


def _like(path: Path, sizes: Sizes) -> Sent:
    """What --save wrote of the same requests. Raises ValueError."""
    try:
        one = Sent.load(path)
    except OSError as error:
        raise ValueError(f"--like {path}: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"--like {path} is none of the files that --save writes") from None
    known = one.sizes or replace(sizes, requests=len(one.answers))
    if replace(known, workers=sizes.workers) != sizes:
        raise ValueError(
            f"--like {path} is of other requests; repeat the counts, lengths and seed of its load"
        )
    return one


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True, help="the router, or one server")
    parser.add_argument(
        "--metrics", nargs="*", default=[], help="the replicas, if they are reached"
    )
    parser.add_argument("--model", help="if the router asks for its name")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a request, in seconds")
    parser.add_argument("--title", default="", help="of the row")
    parser.add_argument("--save", type=Path, help="where all answers are written")
    parser.add_argument("--like", type=Path, help="what --save wrote for one server")
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args(argv)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    try:
        one = None if args.like is None else _like(args.like, sizes)
        server = server_at(args.url, args.timeout, args.model)
        metrics = [server_at(url, args.timeout) for url in args.metrics]
    except ValueError as error:
        parser.error(str(error))
    if args.save is not None and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: there is no folder {args.save.parent}")
    sent = asyncio.run(send_all(args.title or args.url, server, sizes, metrics))
    if args.save is not None:
        sent.save(args.save)
    print("\n".join([table([sent], one), *failures(sent)]))
    return 0 if len(sent.good) == len(sent.answers) else 1


if __name__ == "__main__":
    sys.exit(main())
