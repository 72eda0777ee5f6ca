"""The bias of a step's scores: the encodings' biases, prepared for the backends."""

from dataclasses import dataclass

from torch import Tensor

from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import (
    EncodingError,
    KeyBias,
    LinearBias,
    MaterialisedBias,
    PairBias,
    PositionalEncoding,
    TableBias,
)


@dataclass(frozen=True, slots=True)
class DenseBias:
    """Adds values[head, row, key index] to the score; built for one step only."""

    values: Tensor  # [heads, T, max_context] float32


StepBias = LinearBias | TableBias | KeyBias | DenseBias


def step_bias(
    encoding: PositionalEncoding, batch: ForwardBatch, block_size: int
) -> StepBias | None:
    """What an encoding of one layer adds to its scores."""
    added = encoding.score_bias()
    if isinstance(added, MaterialisedBias | PairBias):
        return _dense(added, batch, block_size)
    return added


def _dense(bias: MaterialisedBias | PairBias, batch: ForwardBatch, block_size: int) -> DenseBias:
    keys = batch.key_positions(block_size)[batch.row_requests()]
    values = bias.between(batch.positions[:, None], keys)
    if values.shape[1:] != (len(keys), 1, keys.shape[1]):  # kernels would misread it
        raise EncodingError(
            f"score_bias returns {list(values.shape)} for queries [{len(keys)}, 1] and keys "
            f"{list(keys.shape)}; it must be [heads, ..., queries, keys]."
        )
    return DenseBias(values[:, :, 0])
