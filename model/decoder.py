"""A decoder: a program on an executor. Called with a packed ragged batch, it gives logits or
hidden states.

Knows no requests and no sampling.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import (
    MaterialisedBias,
    PairBias,
    PositionalEncoding,
    asks_keys,
    by_content,
    rotates,
    stored_gates,
)
from ropewalk.model.program import Program, encoding_parameters
from ropewalk.model.watch import Watch

Forward = Callable[[ForwardBatch, KVCache], Tensor]  # a decoder, or what stands in for one


class Executor(Protocol):
    """Runs one program, from which it was made."""

    name: str
    recordable: bool  # whether CUDA graphs can hold its passes
    rounds_inputs: bool  # whether linear layers round what they are given to 8 bits
    rotates_apart: bool  # whether the time to rotate queries and keys is told from others'

    def __call__(self, batch: ForwardBatch, kv: KVCache, watch: Watch | None = None) -> Tensor:
        """As Decoder's."""
        ...

    def fixed_tensors(self) -> Mapping[str, Tensor]:
        """Those that passes read and nothing changes, besides the encodings'."""
        ...


class Decoder:
    """What the server needs of a model. Weights belong to the executor alone, which packs them."""

    def __init__(self, program: Program, executor: Executor) -> None:
        self.config = program.config
        self.encoding = program.encoding
        self.encoder_encoding = program.encoder_encoding
        self.dtype, self.device = program.dtype, program.device
        self.executor = executor

    def __call__(self, batch: ForwardBatch, kv: KVCache, watch: Watch | None = None) -> Tensor:
        """Logits [S, vocab] of `batch.output_rows`; keys and values of all rows are stored.

        With `batch.hidden` it is what the head would read, [S, width], and the head is left out.
        An encoder-decoder's batch has `cross`: new prompts are encoded first, and their keys and
        values stored for all later steps. The batch may still be in host memory.
        """
        return self.executor(batch, kv, watch)

    @property
    def encodings(self) -> list[PositionalEncoding]:
        """Of all layers and sides, those inside others included."""
        return [
            each
            for side in (self.encoding, self.encoder_encoding)
            if side is not None
            for each in side.modules()
            if isinstance(each, PositionalEncoding)
        ]

    @property
    def gates(self) -> int:
        """How many are stored beside each token's keys."""
        return stored_gates(self.encoding, self.config)

    @property
    def position_apart(self) -> bool:
        """Whether all positional work can be timed by itself: attention does none of it."""
        encodings = self.encodings
        in_attention = any(
            each.score_bias() or each.rotation() or by_content(each) for each in encodings
        )
        apart = self.executor.rotates_apart or not any(map(rotates, encodings))
        return apart and not in_attention

    @property
    def has_dense_bias(self) -> bool:
        """Whether a step computes a number for each of its tokens and each key before it."""
        return any(
            asks_keys(each) or isinstance(each.score_bias(), MaterialisedBias | PairBias)
            for each in self.encodings
        )

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Which tensors passes read and nothing changes, by name, each piece of memory once.

        Whoever holds such a tensor says so, because encodings also hold scratch memory.
        """
        found = dict(encoding_parameters(self.encoding, self.encoder_encoding))
        sides = {"encoding": self.encoding, "encoder.encoding": self.encoder_encoding}
        for side, encoding in sides.items():
            for path, each in [] if encoding is None else encoding.named_modules(prefix=side):
                if isinstance(each, PositionalEncoding):
                    found |= {f"{path}.{name}": own for name, own in each.fixed_tensors().items()}
        found |= self.executor.fixed_tensors()
        # Not twice what is tied, or a table that kernels read where the encoding keeps it.
        distinct: dict[tuple[int, int], tuple[str, Tensor]] = {}
        for name, tensor in found.items():
            distinct.setdefault((tensor.data_ptr(), tensor.nbytes), (name, tensor))
        return dict(distinct.values())
