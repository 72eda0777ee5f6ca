"""The results of `gpu_check`, and its timing of Ropewalk: passes, prompts, steps, encodings."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Literal

import torch

from ropewalk.load_tests.common.rounds import Call, Clock, rounds
from ropewalk.load_tests.micro.engines import decoding
from ropewalk.load_tests.micro.in_process import blocks_for, new_cache, passes, replayed, step
from ropewalk.load_tests.micro.roofline import Ceiling
from ropewalk.load_tests.micro.step_cost import AGAIN, LIMITS, ZERO, Cost, costs_of
from ropewalk.model.decoder import Decoder
from ropewalk.model.formatting import in_one_line
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.triton.executor import TritonExecutor
from ropewalk.report.statistics import Estimate, median_of
from ropewalk.server.launch.graphs import recorder

log = getLogger(__name__)

# A pass is the decoder's alone, a step the engine's, with scheduling, sampling and bookkeeping.
Work = Literal["pass", "step", "prefill"]

OWN = "ropewalk"
WAITED = "ropewalk, each step waited for"  # while serving, the next step is launched before
BY_TORCH = "ropewalk, linear layers by torch"  # those of few rows, as of many
NO_TIME = "its part's time was over"
NOT_REPLAYED = "no CUDA graph could be recorded, as the log says"
STEPS = 32  # of an engine that are timed, after as many untimed ones


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` requests that each have `context` tokens and get one more."""

    batch: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of one pass or step. `least` is its lower bound by the roofline, if there is one."""

    work: Work
    system: str
    shape: str
    cell: Cell
    seconds: Estimate
    samples: Sequence[float]
    least: float | None = None
    how: str = ""  # how the system computes it, if it has several ways


@dataclass(frozen=True, slots=True)
class Encodings:
    """The cost of each encoding's pass compared with no encoding."""

    shape: str
    cell: Cell
    work: str
    costs: Sequence[Cost]
    samples: Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why a figure is missing: that of a cell or, with None, of a whole part."""

    work: str
    system: str
    shape: str
    cell: Cell | None
    reason: str
    failed: bool = False  # it was tried and raised an error


COMPARED = Cell(8, 4096)  # where encodings are compared
CHUNK = 512  # tokens in the prefill pass of that comparison

Found = Figure | Encodings | LeftOut


@dataclass(frozen=True, slots=True)
class Setting:
    """The arguments that all parts share."""

    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: str
    rounds: int
    ceiling: Ceiling


class Budget:
    """Seconds for one part, which asks before each measurement and finishes what it has begun."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def over(self) -> bool:
        return self._clock() >= self._end

    def share(self, part: float) -> "Budget":
        """A budget of `part`, from 0 to 1, of the time left."""
        return Budget(part * (self._end - self._clock()), self._clock)


class Purse:
    """A budget that parts share by their weights. Later parts get what one leaves unused."""

    def __init__(self, whole: Budget, weights: float) -> None:
        """`weights` is the sum over all parts."""
        self._whole = whole
        self._weights = weights

    def forgo(self, weight: float) -> None:
        """The next part is left out."""
        self._weights -= weight

    def budget(self, weight: float) -> Budget:
        part = weight / self._weights
        self.forgo(weight)
        return self._whole.share(part)


