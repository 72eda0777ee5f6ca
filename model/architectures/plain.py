"""What GPT-2 and its relatives share: layer norms, a key head per query head, no gates.

Reads their descriptions in both formats. An architecture's own file states only the differences.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import (
    MAX_CONTEXT,
    MAX_FFN_WIDTH,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    harmless_in_gguf,
    harmless_in_hf,
    refuse_foreign,
    refuse_split,
    vocab_size_of_gguf,
)
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.weights.base import WeightFile

NOPE = EncodingSpec("nope", {})


class PlainDecoder(Architecture):
    """Override what differs from: q, k and v stored one after another, nothing transposed."""

    model_class: str  # in config.json's architectures
    names: stored.Names  # in safetensors
    gguf_names: stored.Names = stored.GGUF_FUSED
    adopted: str | None = None  # the family's own code, since integrated into transformers
    prefix: str = ""  # of all names but the head's; missing in files of the bare model
    fused_by_head: bool = False  # in safetensors
    transposed: bool = False  # in safetensors
    harmless: str = ""  # further keys of config.json that do not change logits

    @abstractmethod
    def shape_from_hf(self, fields: Fields) -> ModelConfig:
        """From config.json; `plain_config` has the usual values."""

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        """`usual` with this family's differences; its metadata keys start with `own`."""
        raise NotImplementedError

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        refuse_foreign(fields, self.model_type, self.model_class, self.adopted)
        config = self.shape_from_hf(fields)
        fields.finish(harmless_in_hf(*self.harmless.split()))
        return config

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        refuse_split(fields)
        own = f"{self.gguf_name}."
        heads = fields.integer(own + "attention.head_count", MAX_HEADS)
        if fields.optional_integer(own + "attention.head_count_kv", MAX_HEADS) not in (None, heads):
            raise fields.error("attention.head_count_kv differs from attention.head_count")
        usual = plain_config(
            fields,
            vocab_size=vocab_size_of_gguf(fields, own, weights),
            width=fields.integer(own + "embedding_length", MAX_WIDTH),
            layers=fields.integer(own + "block_count", MAX_LAYERS),
            heads=heads,
            ffn_width=fields.integer(own + "feed_forward_length", MAX_FFN_WIDTH),
            norm_eps=fields.number(own + "attention.layer_norm_epsilon"),
            trained_context=fields.integer(own + "context_length", MAX_CONTEXT),
            tied_embeddings="output.weight" not in weights.names(),
        )
        config = self.shape_from_gguf(fields, own, usual)
        fields.finish(harmless_in_gguf(own))
        return config

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> stored.Parameters:
        orders = (stored.FusedByHead(config.heads),) if self.fused_by_head else ()
        found = stored.decoder(config, self.names, qkv_orders=orders, transposed=self.transposed)
        if any(name.startswith(self.prefix) for name in names):
            return found
        return {
            parameter: tuple(
                replace(piece, name=piece.name.removeprefix(self.prefix)) for piece in pieces
            )
            for parameter, pieces in found.items()
        }

    def parameters_in_gguf(self, config: ModelConfig) -> stored.Parameters:
        return stored.decoder(config, self.gguf_names)

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        if not config.tied_embeddings:
            return {}
        original = f"{self.names.embed}.weight"
        if original not in names:
            original = original.removeprefix(self.prefix)
        return {f"{self.names.head}.weight": original}


def plain_config(
    fields: Fields, *, width: int, layers: int, heads: int, **others: Any
) -> ModelConfig:
    """The usual config of these families; `others` are the fields of ModelConfig that differ."""
    if width % heads:
        raise fields.error(f"the width {width} is not a multiple of {heads} heads")
    usual: dict[str, Any] = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "windows": (None,) * layers,
        "encoding": NOPE,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
    }
    return ModelConfig(**usual | others)


def tied(fields: Fields, default: bool = True) -> bool:
    """tie_word_embeddings, or the family's default where the file omits it."""
    given = fields.flag("tie_word_embeddings")
    return default if given is None else given
