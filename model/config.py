"""The shape of a decoder: everything but its weights. Plain data, no torch."""

from dataclasses import dataclass
from typing import Any, Literal

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# How a layer's two halves are joined: each normalised before (Llama), each after it is added
# (OPT-350m), both reading the layer's input (GPT-NeoX), or both reading one norm of it (GPT-J).
BlockKind = Literal["pre_norm", "post_norm", "parallel", "parallel_one_norm"]


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """Which positional encoding, and its own options: `create` in model/encodings reads them."""

    name: str  # a file of model/encodings, or "package.module:Class"
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What every decoder-only architecture comes down to; `width` is that of the residual."""

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
    head_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before the encoding
    norm: NormKind = "rms"
    norm_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True  # two up-projections, one through the activation, multiplied
    block: BlockKind = "pre_norm"
    embed_scale: float = 1.0  # on token embeddings, before positions are added
    embed_norm: bool = False  # after positions are added
    embed_width: int | None = None  # of the embedding, when projected to `width` and back
    attention_scale: float | None = None  # on q · k; None: 1 / sqrt(head_dim)
    qkv_clip: float | None = None  # q, k and v are clamped to ± this


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """An encoder-decoder: the inherited fields are its decoder's, whose shape the cache follows."""

    encoder: ModelConfig  # as wide as the decoder, with as many heads; its encoding looks both ways
    start_token: int  # begins every answer, unseen
    end_token: int  # ends every text the encoder was trained on
    output_scale: float = 1.0  # on the decoder's output, before the head
