"""What each kind of decoder computes, as lists of ops: the order of norms, attention and MLP.

Values: x the residual stream, n its norm, d what is added to it next; q, k and v; y what attention
found; gate, up and h inside an MLP. Layers are numbered, and so are the names of their weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.config import BlockKind, EncoderDecoderConfig, ModelConfig
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    asks_query,
    by_content,
    forgets,
)
from ropewalk.model.program import (
    Activate,
    Add,
    AskQuery,
    Attend,
    Clip,
    Embed,
    Forget,
    Gate,
    Linear,
    MixExperts,
    Norm,
    Op,
    Part,
    Place,
    Program,
    Rotate,
    Scale,
    ScaleQueries,
    SoftCap,
    Store,
    checked,
    keeping,
    of_norms,
    shapes_of,
)
from ropewalk.model.weights.quantize import Weight


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one layer. at: what its weights' names begin with."""

    config: ModelConfig
    at: str
    index: int  # of its keys and values in the cache
    encoding: PositionalEncoding
    window: int | None = None
    causal: bool = True

    def norm(self, name: str, x: str = "x", to: str = "n") -> Op:
        return norm(self.config, f"{self.at}{name}", x, to)

    def attention(self, x: str = "n") -> Iterator[Op]:
        """x → d."""
        config, at, dim = self.config, f"{self.at}attention.", self.config.head_dim
        of_queries, of_keys = config.num_heads * dim, config.num_kv_heads * dim
        outputs = (of_queries, of_keys, of_keys)
        if by_content(self.encoding) and not self.causal:
            raise EncodingError("what depends on content needs a decoder: here tokens see all.")
        if forgets(self.encoding):
            yield Forget(x, "", self.index, self.encoding)
        yield Linear(x, "q k v", f"{at}qkv", config.hidden_size, outputs, config.qkv_bias)
        if config.qkv_clip is not None:
            yield Clip("q k v", "q k v", config.qkv_clip)
        if config.qk_norm:
            of_q, of_k = config.qk_norm_widths
            yield Norm("q", "q", f"{at}q_norm", of_q, config.norm_eps)
            yield Norm("k", "k", f"{at}k_norm", of_k, config.norm_eps)
        if asks_query(self.encoding):
            yield AskQuery(f"{x} q", "", dim, self.encoding)
        if self.encoding.query_scales() is not None:
            yield ScaleQueries("q", "q", dim, self.encoding)
        yield Rotate("q k", "q k", dim, self.encoding)
        yield Store("k v", "", dim, self.index)
        yield self._attend(self.encoding, crosses=False)
        yield Linear("y", "d", f"{at}out", of_queries, (config.hidden_size,), config.out_bias)

    def cross(self) -> Iterator[Op]:
        """n → d, over the encoded prompt; without positions."""
        config, at = self.config, f"{self.at}cross."
        inside = config.num_heads * config.head_dim
        yield Linear("n", "q", f"{at}q", config.hidden_size, (inside,), config.qkv_bias)
        yield self._attend(None, crosses=True)
        yield Linear("y", "d", f"{at}out", inside, (config.hidden_size,), config.out_bias)

    def crossed(self, encoded: str) -> Iterator[Op]:
        """Store the encoded prompt's keys and values for `cross`."""
        config = self.config
        outputs = (config.num_kv_heads * config.head_dim,) * 2
        yield Linear(
            encoded, "k v", f"{self.at}cross.kv", config.hidden_size, outputs, config.qkv_bias
        )
        yield Store("k v", "", config.head_dim, self.index)

    def mlp(self, x: str = "n") -> Iterator[Op]:
        """x → d."""
        config, at, width = self.config, f"{self.at}mlp.", self.config.intermediate_size
        bias = config.mlp_bias
        if config.experts is not None:
            name, experts, inputs = f"{at}experts", config.experts, config.hidden_size
            yield MixExperts(x, "d", name, experts, inputs, width, config.activation)
            return
        if config.gated:
            yield Linear(x, "gate up", f"{at}gate_up", config.hidden_size, (width, width), bias)
            yield Gate("gate up", "h", config.activation)
        else:
            yield Linear(x, "up", f"{at}up", config.hidden_size, (width,), bias)
            yield Activate("up", "h", config.activation)
        yield Linear("h", "d", f"{at}down", width, (config.hidden_size,), bias)

    def _attend(self, encoding: PositionalEncoding | None, crosses: bool) -> Op:
        config = self.config
        return Attend(
            "q",
            "y",
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            layer=self.index,
            encoding=encoding,
            window=None if crosses else self.window,
            causal=self.causal and not crosses,
            crosses=crosses,
            cap=config.score_cap,
        )


