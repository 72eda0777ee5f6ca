"""What one replica can do: the times of its steps, and the size of its cache. Measured, or read."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from ropewalk.load_tests.client.client import Server, Unreachable, complete, get_json
from ropewalk.load_tests.common.types import Outcome, Profile, Request
from ropewalk.load_tests.plan.traffic import Traffic
from ropewalk.load_tests.workload.arrivals import drive
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.report.statistics import Floats

BATCHES = (1, 2, 4, 8, 16)
_OUTPUT = 24  # tokens of each request of a batch
_TIMES = 3
_EACH = 16  # requests of each worker


@dataclass(frozen=True, slots=True)
class Service:
    """Times in seconds. A step takes its batch's time and that of the prompts in it."""

    steps: tuple[tuple[int, float], ...]  # (requests that get a token, time), ascending
    token_s: float  # for each prompt token
    pair_s: float  # for each prompt token and token before it
    request_s: float  # for each request that begins: what else it takes from the others
    way_s: float  # from the client and back, which takes nothing from others
    blocks: int  # of the cache
    block_size: int  # tokens
    max_seqs: int = 64
    max_step_tokens: int = 512
    lone_factor: int = 2  # a request alone gets so many times the tokens of a step

    def step_s(self, batch: int) -> float:
        """The time of a step in which `batch` requests get a token: lines through `steps`."""
        if len(self.steps) == 1:
            return self.steps[0][1]
        pairs = list(pairwise(self.steps))
        (low, fast), (high, slow) = next((pair for pair in pairs if batch <= pair[1][0]), pairs[-1])
        return max(0.0, fast + (slow - fast) * (batch - low) / (high - low))

    def prompt_s(self, tokens: int, before: int) -> float:
        """What computing `tokens` of a prompt adds to steps, after `before` earlier ones."""
        return tokens * self.token_s + tokens * (before + tokens / 2) * self.pair_s

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Service:
    """Raises OSError, and ValueError for a file that `Service.write` did not write."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        steps = tuple((int(batch), float(seconds)) for batch, seconds in found.pop("steps"))
        return Service(steps=steps, **found)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} does not hold service times: {error}") from None


def mean(found: Sequence[Service]) -> Service:
    """The mean of measurements of like replicas."""
    times = zip(*(each.steps for each in found), strict=True)
    return replace(
        found[0],
        steps=tuple((same[0][0], fmean(seconds for _, seconds in same)) for same in times),
        token_s=fmean(each.token_s for each in found),
        pair_s=fmean(each.pair_s for each in found),
        request_s=fmean(each.request_s for each in found),
        way_s=fmean(each.way_s for each in found),
    )


async def measure(server: Server, traffic: Traffic, vocab_size: int, seed: str) -> Service:
    """Time prompts of up to traffic's length alone, batches of them, and requests like traffic's.

    Raises Unreachable, also when a request fails, and ValueError if it caches no prefixes.
    """
    maker, context = PromptMaker(seed, "ids", vocab_size), traffic.prompt_tokens
    alone = [
        (tokens, median([await _first_token_s(server, maker, tokens) for _ in range(_TIMES)]))
        for tokens in (-(-context // 16), context // 4, context // 2, context)
    ]
    shared = maker.pieces(context - 1)
    steps = [(batch, await _step_s(server, maker, shared, batch)) for batch in BATCHES]
    known = await _busy(server, maker, traffic, alike=True)
    unknown = await _busy(server, maker, traffic, alike=False)
    cards = (await get_json(server, "/v1/cache"))["data"]
    (cache,) = (card for card in cards if server.model in (None, card["model"]))
    found = deduce(traffic, alone, steps, known, unknown)
    blocks = sum(cache["blocks"].values())
    return replace(found, blocks=blocks, block_size=cache["block_size"], **cache["limits"])


def deduce(
    traffic: Traffic,
    alone: Sequence[tuple[int, float]],
    steps: Sequence[tuple[int, float]],
    known: tuple[int, float],
    unknown: tuple[int, float],
) -> Service:
    """Times from those to the first token `alone`, of `steps`, and of a busy server's requests.

    All are (tokens of a prompt that are computed, or requests in a step; seconds). What tokens and
    requests take is found where it counts: from how many requests a busy server answers when it
    knows the beginnings of all, and when it knows none. Raises ValueError if it never knows one.
    """
    pair_s, start_s = _fit(*(np.array(column, float) for column in zip(*alone, strict=True)))
    found = Service(tuple(steps), 0.0, pair_s, 0.0, 0.0, 0, 0)

    def prompt_s(tokens: int) -> float:
        return found.prompt_s(tokens, traffic.prompt_tokens - tokens)

    (fewer, fast), (more, slow) = known, unknown
    if more <= fewer:
        raise ValueError("the server finds no prefix again; start it with --prefix-sharing")
    token_s = (slow - fast - prompt_s(more) + prompt_s(fewer)) / (more - fewer)
    found = replace(found, token_s=max(0.0, token_s))
    steps_s = traffic.output_tokens * found.step_s(traffic.concurrency) / traffic.concurrency
    request_s = max(0.0, fast - steps_s - prompt_s(fewer))
    way_s = max(0.0, start_s - found.step_s(1) - request_s)
    return replace(found, request_s=request_s, way_s=way_s)


def _fit(lengths: Floats, seconds: Floats) -> tuple[float, float]:
    """Of seconds = start + length · token + length² / 2 · pair, none below 0: pair and start.

    Relative errors count, or the longest prompt would decide alone.
    """
    pair = (lengths**2 / 2,)
    for columns in ((lengths**0, lengths, *pair), (lengths**0, lengths)):
        found = np.linalg.lstsq(np.stack(columns, 1) / seconds[:, None], seconds**0, rcond=None)[0]
        if (found >= 0).all():
            break
    start, _, *curved = (max(0.0, float(value)) for value in found)
    return (curved[0] if curved else 0.0), start


async def _first_token_s(server: Server, maker: PromptMaker, tokens: int) -> float:
    outcome = await _ask(server, Request(maker.prompt(tokens), tokens, 1))
    return outcome.chunks[0][0] - outcome.sent


async def _step_s(
    server: Server, maker: PromptMaker, shared: Sequence[str | int], batch: int
) -> float:
    """The time between tokens while all of a batch get them."""
    length = len(shared) + 1
    await _ask(server, Request(maker.prompt(length, shared), length, 1))  # the prefix is cached
    requests = [Request(maker.prompt(length, shared), length, _OUTPUT) for _ in range(batch)]
    outcomes = await asyncio.gather(*(_ask(server, request) for request in requests))
    start = max(outcome.chunks[0][0] for outcome in outcomes)
    end = min(outcome.ended for outcome in outcomes)
    gaps = [
        later - earlier
        for outcome in outcomes
        for (earlier, _), (later, _) in pairwise(outcome.chunks)
        if start <= earlier and later <= end
    ]
    return fmean(gaps) if gaps else (outcomes[0].ended - outcomes[0].chunks[0][0]) / (_OUTPUT - 1)


async def _busy(
    server: Server, maker: PromptMaker, traffic: Traffic, *, alike: bool
) -> tuple[int, float]:
    """Of traffic's requests while others always wait: tokens of a prompt that are computed, and
    seconds for each request. The prompts begin `alike`, or none is known.
    """
    prefix = maker.pieces(traffic.prefix_tokens) if alike else ()
    length, workers = traffic.prompt_tokens, traffic.concurrency
    requests = [
        Request(maker.prompt(length, prefix), length, traffic.output_tokens)
        for _ in range(1 + workers * _EACH)
    ]
    await _ask(server, requests.pop())

    async def send(request: Request, intended: float) -> Outcome:
        return await _ask(server, request)

    profile = Profile("closed", concurrency=workers)
    driven = await drive(requests, profile, "", send)
    cached = fmean(outcome.cached_tokens or 0 for outcome in driven.outcomes)
    seconds = driven.steady_to - driven.steady_from
    first_wave = workers if workers > 1 else 0  # not in the steady window
    return length - round(cached), seconds / (len(requests) - first_wave)


async def _ask(server: Server, request: Request) -> Outcome:
    outcome = await complete(server, request)
    if outcome.error is not None:
        raise Unreachable(f"{server.url}: {outcome.error}")
    return outcome
