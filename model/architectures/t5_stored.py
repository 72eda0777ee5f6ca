"""Where both formats store the parameters of T5's encoder-decoder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ropewalk.model.architectures.stored import Parameters, Stored
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig

Layer = Mapping[str, tuple[str, ...]]  # parameter → the tensors that hold its rows, in order


@dataclass(frozen=True, slots=True)
class Side:
    """The encoder or the decoder: names without .weight. `prefix` has {} for a layer's index."""

    prefix: str
    norm: str
    bias: str  # within a layer
    layer: Layer


@dataclass(frozen=True, slots=True)
class Names:
    embed: str
    head: str
    encoder: Side
    decoder: Side


def _hf_layer(last: str) -> Layer:
    own, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    return {
        "attention_norm": ("layer.0.layer_norm",),
        "attention.qkv": (f"{own}.q", f"{own}.k", f"{own}.v"),
        "attention.out": (f"{own}.o",),
        "cross_norm": ("layer.1.layer_norm",),
        "cross.q": (f"{cross}.q",),
        "cross.kv": (f"{cross}.k", f"{cross}.v"),
        "cross.out": (f"{cross}.o",),
        "mlp_norm": (f"{last}.layer_norm",),
        "mlp.gate_up": (f"{last}.DenseReluDense.wi_0", f"{last}.DenseReluDense.wi_1"),
        "mlp.up": (f"{last}.DenseReluDense.wi",),
        "mlp.down": (f"{last}.DenseReluDense.wo",),
    }


_HF_BIAS = "layer.0.SelfAttention.relative_attention_bias"
_GGUF_LAYER = {
    "attention_norm": ("attn_norm",),
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.out": ("attn_o",),
    "cross_norm": ("cross_attn_norm",),
    "cross.q": ("cross_attn_q",),
    "cross.kv": ("cross_attn_k", "cross_attn_v"),
    "cross.out": ("cross_attn_o",),
    "mlp_norm": ("ffn_norm",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.up": ("ffn_up",),
    "mlp.down": ("ffn_down",),
}
HUGGING_FACE = Names(
    embed="shared",
    head="lm_head",
    encoder=Side("encoder.block.{}.", "encoder.final_layer_norm", _HF_BIAS, _hf_layer("layer.1")),
    decoder=Side("decoder.block.{}.", "decoder.final_layer_norm", _HF_BIAS, _hf_layer("layer.2")),
)
GGUF = Names(
    embed="token_embd",
    head="output",
    encoder=Side("enc.blk.{}.", "enc.output_norm", "attn_rel_b", _GGUF_LAYER),
    decoder=Side("dec.blk.{}.", "dec.output_norm", "attn_rel_b", _GGUF_LAYER),
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
        at = side.prefix.format(layer)
        for name, shape in _shapes(config).items():
            pieces = (f"{at}{piece}.weight" for piece in side.layer[name])
            yield f"layers.{layer}.{name}.weight", tuple(Stored(each, shape) for each in pieces)
    options = config.encoding.options
    table = (options["buckets"], config.num_heads)
    for layer in range(config.num_layers if options["per_layer"] else 1):
        name = f"layers.{layer}." if options["per_layer"] else ""
        stored = f"{side.prefix.format(layer)}{side.bias}.weight"
        yield f"encoding.{name}weight", (Stored(stored, table),)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the tensors that hold a layer's parameters. Only a decoder has a cross-attention."""
    width, inside = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "attention.qkv": (heads, width),
        "attention.out": (width, heads),
        "mlp_norm": (width,),
        "mlp.gate_up" if config.gated else "mlp.up": (inside, width),
        "mlp.down": (width, inside),
    }
    if isinstance(config, EncoderDecoderConfig):
        matrices = {"cross.q": (heads, width), "cross.kv": (heads, width)}
        found |= {"cross_norm": (width,), **matrices, "cross.out": (width, heads)}
    return found
