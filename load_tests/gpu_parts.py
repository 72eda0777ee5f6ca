"""What `gpu_check` finds, and how it times Ropewalk: passes, prompts, engine steps, encodings."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Literal

import torch

from load_tests.engines import decoding
from load_tests.in_process import blocks_for, new_cache, passes, replayed, step
from load_tests.roofline import Ceiling
from load_tests.rounds import Call, Clock, Interval, median_of, rounds
from load_tests.step_cost import AGAIN, LIMITS, ZERO, Cost, costs_of
from model.kernels.build import Kernels
from model.transformer import Decoder
from model.words import in_one_line
from server.graphs import recorder

log = getLogger(__name__)

# A pass is the decoder's alone, a step the engine's, with scheduling, sampling and bookkeeping.
Work = Literal["pass", "step", "prefill"]

OWN = "ropewalk"
WAITED = "ropewalk, each step waited for"  # in service the next one is launched before
NO_TIME = "its part's time was over"
NOT_REPLAYED = "no CUDA graph could be recorded, as the log says"
STEPS = 32  # of an engine that are timed, after as many that are not


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests that each have `context` tokens and get one more."""

    batch: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of one pass or step. `least` is what it must take by the roofline, where told."""

    work: Work
    system: str
    shape: str
    cell: Cell
    seconds: Interval
    samples: Sequence[float]
    least: float | None = None
    how: str = ""  # the system computes it, where it has several ways


@dataclass(frozen=True, slots=True)
class Encodings:
    """What each encoding's pass costs over that of none."""

    shape: str
    cell: Cell
    work: str
    costs: Sequence[Cost]
    samples: Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why there is no figure: of a cell, or without one of a whole part."""

    work: str
    system: str
    shape: str
    cell: Cell | None
    reason: str
    failed: bool = False  # it was tried


COMPARED = Cell(8, 4096)  # where encodings are compared, and
CHUNK = 512  # how many of a prompt's tokens are its last pass there

Found = Figure | Encodings | LeftOut


@dataclass(frozen=True, slots=True)
class Setting:
    """What every part is told."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: str
    rounds: int
    ceiling: Ceiling


class Budget:
    """Seconds for one part, which asks before each thing that it begins and ends what it began."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def over(self) -> bool:
        return self._clock() >= self._end

    def share(self, part: float) -> "Budget":
        """That part of what is left, from 0 to 1."""
        return Budget(part * (self._end - self._clock()), self._clock)


class Purse:
    """A budget that parts share by their weights. What one leaves is there for those after it."""

    def __init__(self, whole: Budget, weights: float) -> None:
        """`weights` of all parts together."""
        self._whole = whole
        self._weights = weights

    def budget(self, weight: float) -> Budget:
        """For the next part."""
        part = weight / self._weights
        self._weights -= weight
        return self._whole.share(part)


def passes_of(
    shape: str, decoder: Decoder, cells: Sequence[Cell], setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The decoder's pass in each cell, from few tokens to many."""
    ordered = sorted(cells, key=lambda cell: cell.tokens)
    blocks = max(blocks_for(cell.batch, cell.context) for cell in ordered)
    kv = new_cache(decoder.config, blocks, dtype=setting.dtype, device=setting.device)
    for cell in ordered:
        if budget.over:
            yield LeftOut("pass", OWN, shape, cell, NO_TIME)
            continue
        least = setting.ceiling.decode_seconds(
            decoder.config, setting.dtype, cell.batch, cell.context
        )

        def measured(cell: Cell = cell, least: float = least) -> Figure:
            forward = replayed(decoder, kv, cell.batch, cell.context)
            batch = step(cell.batch, cell.context, 1, torch.device("cpu"))
            samples = sampled(partial(forward, batch, kv), setting, budget)
            how = NOT_REPLAYED if forward is decoder and recorder(decoder) else ""
            return figure("pass", OWN, shape, cell, samples, least=least, how=how)

        yield _tried("pass", OWN, shape, cell, measured)


