"""Runs every load under every variant: rounds in random order, each from an empty cache."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from ropewalk.load_tests.client import scrape
from ropewalk.load_tests.client.client import Server, Unreachable, Variant, complete
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.types import Outcome, Point, Request, Run, ServerView
from ropewalk.load_tests.run.serving import flush
from ropewalk.load_tests.workload.arrivals import drive
from ropewalk.load_tests.workload.hits import cached_tokens
from ropewalk.load_tests.workload.loads import Load
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.load_tests.workload.workloads import Sizes

_WARM_UP_REQUESTS = 4  # at once
_WARM_UP_PROMPT_TOKENS = 16
_WARM_UP_OUTPUT_TOKENS = 4
_SCRAPE_EVERY_S = 1.0
_PATIENCE_S = 30.0  # for requests beside the load, such as scrapes
_OVERFLOW = "overflow"
_MESSAGE = re.compile(r'"message":\s*("(?:[^"\\]|\\.)*")')


class NoSuccess(Exception):
    """A variant answers no request properly; the message says which one and why."""


class Runner:
    """Measures variants whose servers answer. `new_prompts` makes a source of prompts from a seed.

    `block_sizes` are those of the variants' caches; of an unknown one no hits are predicted.
    `warnings` gathers what makes the figures doubtful, one sentence each.
    """

    def __init__(
        self,
        new_prompts: Callable[[str], PromptMaker],
        sizes: Sizes,
        seed: str,
        progress: Progress,
        block_sizes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        self.warnings: list[str] = []
        self._new_prompts = new_prompts
        self._sizes = sizes
        self._seed = seed
        self._progress = progress
        self._block_sizes = block_sizes
        self._unflushed: set[str] = set()
        self._refused: set[tuple[str, Point]] = set()

    async def warm_up(self, variants: Sequence[Variant]) -> None:
        """Send each variant short requests, so that no run pays for initialisation on first use.

        Raises NoSuccess when a variant answers none of them properly.
        """
        prompts = self._new_prompts(f"{self._seed}/warm-up")
        for variant in variants:
            self._progress.start(f"warming up {variant.label}")
            short = [
                Request(
                    prompts.prompt(_WARM_UP_PROMPT_TOKENS),
                    _WARM_UP_PROMPT_TOKENS,
                    _WARM_UP_OUTPUT_TOKENS,
                )
                for _ in range(_WARM_UP_REQUESTS)
            ]
            outcomes = await asyncio.gather(*(complete(variant.server, each) for each in short))
            if all(outcome.error is not None for outcome in outcomes):
                raise NoSuccess(f"{variant.label} at {variant.server.url}: {outcomes[0].error}")
            await self._try_to_flush(variant)

    async def ask(
        self, variants: Sequence[Variant], contexts: Mapping[str, int | None], loads: Sequence[Load]
    ) -> list[Load]:
        """The loads that at least one variant can run; remembers which variant cannot run which.

        `contexts` is how many tokens each variant has room for, None if unknown.
        """
        prompts = self._new_prompts(f"{self._seed}/asked")
        able: dict[Load, None] = {}
        for load in loads:
            plan = load.plan(prompts, self._sizes)
            refusals: dict[str, list[str]] = {}
            for variant in variants:
                reason = await why_not(variant.server, contexts[variant.label], plan)
                if reason is None:
                    able[load] = None
                else:
                    self._refused.add((variant.label, load.point))
                    refusals.setdefault(reason, []).append(variant.label)
            for reason, labels in refusals.items():
                self.warn(f"Left out of {load.point.label}: {', '.join(labels)}; {reason}.")
        return list(able)

    async def measure(
        self, variants: Sequence[Variant], loads: Sequence[Load], rounds: int
    ) -> AsyncIterator[Run]:
        """`rounds` runs of every variant under every load, yielded as they end.

        The orders of loads and variants are random, from the seed, so that drift of the machine
        affects all variants alike. All variants of a round get the same token ids; each round has
        its own.
        """
        able = sum(self._can(variant, load) for load in loads for variant in variants)
        self._progress.schedule(rounds * able)
        for round in range(rounds):
            async for run in self.round(variants, loads, round, f"round {round + 1} of {rounds}"):
                yield run

    async def round(
        self, variants: Sequence[Variant], loads: Sequence[Load], round: int, title: str
    ) -> AsyncIterator[Run]:
        """One run of every variant under every load. Seed and number give prompts and order."""
        order = random.Random(f"{self._seed}/{round}/order")
        prompts = self._new_prompts(f"{self._seed}/{round}")
        planned = [(load, load.plan(prompts, self._sizes)) for load in loads]
        for load, plan in order.sample(planned, len(planned)):
            able = [variant for variant in variants if self._can(variant, load)]
            for variant in order.sample(able, len(able)):
                self._progress.start(f"{title}, {variant.label}, {load.label}")
                yield await self.run(variant, load, plan, round)
                self._progress.finish()

    async def throughput(self, variants: Sequence[Variant], load: Load) -> float:
        """Requests per second, including ramp and drain, of one run of the first variant that can.

        Raises NoSuccess.
        """
        variant = next(variant for variant in variants if self._can(variant, load))
        self._progress.start(f"finding the rates, {variant.label}, {load.label}")
        prompts = self._new_prompts(f"{self._seed}/{load.label}")
        run = await self.run(variant, load, load.plan(prompts, self._sizes), 0)
        served = sum(outcome.error is None for outcome in run.outcomes)
        if not served:
            raise NoSuccess(f"{variant.label} under {load.label}: {run.outcomes[0].error}")
        return served / (run.ended - run.began)

    async def run(self, variant: Variant, load: Load, plan: Sequence[Request], round: int) -> Run:
        """One run, whether or not its requests succeed."""
        if variant.label not in self._unflushed:
            await self._try_to_flush(variant)
        answered = 0

        async def send(request: Request, intended: float) -> Outcome:
            nonlocal answered
            outcome = await complete(variant.server, request, intended)
            answered += 1
            self._progress.answered(answered, len(plan), outcome.output_tokens)
            return outcome

        seed = f"{self._seed}/{round}/{load.label}"
        async with _watching(_impatient(variant.server)) as watched:
            driven = await drive(plan, load.profile, seed, send)
        if (block_size := self._block_sizes.get(variant.label)) is not None:
            expected = cached_tokens(plan, load.profile, block_size)
            self._check_hits(f"{variant.label}, {load.label}", expected, driven.outcomes)
        return Run(
            variant=variant.label,
            point=load.point,
            profile=load.profile,
            round=round,
            outcomes=driven.outcomes,
            steady_from=driven.steady_from,
            steady_to=driven.steady_to,
            server=await watched(driven.outcomes),
        )

    def _can(self, variant: Variant, load: Load) -> bool:
        return (variant.label, load.point) not in self._refused

    async def _try_to_flush(self, variant: Variant) -> None:
        try:
            await flush(_impatient(variant.server))
        except Unreachable as error:
            if variant.label not in self._unflushed:
                reason = str(error).partition(": {")[0]  # without the body
                self.warn(
                    f"The prefix cache of {variant.label} was not emptied between runs ({reason}). "
                    "New prompts miss it all the same, but those of a file are the same in every "
                    "run."
                )
            self._unflushed.add(variant.label)

    def _check_hits(
        self, where: str, expected: tuple[int, int] | None, outcomes: Sequence[Outcome]
    ) -> None:
        """Warn of unexpected hits, if every request was served and the server reports its hits."""
        said = [
            o.cached_tokens for o in outcomes if o.error is None and o.cached_tokens is not None
        ]
        if expected is None or len(said) < len(outcomes):
            return
        low, high = expected
        if not low <= sum(said) <= high:
            told = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            self.warn(
                f"{where}: the prefix cache had {sum(said):,} prompt tokens, but {told} were "
                "expected; something else used it, or it was too small."
            )

    def warn(self, sentence: str) -> None:
        """Keep a warning, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)