ADD = Add("x d", "x")


def pre_norm(layer: Layer) -> Iterator[Op]:
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama."""
    yield layer.norm("attention_norm")
    yield from layer.attention()
    yield ADD
    yield layer.norm("mlp_norm")
    yield from layer.mlp()
    yield ADD


def post_norm(layer: Layer) -> Iterator[Op]:
    """norm(x + attention(x)), then norm(x + mlp(x)): OPT-350m."""
    yield from layer.attention("x")
    yield ADD
    yield layer.norm("attention_norm", to="x")
    yield from layer.mlp("x")
    yield ADD
    yield layer.norm("mlp_norm", to="x")


def parallel(layer: Layer) -> Iterator[Op]:
    """x + attention(norm(x)) + mlp(another norm(x)): GPT-NeoX."""
    yield layer.norm("attention_norm")
    yield from layer.attention()
    yield layer.norm("mlp_norm")
    yield ADD
    yield from layer.mlp()
    yield ADD


def parallel_one_norm(layer: Layer) -> Iterator[Op]:
    """x + attention(norm(x)) + mlp(norm(x)), the same norm: GPT-J."""
    yield layer.norm("attention_norm")
    yield from layer.attention()
    yield ADD
    yield from layer.mlp()
    yield ADD


def with_cross(layer: Layer) -> Iterator[Op]:
    """x + attention(norm(x)), x + cross(norm(x)), x + mlp(norm(x)): T5's decoder."""
    yield layer.norm("attention_norm")
    yield from layer.attention()
    yield ADD
    yield layer.norm("cross_norm")
    yield from layer.cross()
    yield ADD
    yield layer.norm("mlp_norm")
    yield from layer.mlp()
    yield ADD


BLOCKS: Mapping[BlockKind, Callable[[Layer], Iterator[Op]]] = {
    "pre_norm": pre_norm,
    "post_norm": post_norm,
    "parallel": parallel,
    "parallel_one_norm": parallel_one_norm,
}


def norm(config: ModelConfig, name: str, x: str = "x", to: str = "n") -> Op:
    """The config's kind of norm, over the residual's width."""
    centred = config.norm == "layer"
    bias = centred and config.norm_bias
    return Norm(x, to, name, config.hidden_size, config.norm_eps, centred, bias)


def decoder(config: ModelConfig, encoding: PositionalEncoding) -> Iterator[Op]:
    """Embed, blocks, norm, head."""
    width = config.embed_width or config.hidden_size
    yield from embedded(config, width)
    if config.embed_width is not None:
        yield Linear("x", "x", "project_in", width, (config.hidden_size,))
    yield Place("x", "x", encoding)
    if config.embed_norm:
        yield norm(config, "embed_norm", to="x")
    yield from blocks(config, encoding)
    if config.block != "post_norm":
        yield norm(config, "norm", to="x")
    if config.embed_width is not None:
        yield Linear("x", "x", "project_out", config.hidden_size, (width,))
    yield from head(config, width)


