"""What `scaling` times: the parts of a step, each with one size that grows and the others fixed.

A part's work grows as its size to a `power`: 1 for a pass over a batch, 0 for finding a free
block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.common.rounds import Call
from ropewalk.load_tests.micro.engines import idle
from ropewalk.load_tests.micro.in_process import (
    blocks_for,
    new_cache,
    request,
    step,
)
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.server.engine.engine import Engine

AHEAD = 1024  # tokens that a request may still get while it is measured
RUNNING = 8  # requests, if another size grows
LONG_PROMPT = 16000  # tokens of the prompts that fill a pool
# A shape with which 100,000 blocks are still a small cache.
NARROW = replace(SHAPES["small"], num_layers=1, num_heads=1, num_kv_heads=1)
HELD = 64  # blocks of the sequence that the manager's parts reserve and release
SIZES: Mapping[str, str] = {  # what each counts
    "batch": "requests in the batch",
    "context": "tokens of context",
    "pool": "blocks of the pool",
    "queue": "requests queued",
    "prompt": "tokens of the prompt",
    "answer": "tokens of the answer",
}


@dataclass(frozen=True, slots=True)
class Part:
    """`prepare` makes the call to time at one size; a sample is `times` calls."""

    name: str
    along: str  # the one of SIZES that grows
    power: float
    prepare: Callable[[int], Call]
    times: int = 1
    on_device: bool = False


def parts(decoder: Decoder, largest: Mapping[str, int], kernels: Kernels | str) -> list[Part]:
    """All parts: the decoder's passes, on its device, and the others, on the CPU.

    `largest` has the largest of each of SIZES to be measured; `kernels` are the CPU's, or why
    there are none.
    """
    return [*_passes(decoder, largest), *bookkeeping(kernels)]


def bookkeeping(kernels: Kernels | str) -> list[Part]:
    """Everything but the passes."""
    host = _Host(kernels)
    return [
        Part("rest", "batch", 1, host.decoding, 5),
        Part("rest", "context", 1, host.long, 5),
        Part("rest, pool empty", "pool", 0, host.empty, 5),
        Part("rest, pool full", "pool", 0, host.full, 5),
        Part("rest, no place", "queue", 0, host.no_place, 5),
        Part("rest, no room", "queue", 0, host.no_room, 5),
        Part("queue, abort", "queue", 0, host.aborting, 20),
        Part("new prompt", "prompt", 1, host.new_prompts),
        Part("cached prompt", "prompt", 1, host.known_prompt, 5),
        Part("whole answer", "answer", 1, host.answers),
        Part("manager, empty", "pool", 0, lambda blocks: _sequences(blocks, fill=False), 5),
        Part("manager, full", "pool", 0, lambda blocks: _sequences(blocks, fill=True), 5),
    ]


def _passes(decoder: Decoder, largest: Mapping[str, int]) -> list[Part]:
    short = 512
    blocks = max(blocks_for(largest["batch"], short), blocks_for(1, largest["context"]))
    kv = new_cache(decoder, blocks)

    def passing(requests: int, context: int) -> Call:
        batch = step(requests, context, 1, decoder.device)
        return lambda: decoder(batch, kv)

    return [
        Part("pass", "batch", 1, lambda requests: passing(requests, short), on_device=True),
        Part("pass", "context", 1, lambda context: passing(1, context), on_device=True),
    ]


@dataclass(frozen=True, slots=True)
class _Host:
    """Engines that schedule, build batches, sample and do bookkeeping, around no computation."""

    kernels: Kernels | str

    def decoding(self, requests: int) -> Call:
        """Every request of the batch gets its next token."""
        return self._running(requests, 512, blocks_for(requests, 512 + AHEAD)).step

    def long(self, context: int) -> Call:
        return self._running(RUNNING, context, blocks_for(RUNNING, context + AHEAD)).step

    def empty(self, blocks: int) -> Call:
        return self._running(RUNNING, 64, blocks).step

    def full(self, blocks: int) -> Call:
        """The pool is full of cached content, of which every new block evicts some."""
        made = self._engine(blocks, RUNNING, max_step_tokens=LONG_PROMPT)
        room = (blocks - 1) * BLOCK_SIZE
        for start in range(0, room, LONG_PROMPT):
            prompt = list(range(start, min(start + LONG_PROMPT, room)))
            made.submit(request(f"filler {start}", prompt, max_tokens=1))
        while made.busy:
            made.step()
        return _decode(made, RUNNING, 64).step

    def no_place(self, queued: int) -> Call:
        made = self._running(RUNNING, 64, blocks_for(RUNNING, 64 + AHEAD))
        return _queue(made, queued, 64).step

    def no_room(self, queued: int) -> Call:
        """Places are free, but no blocks for the first one in the queue."""
        own = 64 + AHEAD
        made = self._engine(blocks_for(RUNNING, own), RUNNING + 1)
        return _queue(_decode(made, RUNNING, 64), queued, RUNNING * own).step

    def aborting(self, queued: int) -> Call:
        """A request joins the end of the queue and is aborted."""
        made = _queue(self._running(1, 64, blocks_for(2, 64 + AHEAD)), queued, 64)

        def call() -> None:
            made.submit(request("leaves", [0] * 64, max_tokens=1))
            made.abort("leaves")

        return call

    def new_prompts(self, tokens: int) -> Call:
        """A new prompt in every call, which ends with its first token."""
        made = self._engine(2 * blocks_for(1, tokens + 1), 1)
        first = 0

        def call() -> None:
            nonlocal first
            first -= tokens
            made.submit(request("one", list(range(first, first + tokens)), max_tokens=1))
            while made.busy:
                made.step()

        return call

    def known_prompt(self, tokens: int) -> Call:
        made = self._engine(blocks_for(1, tokens + 1), 1)
        prompt = list(range(tokens))

        def call() -> None:
            made.submit(request("one", prompt.copy(), max_tokens=1))
            while made.busy:
                made.step()

        call()
        return call

    def answers(self, tokens: int) -> Call:
        made = self._engine(blocks_for(1, tokens + BLOCK_SIZE), 1)

        def call() -> None:
            made.submit(request("one", [1], max_tokens=tokens))
            while made.busy:
                made.step()

        return call

    def _running(self, requests: int, prompt: int, blocks: int) -> Engine:
        return _decode(self._engine(blocks, requests), requests, prompt)

    def _engine(self, blocks: int, max_seqs: int, max_step_tokens: int = 512) -> Engine:
        made = idle(
            NARROW,
            blocks,
            max_seqs=max_seqs,
            max_context=blocks * BLOCK_SIZE,
            max_step_tokens=max_step_tokens,
            kernels=self.kernels,
        )
        return made.engine


def _decode(made: Engine, requests: int, prompt: int) -> Engine:
    """Add `requests` requests with different prompts, and run until all are decoding."""
    for index in range(requests):
        tokens = [-1 - index] * prompt
        made.submit(request(f"running {index}", tokens, max_tokens=AHEAD))
    while made.step().stats.generated_tokens < requests:
        pass
    return made


def _queue(made: Engine, requests: int, prompt: int) -> Engine:
    tokens = [1] * prompt
    for index in range(requests):
        made.submit(request(f"queued {index}", tokens, max_tokens=1))
    made.step()
    return made


def _sequences(blocks: int, *, fill: bool) -> Call:
    """Reserves, commits and releases a sequence with only a cache manager."""
    manager = CacheManager(blocks, BLOCK_SIZE)
    size, first = HELD * BLOCK_SIZE, 0

    def call() -> None:
        nonlocal first
        tokens = range(first, first + size)
        first += size
        manager.reserve("one", tokens, size)
        manager.commit("one", tokens, size)
        manager.release("one")
        manager.drain_events()
        if not fill:
            manager.flush()

    for _ in range(blocks // HELD + 1 if fill else 0):
        call()
    return call
