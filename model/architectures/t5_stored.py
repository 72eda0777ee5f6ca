"""Where both formats store the parameters of T5's encoder-decoder."""

from collections.abc import Iterator
from dataclasses import dataclass

from ropewalk.model.architectures.stored import Parameters, Stored
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Attention:
    """Names within a layer, without .weight."""

    norm: str
    q: str
    k: str
    v: str
    out: str


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Names within a layer, without .weight; `plain` is the up-projection of an ungated MLP."""

    norm: str
    gate: str
    up: str
    plain: str
    down: str


@dataclass(frozen=True, slots=True)
class Side:
    """The encoder or the decoder. `layer` has {} for its index."""

    layer: str
    norm: str
    bias: str
    attention: Attention
    cross: Attention | None
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Names:
    embed: str
    head: str
    encoder: Side
    decoder: Side


def _hf_attention(index: int, name: str) -> Attention:
    at = f"layer.{index}."
    return Attention(f"{at}layer_norm", *(f"{at}{name}.{part}" for part in "qkvo"))


def _hf_side(side: str, cross: Attention | None) -> Side:
    last = f"layer.{1 if cross is None else 2}."
    return Side(
        layer=f"{side}.block.{{}}.",
        norm=f"{side}.final_layer_norm",
        bias="layer.0.SelfAttention.relative_attention_bias",
        attention=_hf_attention(0, "SelfAttention"),
        cross=cross,
        feed_forward=FeedForward(
            f"{last}layer_norm",
            *(f"{last}DenseReluDense.{part}" for part in ("wi_0", "wi_1", "wi", "wo")),
        ),
    )


def _gguf_attention(name: str) -> Attention:
    return Attention(*(f"{name}_{part}" for part in ("norm", "q", "k", "v", "o")))


def _gguf_side(side: str, cross: Attention | None) -> Side:
    return Side(
        layer=f"{side}.blk.{{}}.",
        norm=f"{side}.output_norm",
        bias="attn_rel_b",
        attention=_gguf_attention("attn"),
        cross=cross,
        feed_forward=FeedForward("ffn_norm", "ffn_gate", "ffn_up", "ffn_up", "ffn_down"),
    )


HUGGING_FACE = Names(
    embed="shared",
    head="lm_head",
    encoder=_hf_side("encoder", None),
    decoder=_hf_side("decoder", _hf_attention(1, "EncDecAttention")),
)
GGUF = Names(
    embed="token_embd",
    head="output",
    encoder=_gguf_side("enc", None),
    decoder=_gguf_side("dec", _gguf_attention("cross_attn")),
)


def encoder_decoder(config: ModelConfig, names: Names) -> Parameters:
    """Every parameter of an EncoderDecoder of this shape."""
    assert isinstance(config, EncoderDecoderConfig)
    vocabulary = (config.vocab_size, config.hidden_size)
    found: dict[str, tuple[Stored, ...]] = {
        "embed.weight": (Stored(f"{names.embed}.weight", vocabulary),)
    }
    if not config.tied_embeddings:
        found["head.weight"] = (Stored(f"{names.head}.weight", vocabulary),)
    found |= {f"encoder.{name}": rows for name, rows in _side(config.encoder, names.encoder)}
    found |= dict(_side(config, names.decoder))
    return found


def _side(config: ModelConfig, side: Side) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    yield "norm.weight", (Stored(f"{side.norm}.weight", (config.hidden_size,)),)
    for layer in range(config.num_layers):
        prefix, stored = f"layers.{layer}.", side.layer.format(layer)
        for name, rows, columns, pieces in _matrices(config, side):
            yield (
                f"{prefix}{name}.weight",
                tuple(Stored(f"{stored}{piece}.weight", (rows, columns)) for piece in pieces),
            )
        norms = {"attention_norm": side.attention.norm, "mlp_norm": side.feed_forward.norm}
        if side.cross is not None:
            norms["cross_norm"] = side.cross.norm
        for name, piece in norms.items():
            yield (
                f"{prefix}{name}.weight",
                (Stored(f"{stored}{piece}.weight", (config.hidden_size,)),),
            )
    options = config.encoding.options
    shape = (options["buckets"], config.num_heads)
    for layer in range(config.num_layers if options["per_layer"] else 1):
        name = f"layers.{layer}." if options["per_layer"] else ""
        stored = f"{side.layer.format(layer)}{side.bias}.weight"
        yield f"encoding.{name}weight", (Stored(stored, shape),)


def _matrices(config: ModelConfig, side: Side) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """Of one layer: parameter, rows and columns of each piece, names of the pieces."""
    heads, width, intermediate_size = (
        config.num_heads * config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    own, cross, mlp = side.attention, side.cross, side.feed_forward
    yield "attention.qkv", heads, width, (own.q, own.k, own.v)
    yield "attention.out", width, heads, (own.out,)
    if cross is not None:
        yield "cross.q", heads, width, (cross.q,)
        yield "cross.kv", heads, width, (cross.k, cross.v)
        yield "cross.out", width, heads, (cross.out,)
    if config.gated:
        yield "mlp.gate_up", intermediate_size, width, (mlp.gate, mlp.up)
    else:
        yield "mlp.up", intermediate_size, width, (mlp.plain,)
    yield "mlp.down", width, intermediate_size, (mlp.down,)
