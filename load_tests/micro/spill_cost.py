"""What the second place for blocks costs and saves: `--help` describes the method."""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.spill import HostMemory
from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.micro.in_process import blocks_for, decoders, request, untouched_cache
from ropewalk.load_tests.micro.measured import (
    add_device,
    add_shape,
    add_threads,
    device_of,
    run,
    write,
)
from ropewalk.load_tests.micro.profile_engine import Stopwatch
from ropewalk.load_tests.report.formatting import milliseconds
from ropewalk.load_tests.run.options import add, count, program
from ropewalk.model.kernels.backends import sampler_of
from ropewalk.report.table import markdown
from ropewalk.server.engine.assemble import ledger_of, wired
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.launch.load_model import find_kernels
from ropewalk.server.scheduling.request import Limits

LEAST = 5.0  # times faster
MOST_S = 0.002  # of one step
MOVES = "moves"
COMPUTED, RESTORED, BESIDE = "computed", "restored", "restored beside others"
COMING, LEAVING = "moved in a step, coming back", "moved in a step, preempted"

_DESCRIPTION = f"""\
How much faster a prefix comes back from the second place (--kv-spill) than it is computed, and how
long steps wait for blocks that are moved.

In each round an engine as in `ropewalk serve`, with random weights, computes a prompt of --context
tokens. Then all that is cached has to make room, and the same prompt comes again: alone, and once
more beside --batch requests that decode, among which it is preempted at last. Times end with its
first token. The last two rows are the longest processor time that copies and checksums took within
one step. The table has the median of the rounds, the least and the most.

Limits, for medians: restored {LEAST:.0f} times faster than computed, alone; {1000 * MOST_S:.0f} ms
of a step.
"""

_EPILOG = """\
examples:
  python -m ropewalk.load_tests.micro.spill_cost
  python -m ropewalk.load_tests.micro.spill_cost --shape small --context 1k --out spill-cost

Exit status: 0; 1 when a limit does not hold; 2 when nothing was measured.
"""


