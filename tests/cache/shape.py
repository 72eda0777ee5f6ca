"""What a cache needs to know of a model, without a model."""

from typing import NamedTuple


class Shape(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int