def answers(config: EncoderDecoderConfig, encoding: PositionalEncoding) -> Iterator[Op]:
    """The decoder of an encoder-decoder."""
    yield from embedded(config, config.hidden_size)
    yield Place("x", "x", encoding)
    for layer in range(config.num_layers):
        yield from with_cross(Layer(config, f"layers.{layer}.", layer, encoding.for_layer(layer)))
    yield norm(config, "norm", to="x")
    if config.output_scale != 1.0:
        yield Scale("x", "x", config.output_scale)
    yield from head(config, config.hidden_size)


def prompts(
    config: EncoderDecoderConfig, encoding: PositionalEncoding, of_answers: PositionalEncoding
) -> Iterator[Op]:
    """The encoder, and keys and values of what it found for each of the decoder's layers.

    Until these are stored, the prompts' blocks of the cache's first layer hold the encoder's own
    keys and values, one layer after another, so that no second cache is needed.
    """
    yield from embedded(config, config.hidden_size)
    yield Place("x", "x", encoding)
    encoder = config.encoder
    for layer in range(encoder.num_layers):
        own = encoding.for_layer(layer)
        yield from pre_norm(Layer(encoder, f"encoder.layers.{layer}.", 0, own, causal=False))
    yield norm(encoder, "encoder.norm", to="x")
    for layer in range(config.num_layers):
        own = of_answers.for_layer(layer)
        yield from Layer(config, f"layers.{layer}.", layer, own).crossed("x")


def embedded(config: ModelConfig, width: int) -> Iterator[Op]:
    yield Embed("", "x", "embed", config.vocab_size, width)
    if config.embed_scale != 1.0:
        yield Scale("x", "x", config.embed_scale)


def blocks(config: ModelConfig, encoding: PositionalEncoding) -> Iterator[Op]:
    block = config.block if callable(config.block) else BLOCKS[config.block]
    for layer in range(config.num_layers):
        own = encoding.for_layer(layer)
        yield from block(Layer(config, f"layers.{layer}.", layer, own, config.windows[layer]))


def head(config: ModelConfig, width: int) -> Iterator[Op]:
    yield Linear("x", "logits", "head", width, (config.vocab_size,), config.head_bias, Part.HEAD)
    if config.logit_scale != 1.0:
        yield Scale("logits", "logits", config.logit_scale, Part.HEAD)
    if config.logit_cap is not None:
        yield SoftCap("logits", "logits", config.logit_cap)


def program(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    encoding: PositionalEncoding,
    encoder_encoding: PositionalEncoding | None = None,
) -> Program:
    """The config's program. The encodings' weights are loaded, and they are frozen."""
    ops, prompt_ops = _ops(config, encoding, encoder_encoding)
    return Program(config, ops, prompt_ops, weights, encoding, encoder_encoding)


def allocate(
    config: ModelConfig,
    encoding: PositionalEncoding,
    encoder_encoding: PositionalEncoding | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Memory for all weights but the encodings', uninitialised."""
    ops, prompt_ops = _ops(config, encoding, encoder_encoding)
    every = (*prompt_ops, *ops)
    shapes, norms = shapes_of(every), of_norms(every)
    if config.tied_embeddings:
        del shapes["head.weight"]
    wide = torch.promote_types(dtype, torch.float32)
    made = {
        name: torch.empty(shape, dtype=wide if name in norms else dtype, device=device)
        for name, shape in shapes.items()
    }
    return made | ({"head.weight": made["embed.weight"]} if config.tied_embeddings else {})


def _ops(
    config: ModelConfig, encoding: PositionalEncoding, encoder_encoding: PositionalEncoding | None
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Of a pass, and of new prompts. Raises ValueError where an op reads what none writes."""
    if not isinstance(config, EncoderDecoderConfig):
        return keeping(checked(decoder(config, encoding))), ()
    assert encoder_encoding is not None, "an encoder-decoder has an encoding on each side"
    of_prompts = checked(prompts(config, encoder_encoding, encoding))
    return keeping(checked(answers(config, encoding))), of_prompts
