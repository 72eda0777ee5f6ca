"""The check at start that decoding through the paged cache gives the logits of one whole pass.

Two sequences are computed as requests are: in chunks, then token by token, in the blocks of a
block table, the second starting while the first is under way. Each is also computed alone in one
pass with nothing cached. Mistakes in stored keys, chunks, later blocks or batching show as logits
that differ by more than rounding. Mistakes that affect both computations alike, or only long
contexts, do not show.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, zip_longest

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.engine.batch import build_batch
from ropewalk.server.scheduling.request import Request, Work

# Differences allowed for rounding, as shares of the largest logit. Over SmolLM2 and tiny random
# models of every encoding and backend at most 4e-6, 6e-3 and 4e-2 were measured; planted mistakes
# give 0.5 to 2.
TOLERANCES = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 0.03,
    torch.bfloat16: 0.15,
    # For the cache, or for weights in kernels that may round inputs, too, whatever the model's
    # dtype: measured at most 3e-2.
    torch.int8: 0.15,
}
BLOCK_SIZE = 16  # at most, so that even few tokens need more than one block
LENGTHS = (18, 9)  # tokens of the two sequences
SOURCES = (20, 7)  # tokens that an encoder reads first
DECODED = 3  # tokens computed one by one, in the longer sequence across the end of a block
WHOLE = 32  # tokens per block of a pass with nothing cached: one block holds all


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest absolute difference of two logits, and the largest due to rounding."""

    error: float  # inf if a logit is NaN
    tolerance: float

    def defect(self, name: str) -> str | None:
        """What to report of a model whose answers cannot be relied on; None without a defect."""
        if self.error <= self.tolerance:
            return None
        return (
            f"decoding {name} through the cache gives logits that differ from those of one whole "
            f"pass by {self.error:.3g}, more than rounding explains ({self.tolerance:.3g}); "
            "restart with another --attention, and report it with the log"
        )


def check_parity(decoder: Decoder, shape: ModelConfig, kv: KVCache, context: int) -> Parity:
    """Uses caches of its own, made like `kv`; no sequence is longer than `context`."""
    requests = _requests(shape, context)
    cached = _in_steps(requests, _Bench(decoder, shape, kv, min(kv.block_size, BLOCK_SIZE)))
    error = largest = 0.0
    for request, logits in zip(requests, cached, strict=True):
        length = len(request.tokens)
        prompt = replace(request, num_prompt=length)  # whose tokens are computed in one pass
        whole = _Bench(decoder, shape, kv, WHOLE).compute((Work(prompt, 0, length),))
        difference = (logits - whole).abs().nan_to_num(nan=torch.inf)
        error = max(error, float(difference.max()))
        largest = max(largest, float(whole.abs().max()))
    rounded = decoder.executor.rounds_inputs
    tolerance = max(TOLERANCES[kv.dtype], TOLERANCES[torch.int8] if rounded else 0.0)
    return Parity(error, tolerance * largest)


def _requests(shape: ModelConfig, context: int) -> list[Request]:
    draw = random.Random(0)

    def tokens(length: int) -> list[int]:
        return draw.choices(range(shape.vocab_size), k=min(length, context))

    made = []
    for index, (length, source) in enumerate(zip(LENGTHS, SOURCES, strict=True)):
        own = tokens(length)
        request = Request(
            id=str(index),
            tokens=own,
            num_prompt=max(1, len(own) - DECODED),  # the others are decoded
            params=SamplingParams(max_tokens=1),
            arrival=0.0,
            rng=draw,
            source=tuple(tokens(source)) if isinstance(shape, EncoderDecoderConfig) else (),
        )
        made.append(request)
    return made


def _in_steps(requests: Sequence[Request], bench: "_Bench") -> list[Tensor]:
    """Each request's logits, [tokens, vocab]; each starts a step after the previous one."""
    turns: list[list[Work | None]] = [
        [*[None] * late, *_pieces(request)] for late, request in enumerate(requests)
    ]
    logits: dict[str, list[Tensor]] = {request.id: [] for request in requests}
    for step in zip_longest(*turns):
        work = tuple(item for item in step if item is not None)
        rows = iter(bench.compute(work))
        for item in work:
            logits[item.request.id].extend(islice(rows, item.count))
    return [torch.stack(rows_of) for rows_of in logits.values()]


def _pieces(request: Request) -> list[Work]:
    """Two chunks, the second starting inside a block, then one token at a time."""
    length, prompt = len(request.tokens), request.num_prompt
    bounds = sorted({0, -(-prompt * 2 // 3), *range(prompt, length + 1)})
    return [Work(request, start, stop - start) for start, stop in pairwise(bounds)]


class _Bench:
    """A decoder with a small cache that, as fresh memory may, initially holds NaN."""

    def __init__(self, decoder: Decoder, shape: ModelConfig, kv: KVCache, block_size: int) -> None:
        self._decoder = decoder
        # Block 0 is reserved, and a pool needs one more.
        blocks = 2 + sum(-(-length // block_size) for length in (*LENGTHS, *SOURCES))
        self._manager = CacheManager(blocks, block_size, prefix_sharing=False)
        self._kv = KVCache(
            shape,
            blocks=blocks,
            block_size=block_size,
            dtype=kv.dtype,
            device=kv.device,
            gates=decoder.gates,
        )
        for tensor in self._kv.whole:
            if tensor.is_floating_point():  # of an 8-bit cache, only the scales
                tensor.fill_(torch.nan)

    def compute(self, work: tuple[Work, ...]) -> Tensor:
        """One step; logits [tokens, vocab] of all its tokens, at least float32."""
        for item in work:
            request, stop = item.request, item.start + item.count
            self._manager.reserve(request.id, request.tokens, stop)
            if item.encodes:
                self._manager.reserve(request.encoded, request.source, len(request.source))
        batch = build_batch(work, self._manager.table, self._kv.block_size).forward
        every = torch.arange(len(batch.tokens))
        logits: Tensor = self._decoder(replace(batch, output_rows=every), self._kv)
        for item in work:
            request, stop = item.request, item.start + item.count
            self._manager.commit(request.id, request.tokens, stop)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
