"""The shape of a decoder: everything but its weights. Plain data, no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# How attention and MLP are joined: each normalised before (Llama), each after it is added
# (OPT-350m), both reading the layer's input (GPT-NeoX), or both reading one norm of it (GPT-J).
BlockKind = Literal["pre_norm", "post_norm", "parallel", "parallel_one_norm"]


class Pooling(StrEnum):
    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all tokens'


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a checkpoint says of its embeddings; the defaults hold where it says nothing."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True  # to length 1
    why_not: str | None = None  # what it says that is not computed here, after the model's name


USUAL = Embedding()


@dataclass(frozen=True, slots=True)
class EncodingSpec:
    """Which positional encoding, with its options: `create` in model/encodings reads them."""

    name: str  # a file of model/encodings, or "package.module:Class"
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs in place of one, of which a router picks some for each token."""

    count: int
    used: int  # for a token
    normalized: bool  # whether the weights of those that are picked sum to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Covers every decoder-only architecture; `hidden_size` is that of the residual stream."""

    vocab_size: int  # rows of the embedding
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert, if there are several
    norm_eps: float
    trained_context: int  # positions the model was trained for
    encoding: EncodingSpec
    windows: tuple[int | None, ...]  # per layer: keys a query sees, its own included; None: all
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before the encoding
    qk_norm_whole: bool = False  # or over all heads at once, each column with its own weight
    norm: NormKind = "rms"
    norm_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True  # two up-projections: one through the activation, times the other
    experts: Experts | None = None  # None: one MLP for all tokens
    # Or a family's own, in an order that none here has: model/recipes.py's Layer → ops.
    block: BlockKind | Callable[..., Iterator[Any]] = "pre_norm"
    embed_scale: float = 1.0  # factor on token embeddings, before positions are added
    embed_norm: bool = False  # after positions are added
    embed_width: int | None = None  # of the embedding, when projected to `hidden_size` and back
    attention_scale: float | None = None  # factor on q · k; None: 1 / sqrt(head_dim)
    qkv_clip: float | None = None  # q, k and v are clamped to ± this
    score_cap: float | None = None  # scores without bias go smoothly to ± this, as SoftCap has it
    logit_scale: float = 1.0  # factor on logits
    logit_cap: float | None = None  # and then a SoftCap of them

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """How many columns each norm of `qk_norm` is over: of queries and of keys."""
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm_whole else (1, 1)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    def seen(self, context: int) -> list[int]:
        """For each layer, to how many of `context` keys the newest token attends."""
        return [context if window is None else min(context, window) for window in self.windows]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """An encoder-decoder: inherited fields describe the decoder, which determines the cache."""

    encoder: ModelConfig  # of the decoder's width and heads; its encoding is bidirectional
    start_token: int  # begins every answer and is not returned
    end_token: int  # ends every text the encoder was trained on
    output_scale: float = 1.0  # factor on the decoder's output, before the head