def passes_of(
    shape: str, decoder: Decoder, cells: Sequence[Cell], setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The decoder's pass in each cell, from few tokens to many."""
    ordered = sorted(cells, key=lambda cell: cell.tokens)
    blocks = max(blocks_for(cell.batch, cell.context) for cell in ordered)
    kv = new_cache(decoder, blocks)
    for cell in ordered:
        if budget.over:
            yield LeftOut("pass", OWN, shape, cell, NO_TIME)
            continue
        least = setting.ceiling.decode_seconds(
            decoder.config, setting.dtype, cell.batch, cell.context
        )
        for system, own in _ways(decoder, cell).items():

            def measured(
                cell: Cell = cell, least: float = least, system: str = system, own: Decoder = own
            ) -> Figure:
                forward = replayed(own, kv, cell.batch, cell.context)
                batch = step(cell.batch, cell.context, 1, torch.device("cpu"))
                samples = sampled(partial(forward, batch, kv), setting, budget)
                how = NOT_REPLAYED if forward is own and recorder(own) else ""
                return figure("pass", system, shape, cell, samples, least=least, how=how)

            yield _tried("pass", system, shape, cell, measured)


def _ways(decoder: Decoder, cell: Cell) -> dict[str, Decoder]:
    """By system: whose pass in this cell is measured. All share their weights."""
    executor = decoder.executor
    if not isinstance(executor, TritonExecutor) or cell.batch > executor.few_rows:
        return {OWN: decoder}
    by_torch = TritonExecutor(executor.program, few_rows=0)
    return {OWN: decoder, BY_TORCH: Decoder(executor.program, by_torch)}


def prefill_of(
    shape: str, decoder: Decoder, tokens: int, setting: Setting, budget: Budget
) -> Iterator[Found]:
    """The pass over one whole prompt."""
    kv = new_cache(decoder, blocks_for(1, tokens))
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
    """The engine's step in each cell, in wall time; on a GPU also without launching ahead."""
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
    """An error in one cell does not end the others, unless the device is lost."""
    try:
        return measured()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # of kernels, compilers, memory
        log.exception("%s of %s in %s failed", work, shape, cell)
        return LeftOut(work, system, shape, cell, in_one_line(error), failed=True)


def _steps(decoder: Decoder, cell: Cell, kernels: Kernels | str, ahead: bool) -> list[float]:
    """Wall seconds of each step, at whose end its tokens are on the host."""
    made = decoding(decoder, cell.batch, cell.context, 2 * STEPS, kernels=kernels, ahead=ahead)
    taken = []
    for _ in range(2 * STEPS):
        began = time.perf_counter()
        given = made.engine.step().stats.generated_tokens
        taken.append(time.perf_counter() - began)
        if given != cell.batch:  # an engine survives errors in a step
            raise RuntimeError(f"a step gave {given} tokens; the log has the reason")
    return taken[STEPS:]


def encodings_of(
    shape: str,
    made: Mapping[str, Decoder],
    cells: Sequence[Cell],
    setting: Setting,
    budget: Budget,
) -> Iterator[Found]:
    """Every encoding's pass compared with no encoding, for as many rounds as time allows.

    In the largest of `cells` within `COMPARED`, or else in the smallest.
    """
    held = [each for each in cells if each.batch <= COMPARED.batch]
    held = [each for each in held if each.context <= COMPARED.context]
    ordered = sorted(cells, key=lambda cell: cell.tokens)
    cell = max(held, key=lambda cell: cell.tokens) if held else ordered[0]
    decoder = made[ZERO]
    blocks = blocks_for(cell.batch, cell.context)
    gates = max(each.gates for each in made.values())
    kv = new_cache(decoder, blocks, gates)
    variants = {**made, AGAIN: decoder}
    rows = {"decode": (cell.batch, 1), "prefill": (1, min(CHUNK, cell.context))}
    calls: dict[str, Mapping[str, Call]] = {}
    for work, (requests, computed) in rows.items() if not budget.over else ():
        calls[work] = passes(variants, kv, requests, cell.context, computed)
        for call in calls[work].values():
            call()  # compiles, so that the remaining time is shared equally by both kinds of work
    purse = Purse(budget, weights=2)
    for work in rows:
        own = purse.budget(1)
        if own.over:
            yield LeftOut(f"encodings, {work}", OWN, shape, cell, NO_TIME)
            continue
        taken = _rounds(calls[work], setting, own)
        yield Encodings(shape, cell, work, costs_of(taken, LIMITS[work]), taken)


def sampled(call: Call, setting: Setting, budget: Budget) -> list[float]:
    """Seconds of each of several calls, after one that is discarded."""
    return [each[""] for each in _rounds({"": call}, setting, budget)]


def _rounds(calls: Mapping[str, Call], setting: Setting, budget: Budget) -> list[dict[str, float]]:
    """The rounds that begin in time, but at least one."""
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