class Bench:
    """An engine whose cache holds `batch` short requests and one of `context`, and no more."""

    def __init__(self, args: argparse.Namespace) -> None:
        device, dtype = device_of(args)
        kernels = find_kernels(device)
        self._context, self._batch = args.context, args.batch
        self._random = random.Random(args.seed)
        # Longer than the prefix takes to come back, a block in each step, and to leave.
        self._answer = self._context // BLOCK_SIZE + 16 * BLOCK_SIZE
        longest = self._context + self._answer
        made = decoders(
            args.shape, ["rope"], context=longest, dtype=dtype, device=device, kernels=kernels
        )
        (decoder,) = made.values()
        config = decoder.config
        blocks = blocks_for(1, longest) + blocks_for(self._batch, BLOCK_SIZE + self._answer)
        kv = untouched_cache(decoder, blocks)
        ledger = ledger_of(kv, kernels)
        place, self._watch = HostMemory(kv, 2 * blocks, ledger), Stopwatch(time.thread_time)
        for name in ("put", "take"):
            setattr(place, name, self._watch.during(MOVES)(getattr(place, name)))
        self._manager = CacheManager(blocks, BLOCK_SIZE, place=place)
        self._engine = wired(
            "measured",
            decoder,
            kv,
            self._manager,
            [decoder.encoding.for_layer(layer) for layer in range(config.num_layers)],
            Limits(self._batch + 1, 512, longest, max_queue=100, lone_factor=2),
            PositionMeter(),
            kernels,
            sampler=sampler_of(decoder, kernels),
            ledger=ledger,
        ).engine
        self._vocab = config.vocab_size
        self._longest = 0.0

    def round(self) -> dict[str, float]:
        """Seconds of everything that is measured."""
        prompt = self._tokens(self._context)
        taken = {COMPUTED: self._first_token(COMPUTED, prompt, 1)}
        self._make_room()
        taken[RESTORED] = self._first_token(RESTORED, prompt, 1)
        self._make_room()
        for index in range(self._batch):
            own = request(str(index), self._tokens(BLOCK_SIZE - index % BLOCK_SIZE), self._answer)
            self._engine.submit(own)
        self._step()
        self._longest = 0.0
        taken[BESIDE] = self._first_token(BESIDE, prompt, self._answer)
        taken[COMING], self._longest = self._longest, 0.0
        taken[LEAVING] = self._preempted()
        for name in (BESIDE, *map(str, range(self._batch))):
            self._engine.abort(name)
        self._manager.flush()
        return taken

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(self._vocab), k=length)

    def _first_token(self, name: str, prompt: list[int], max_tokens: int) -> float:
        began = time.perf_counter()
        self._engine.submit(request(name, list(prompt), max_tokens))
        while not any(event == name for event in self._step()):
            pass
        return time.perf_counter() - began

    def _step(self) -> list[str]:
        """The requests that got a token."""
        self._watch.drain()
        events = self._engine.step().events
        self._longest = max(self._longest, self._watch.drain().get(MOVES, 0.0))
        return [event.request_id for event in events]

    def _make_room(self) -> None:
        """As other prompts would, but without computing them."""
        self._manager.begin_step(alone=True)
        tokens = [0] * self._manager.capacity
        assert self._manager.reserve("others", tokens, len(tokens), share=False) is not None
        self._manager.release("others")

    def _preempted(self) -> float:
        """The longest time within a step of those in which the last prompt's blocks leave."""
        free = self._manager.counts()
        held = [0] * (BLOCK_SIZE * (free.free + free.cached))
        assert self._manager.reserve("held", held, len(held), share=False) is not None
        self._longest = 0.0
        blocks = self._context // BLOCK_SIZE  # that the others may write now
        for _ in range(min(8, blocks // self._batch // 2) * BLOCK_SIZE):
            self._step()
        assert self._manager.parked == {BESIDE}
        self._manager.release("held")
        return self._longest


def main(argv: Sequence[str] | None = None) -> int:
    return run("spill_cost", _parser(), argv, _measure, _report)


def _parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.micro.spill_cost", _DESCRIPTION, _EPILOG)
    add_shape(options, "smollm2")
    add_device(options)
    add_threads(options)
    add(options, "--seed TEXT", str, "0", "seed of the prompts (default: %(default)s)")
    add(options, "--out NAME", str, None, "write NAME.json, every sample in it")
    add(options, "--context N", count, 4096, "tokens of the prefix (default: 4k)")
    add(options, "--batch N", count, 8, "requests that decode (default: %(default)s)")
    add(options, "--rounds N", count, 6, "(default: %(default)s)")
    return options


def _measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds, round by round, without the first one, which touches memory for the first time."""
    progress = Progress(sys.stderr)
    progress.start(f"{args.shape}: {args.rounds} rounds")
    bench = Bench(args)
    taken = []
    for done in range(args.rounds + 1):
        taken.append(bench.round())
        progress.note(f"{done} of {args.rounds} rounds")
    progress.clear()
    return taken[1:]


def _report(taken: list[dict[str, float]], words: Sequence[str], args: argparse.Namespace) -> int:
    seconds = {name: [each[name] for each in taken] for name in taken[0]}
    faster = median(each[COMPUTED] / each[RESTORED] for each in taken)
    print(table(seconds, faster))
    if args.out:
        content = {
            name: {"median": median(each), "least": min(each), "most": max(each)}
            for name, each in seconds.items()
        }
        write(args.out, "spill cost", words, args, {"seconds": content, "samples": taken})
    slow = any(median(seconds[name]) > MOST_S for name in (COMING, LEAVING))
    return int(faster < LEAST or slow)


def table(seconds: Mapping[str, Sequence[float]], faster: float) -> str:
    """Milliseconds of each, and how much faster a prefix is restored."""
    rows = [("", "ms", "least", "most", "limit")]
    for name, each in seconds.items():
        limit = milliseconds(MOST_S) if name in (COMING, LEAVING) else ""
        middle, least, most = map(milliseconds, (median(each), min(each), max(each)))
        rows.append((name, middle, least, most, limit))
    told = markdown(rows, left=1)
    return f"{told}\n\nRestored {faster:.1f} times faster than computed (limit {LEAST:.0f})."


if __name__ == "__main__":
    sys.exit(main())
