"""The effect of cache operations on answers: next-token distributions against recomputed ones.

Three operations, as a server makes room or reuses text: *shift* drops the older half of a full
context and renumbers; *slide* repeatedly drops its oldest block while the text goes on; *move*
reuses a span at another position, after another text. The first block always stays. Recomputation
reads the same tokens at the same positions from scratch. Keys and values of layers after the first
still depend on dropped tokens, so the distributions differ under every encoding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ropewalk.cache.types import BLOCK_SIZE, Evict, Move, Op, Unsupported
from ropewalk.model.decoder import Decoder
from ropewalk.model.dry_run import Trial
from ropewalk.model.family.evaluation.reading import forward
from ropewalk.model.family.evaluation.texts import Texts
from ropewalk.report.statistics import Estimate, by_document

SEQUENCE, OTHER = "sequence", "other"  # names in the cache
SLIDES = (1, 32)  # numbers of slides after which it is measured
CASES = len(SLIDES) + 2  # in each of which a text is read once
OPS = {"shift": Op.EVICT_RENUMBER, "slide": Op.EVICT_RENUMBER, "move": Op.MOVE_SPAN}


@dataclass(frozen=True, slots=True)
class Divergence:
    """After an operation: means over the following block of tokens, and over texts."""

    operation: str  # a key of OPS
    times: int
    capability: str  # what the encoding declares for it
    refusal: str  # why it is impossible; empty when it is possible, else the rest is None
    divergence: Estimate | None  # KL(recomputed || as stored), nats per token
    loss: Estimate | None  # of the text's own next tokens: as stored - recomputed, nats


def needed(trained: int) -> int:
    """Tokens of text that the longest case needs; the last one is only predicted."""
    return trained + max(SLIDES) * BLOCK_SIZE + 1


def measure(
    decoder: Decoder, texts: Texts, trained: int, done: Callable[[float], object]
) -> tuple[Divergence, ...]:
    """trained: a multiple of four blocks. `done` is called for each text, CASES times unless
    it is refused."""

    def evicted(blocks: int, times: int) -> list[list[float]]:
        return [_evicted(decoder, own, trained, blocks, times) for own in told(texts.tokens)]

    def moved() -> list[list[float]]:
        others = [*texts.tokens[1:], texts.tokens[0]]
        pairs = zip(told(texts.tokens), others, strict=True)
        return [_moved(decoder, own, other, trained) for own, other in pairs]

    def told(given: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        for one in given:
            yield one
            done(1)

    half = -(-(trained // BLOCK_SIZE - 1) // 2)  # of the blocks after the first, as in serving
    found = [_divergence(decoder, texts, "shift", 1, lambda: evicted(half, 1))]
    for times in SLIDES:
        found.append(_divergence(decoder, texts, "slide", times, partial(evicted, 1, times)))
    found.append(_divergence(decoder, texts, "move", 1, moved))
    return tuple(found)


def _divergence(
    decoder: Decoder, texts: Texts, name: str, times: int, rows: Callable[[], list[list[float]]]
) -> Divergence:
    declared = _Stored(decoder, 0).operations.capability(OPS[name]).value
    try:
        means = texts.by_document(np.array(rows()))
    except Unsupported as error:
        return Divergence(name, times, declared, str(error), None, None)
    kl, loss = by_document(means, texts.weights)
    return Divergence(name, times, declared, "", kl, loss)


class _Stored:
    """Sequences of one decoder in a separate cache for `capacity` tokens."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self._decoder = decoder
        self._cache = Trial(
            decoder.config,
            {},
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
            device=decoder.device,
            spare=capacity // BLOCK_SIZE + 1,  # one is filled while all are held
            gates=decoder.gates,
        )
        self.operations = self._cache.operations(decoder.encoding)
        self.tokens: dict[str, list[int]] = {}

    def feed(self, sequence: str, tokens: Sequence[int]) -> Tensor:
        """Append tokens; returns log-probabilities [len(tokens), vocab] of what follows each."""
        known = self.tokens.setdefault(sequence, [])
        start = len(known)
        known += tokens
        kv, manager = self._cache.kv, self._cache.manager
        manager.reserve(sequence, known, len(known))
        table = manager.table(sequence)
        found = forward(self._decoder, kv, table, known, wanted=len(tokens), start=start)
        manager.commit(sequence, known, len(known))
        return found

    def evict(self, sequence: str, blocks: int) -> None:
        """Drop the oldest blocks after the first one. Raises Unsupported."""
        self.operations.apply(Evict(sequence, 1, blocks, renumber=True))
        del self.tokens[sequence][BLOCK_SIZE : (1 + blocks) * BLOCK_SIZE]

    def move(self, source: str, first: int, blocks: int, target: str) -> None:
        """Append blocks of the source to the target. Raises Unsupported."""
        self.operations.apply(Move(source, first, blocks, target))
        span = slice(first * BLOCK_SIZE, (first + blocks) * BLOCK_SIZE)
        self.tokens[target] += self.tokens[source][span]


def _evicted(
    decoder: Decoder, tokens: Sequence[int], trained: int, blocks: int, times: int
) -> list[float]:
    stored = _Stored(decoder, trained)
    rows = stored.feed(SEQUENCE, tokens[:trained])
    for turn in range(times):
        stored.evict(SEQUENCE, blocks)
        start = trained + turn * BLOCK_SIZE
        rows = stored.feed(SEQUENCE, tokens[start : start + BLOCK_SIZE])
    again = _Stored(decoder, trained).feed(SEQUENCE, stored.tokens[SEQUENCE])
    end = trained + times * BLOCK_SIZE
    return _compared(rows, again[-BLOCK_SIZE:], tokens[end - BLOCK_SIZE + 1 : end + 1])


def _moved(
    decoder: Decoder, tokens: Sequence[int], other: Sequence[int], trained: int
) -> list[float]:
    """Moves the third quarter of a text behind the first quarter of another one."""
    quarter = trained // 4
    stored = _Stored(decoder, 2 * trained)
    stored.feed(SEQUENCE, tokens[: 3 * quarter])
    stored.feed(OTHER, other[:quarter])
    size = quarter // BLOCK_SIZE
    stored.move(SEQUENCE, 2 * size, size, OTHER)
    end = 3 * quarter + BLOCK_SIZE
    rows = stored.feed(OTHER, tokens[3 * quarter : end])
    again = _Stored(decoder, trained).feed(OTHER, stored.tokens[OTHER])
    return _compared(rows, again[-BLOCK_SIZE:], tokens[3 * quarter + 1 : end + 1])


def _compared(rows: Tensor, again: Tensor, following: Sequence[int]) -> list[float]:
    """KL(again || rows) and the excess loss on `following`, both averaged over the rows."""
    index = torch.tensor(following, device=rows.device)[:, None]
    divergence = (again.exp() * (again - rows)).sum(-1).double().mean()
    loss = (again - rows).gather(1, index).double().mean()
    return [float(divergence), float(loss)]
