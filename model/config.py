"""The shape of a decoder: everything but its weights. Plain data, no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """Which positional encoding, and its own options: `create` in model/encodings reads them."""

    name: str  # "rope", "nope", or "package.module:Class"
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What every architecture's description comes down to; `width` is that of the residual."""

    vocab_size: int  # rows of the embedding
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    norm_eps: float
    trained_context: int  # positions the model was trained for
    encoding: EncodingSpec
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None: all
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before the encoding
