"""What Llama and its relatives share: RMSNorm, rotary positions, grouped queries, gated MLP.

Reads their descriptions in both formats. An architecture's own file states only the differences.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import rotation, rotation_gguf, stored
from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import (
    LLAMA_CPP,
    Most,
    activation,
    harmless_in_gguf,
    harmless_in_hf,
    refuse_foreign,
    refuse_foreign_gguf,
    vocab_size_of_gguf,
)
from ropewalk.model.architectures.fields import Absent, Default, Fields, Like
from ropewalk.model.config import EncodingSpec, Experts, ModelConfig
from ropewalk.model.weights.base import WeightFile, shown


class GatedDecoder(Architecture):
    """Override what differs from: no biases, full attention, q and k stored in halves."""

    model_class: str  # in config.json's architectures
    names: stored.Names = stored.HUGGING_FACE
    gguf_names: stored.Names = stored.GGUF
    qk_norm: bool = False
    norm_order: stored.Order | None = None  # how safetensors store the weights of norms
    inside: str = "intermediate_size"  # the key of an MLP's width, or an expert's
    hidden_act: tuple[str, str] = ("hidden_act", "silu")  # the activation's key, and default
    norm_eps: str = "rms_norm_eps"
    gguf_inside: str = "feed_forward_length"
    gguf_norm_eps: str = "attention.layer_norm_rms_epsilon"
    gguf_pairs: bool = False  # q and k rows of GGUF are permuted: rotated pairs are adjacent
    adjacent: bool = False  # rotated pairs are adjacent in both formats
    harmless: ClassVar[frozenset[str]] = frozenset()  # further keys without effect on logits
    adopted: str | None = None  # the family's own code, since integrated into transformers
    rope_kinds: ClassVar[Mapping[str, str]] = rotation.KINDS
    rotates_partly: ClassVar[bool] = False  # whether a part of each head may be all that rotates
    absent_in_gguf: ClassVar[Absent] = {
        **rotation_gguf.ROTATED_IN_GGUF,
        "attention.head_count_kv": Default(Like("attention.head_count"), LLAMA_CPP),
    }
    derived = re.compile("|".join([rotation.TABLE, *map(re.escape, rotation_gguf.ROPE_TENSORS)]))

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        """(q, k and v; attention output; feed-forward), from config.json."""
        return False, False, False

    def experts(self, fields: Fields) -> Experts | None:
        """From config.json."""
        return None

    def experts_in_gguf(self, fields: Fields) -> Experts | None:
        """The same, from GGUF metadata."""
        return None

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        """Per layer, how many keys a query attends to, from config.json."""
        return (None,) * layers

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        """The same, from GGUF metadata."""
        return (None,) * layers

    def rotated_layers(self, fields: Fields, layers: int) -> Sequence[int] | None:
        """Which layers rotate queries and keys, from config.json; None: all."""
        return None

    def rotated_layers_in_gguf(self, fields: Fields, layers: int) -> Sequence[int] | None:
        """The same for GGUF, whose metadata never state it; override for another convention."""
        return None

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        """How queries and keys are rotated, from config.json."""
        return rotation.rope_from_hf(
            fields,
            head_dim,
            context,
            kinds=self.rope_kinds,
            layers=self.rotated_layers(fields, layers),
            partly=self.rotates_partly,
        )

    def rope_in_gguf(
        self, fields: Fields, weights: WeightFile, head_dim: int, context: int, layers: int
    ) -> EncodingSpec:
        """The same, from GGUF metadata."""
        rotated = self.rotated_layers_in_gguf(fields, layers)
        own = f"{self.gguf_name}."
        return rotation_gguf.rope_from_gguf(fields, own, weights, head_dim, context, layers=rotated)

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        refuse_foreign(fields, self.model_type, self.model_class, self.adopted)
        width = fields.integer("hidden_size", Most.WIDTH)
        layers = fields.integer("num_hidden_layers", Most.LAYERS)
        heads = fields.integer("num_attention_heads", Most.HEADS)
        kv_heads = fields.integer("num_key_value_heads", heads, null=heads)
        read = fields.integer if fields.defines("head_dim") else fields.optional_integer
        head_dim = _head_dim(fields, read("head_dim", Most.HEAD_DIM), width, heads, kv_heads)
        tied = fields.flag("tie_word_embeddings")
        qkv_bias, out_bias, mlp_bias = self.biases(fields)
        context = fields.integer("max_position_embeddings", Most.CONTEXT)
        encoding = self._laid_out(self.rope(fields, head_dim, context, layers))
        config = ModelConfig(
            vocab_size=fields.integer("vocab_size", Most.VOCAB),
            hidden_size=width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.integer(self.inside, Most.FFN_WIDTH),
            experts=self.experts(fields),
            norm_eps=fields.number(self.norm_eps),
            trained_context=_trained_context(fields, encoding, context),
            encoding=encoding,
            windows=self.windows(fields, layers),
            # Files of some versions leave the key out; then the stored tensors decide.
            tied_embeddings="lm_head.weight" not in weights.names() if tied is None else tied,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=mlp_bias,
            qk_norm=self.qk_norm,
            activation=activation(fields, *self.hidden_act),
        )
        fields.finish(harmless_in_hf(*self.harmless))
        return config

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        names, own = weights.names(), f"{self.gguf_name}."
        refuse_foreign_gguf(fields, own)
        width = fields.integer(own + "embedding_length", Most.WIDTH)
        layers = fields.integer(own + "block_count", Most.LAYERS)
        heads = fields.integer(own + "attention.head_count", Most.HEADS)
        kv_heads = fields.integer(own + "attention.head_count_kv", heads, times=layers)
        head_dim = fields.optional_integer(own + "attention.key_length", Most.HEAD_DIM)
        head_dim = _head_dim(fields, head_dim, width, heads, kv_heads)
        value_dim = fields.optional_integer(own + "attention.value_length", Most.HEAD_DIM)
        if value_dim not in (None, head_dim):
            raise fields.error("attention.value_length differs from attention.key_length")
        context = fields.integer(own + "context_length", Most.CONTEXT)
        encoding = self._laid_out(self.rope_in_gguf(fields, weights, head_dim, context, layers))
        if self.gguf_pairs:  # the layout's name, where a file gives it
            layout = fields.text(own + "tensor_data_layout")
            if layout not in (None, "Meta AI original pth"):
                raise fields.error(f"tensor_data_layout {shown(layout)} is not supported")
        config = ModelConfig(
            vocab_size=vocab_size_of_gguf(fields, own, weights),
            hidden_size=width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.integer(own + self.gguf_inside, Most.FFN_WIDTH),
            experts=self.experts_in_gguf(fields),
            norm_eps=fields.number(own + self.gguf_norm_eps),
            trained_context=rotation_gguf.trained_context_in_gguf(fields, own, encoding, context),
            encoding=encoding,
            windows=self.windows_in_gguf(fields, layers),
            tied_embeddings="output.weight" not in names,
            # The metadata say nothing about biases, so the tensors decide.
            qkv_bias="blk.0.attn_q.bias" in names,
            out_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_down.bias" in names,
            qk_norm=self.qk_norm,
        )
        fields.finish(harmless_in_gguf(own))
        return config

    def _laid_out(self, rope: EncodingSpec) -> EncodingSpec:
        if not self.adjacent:
            return rope
        return replace(rope, options=rope.options | {"layout": "interleaved"})

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> stored.Parameters:
        return stored.decoder(config, self._names(names), norm_order=self.norm_order)

    def _names(self, names: frozenset[str]) -> stored.Names:
        """Embedding models are published as the bare decoder, whose tensors have no prefix."""
        own = self.names
        if f"{own.embed}.weight" in names:
            return own
        names_of = (own.embed, own.norm, own.layer)
        embed, norm, layer = (each.removeprefix("model.") for each in names_of)
        return replace(own, embed=embed, norm=norm, layer=layer)

    def parameters_in_gguf(self, config: ModelConfig) -> stored.Parameters:
        orders: tuple[stored.Order | None, ...] = ()
        if self.gguf_pairs:
            width = config.encoding.options["width"]
            orders = (
                stored.Pairs(config.num_heads, width),
                stored.Pairs(config.num_kv_heads, width),
                None,
            )
        return stored.decoder(config, self.gguf_names, qkv_orders=orders)

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        own = self._names(names)
        return {f"{own.head}.weight": f"{own.embed}.weight"} if config.tied_embeddings else {}


def _trained_context(fields: Fields, encoding: EncodingSpec, context: int) -> int:
    """max_sequence_length: of Llama 1 the only length, of its longer relatives the scaled one."""
    longest = fields.optional_integer("max_sequence_length", Most.CONTEXT)
    if longest is not None and not fields.states("max_position_embeddings"):
        return longest
    trained = rotation.trained_context(fields, encoding, context)
    return max(trained, longest) if longest and "scaling" in encoding.options else trained


def _head_dim(fields: Fields, given: int | None, width: int, heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise fields.error(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if given is not None:
        return given
    if width % heads or width // heads > Most.HEAD_DIM:
        raise fields.error(f"the width {width} is not a sensible multiple of {heads} heads")
    return width // heads