View = Callable[[Sequence[Outcome]], Awaitable[ServerView | None]]


@asynccontextmanager
async def _watching(server: Server) -> AsyncIterator[View]:
    """Reads /metrics before the block and every second within; the yielded function, after it."""
    before = await _snapshot(server)
    during: list[str] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(_SCRAPE_EVERY_S)
            if (seen := await _snapshot(server)) is not None:
                during.append(seen)

    async def view(outcomes: Sequence[Outcome]) -> ServerView | None:
        if before is None:
            return None
        try:
            after = await scrape.settled(server, before, outcomes)
            return scrape.view(before, during, after, server.model or "", outcomes)
        except (Unreachable, ValueError):  # ValueError: these are no metrics
            return None

    # A server without metrics is not asked again.
    watcher = None if before is None else asyncio.create_task(watch())
    try:
        yield view
    finally:
        if watcher is not None:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher


async def _snapshot(server: Server) -> str | None:
    """None without metrics or without an answer."""
    with suppress(Unreachable):
        return await scrape.snapshot(server)
    return None


def _impatient(server: Server) -> Server:
    return replace(server, timeout_s=min(server.timeout_s, _PATIENCE_S))


async def why_not(server: Server, context: int | None, plan: Sequence[Request]) -> str | None:
    """Why `plan` cannot be measured on `server`, in a few words; None when it can.

    `context` is how many tokens of prompt and answer together its model takes, None if unknown.
    Whether the server accepts unusual fields is tried with a prompt of one token.
    """
    if context is not None and (reason := _misfit(plan, context)) is not None:
        return reason
    special = next((request for request in plan if request.extra), None)
    if special is None:
        return None
    prompt = "a" if isinstance(special.prompt, str) else special.prompt[:1]
    error = (await complete(server, Request(prompt, 1, 1, extra=special.extra))).error
    return None if error is None else _told(error)


def _told(error: str) -> str:
    """The message within the server's answer, of which `error` may hold only the beginning."""
    found = _MESSAGE.search(error)
    return error if found is None else str(json.loads(found[1])).removesuffix(".")


def _misfit(plan: Sequence[Request], context: int) -> str | None:
    for request in plan:
        prompt = request.prompt_tokens or 0
        whole = prompt + request.output_tokens
        least = prompt + 1 if _OVERFLOW in request.extra else whole
        if least > context:
            return f"its context holds {context:,} tokens, but this needs {least:,}"
    return None