def prefill_of(
    shape: str, decoder: Decoder, tokens: int, setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The pass over one whole prompt."""
    kv = new_cache(
        decoder.config, blocks_for(1, tokens), dtype=setting.dtype, device=setting.device
    )
    calls = passes({OWN: decoder}, kv, 1, tokens, rows=tokens)
    least = setting.ceiling.prefill_seconds(decoder.config, tokens)
    samples = sampled(calls[OWN], setting, budget)
    yield figure("prefill", OWN, shape, Cell(1, tokens), samples, least=least)


def steps_of(
    shape: str,
    decoder: Decoder,
    cells: Sequence[Cell],
    setting: Setting,
    kernels: Kernels | str,
    budget: Budget,
) -> Iterator[Found]:
    """The engine's step in each cell, on the clock on the wall; on a GPU also if waited for."""
    ways = {OWN: True, WAITED: False} if setting.device.type == "cuda" else {OWN: False}
    for cell in sorted(cells, key=lambda cell: cell.tokens):
        if budget.over:
            yield LeftOut("step", OWN, shape, cell, NO_TIME)
            continue
        for system, ahead in ways.items():

            def measured(cell: Cell = cell, system: str = system, ahead: bool = ahead) -> Figure:
                samples = _steps(decoder, cell, kernels, ahead)
                return figure("step", system, shape, cell, samples)

            yield _tried("step", system, shape, cell, measured)


def _tried(
    work: Work, system: str, shape: str, cell: Cell, measured: Callable[[], Figure]
) -> Found:
    """What fails in one cell leaves the others, but for a device that is lost."""
    try:
        return measured()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # of kernels, compilers, memory
        log.exception("%s of %s in %s failed", work, shape, cell)
        return LeftOut(work, system, shape, cell, in_one_line(error), failed=True)


def _steps(decoder: Decoder, cell: Cell, kernels: Kernels | str, ahead: bool) -> list[float]:
    """Seconds of each: on the wall, as its tokens are on the host then."""
    made = decoding(decoder, cell.batch, cell.context, 2 * STEPS, kernels=kernels, ahead=ahead)
    taken = []
    for _ in range(2 * STEPS):
        began = time.perf_counter()
        given = made.engine.step().stats.generated_tokens
        taken.append(time.perf_counter() - began)
        if given != cell.batch:  # an engine outlives what fails in it
            raise RuntimeError(f"a step gave {given} tokens; the log has the reason")
    return taken[STEPS:]


def encodings_of(
    shape: str,
    made: Mapping[str, Decoder],
    cells: Sequence[Cell],
    setting: Setting,
    budget: Budget,
) -> Iterator[Found]:
    """Every encoding's pass over that of none, for as many rounds as there is time for.

    At the largest of `cells` that `COMPARED` holds, or else at the smallest.
    """
    held = [each for each in cells if each.batch <= COMPARED.batch]
    held = [each for each in held if each.context <= COMPARED.context]
    ordered = sorted(cells, key=lambda cell: cell.tokens)
    cell = max(held, key=lambda cell: cell.tokens) if held else ordered[0]
    decoder = made[ZERO]
    blocks = blocks_for(cell.batch, cell.context)
    kv = new_cache(decoder.config, blocks, dtype=setting.dtype, device=setting.device)
    arms = {**made, AGAIN: decoder}
    rows = {"decode": (cell.batch, 1), "prefill": (1, min(CHUNK, cell.context))}
    calls: dict[str, Mapping[str, Call]] = {}
    for work, (requests, computed) in rows.items() if not budget.over else ():
        calls[work] = passes(arms, kv, requests, cell.context, computed)
        for call in calls[work].values():
            call()  # compiles: what is left of the time is for both kinds of work alike
    purse = Purse(budget, weights=2)
    for work in rows:
        own = purse.budget(1)
        if own.over:
            yield LeftOut(f"encodings, {work}", OWN, shape, cell, NO_TIME)
            continue
        taken = _rounds(calls[work], setting, own)
        yield Encodings(shape, cell, work, costs_of(taken, LIMITS[work]), taken)


def sampled(call: Call, setting: Setting, budget: Budget) -> list[float]:
    """Seconds of each of some calls, after one that is not told of."""
    return [each[""] for each in _rounds({"": call}, setting, budget)]


def _rounds(calls: Mapping[str, Call], setting: Setting, budget: Budget) -> list[dict[str, float]]:
    """Those that begin in time, and the first in any case."""
    taken = []
    for each in rounds(calls, setting.rounds, setting.clock, setting.seed):
        taken.append(each)
        if budget.over:
            break
    return taken


def figure(
    work: Work,
    system: str,
    shape: str,
    cell: Cell,
    samples: Sequence[float],
    *,
    least: float | None = None,
    how: str = "",
) -> Figure:
    return Figure(work, system, shape, cell, median_of(samples), samples, least, how)
