"""What GPT-2 and its relatives share: layer norms, no gates, mostly a key head per query head.

Reads their descriptions in both formats. An architecture's own file states only the differences.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import (
    Most,
    harmless_in_gguf,
    harmless_in_hf,
    refuse_foreign,
    refuse_foreign_gguf,
    vocab_size_of_gguf,
)
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.weights.base import WeightFile

NOPE = EncodingSpec("nope", {})


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of config.json by which a family states its sizes; a pair: older files' name too."""

    hidden_size: str | tuple[str, str] = "hidden_size"
    num_layers: str | tuple[str, str] = "num_hidden_layers"
    num_heads: str | tuple[str, str] = "num_attention_heads"
    context: str = "max_position_embeddings"
    num_kv_heads: str | None = None  # None: each query head has a key head
    intermediate_size: str | None = None  # None: four times the width
    norm_eps: str | None = None  # None: 1e-5
    tied: bool = True  # whether the head is the embedding, where tie_word_embeddings is absent


class PlainDecoder(Architecture):
    """Override what differs from: q, k and v stored one after another, nothing transposed."""

    model_class: str  # in config.json's architectures
    keys: Keys
    names: stored.Names  # in safetensors
    gguf_names: stored.Names = stored.GGUF_FUSED
    adopted: str | None = None  # the family's own code, since integrated into transformers
    prefix: str = ""  # of all names but the head's; missing in files of the bare model
    fused_by_head: bool = False  # in safetensors
    transposed: bool = False  # in safetensors
    harmless: str = ""  # further keys of config.json that do not change logits

    @abstractmethod
    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        """`usual`, which has the sizes by `keys`, with this family's differences."""

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        """`usual` with this family's differences; its metadata keys start with `own`."""
        raise NotImplementedError

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        refuse_foreign(fields, self.model_type, self.model_class, self.adopted)
        config = self.shape_from_hf(fields, self._usual(fields))
        fields.finish(harmless_in_hf(*self.harmless.split()))
        return config

    def _usual(self, fields: Fields) -> ModelConfig:
        """What config.json says of the sizes."""
        keys = self.keys
        hidden_size = _either(fields, keys.hidden_size, Most.WIDTH)
        intermediate_size = (
            fields.integer(keys.intermediate_size, Most.FFN_WIDTH)
            if keys.intermediate_size
            else None
        )
        tied = fields.flag("tie_word_embeddings")
        num_heads = num_kv_heads = _either(fields, keys.num_heads, Most.HEADS)
        if keys.num_kv_heads is not None:
            num_kv_heads = fields.integer(keys.num_kv_heads, num_heads, null=num_heads)
        return plain_config(
            fields,
            vocab_size=fields.integer("vocab_size", Most.VOCAB),
            hidden_size=hidden_size,
            num_layers=_either(fields, keys.num_layers, Most.LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size or 4 * hidden_size,
            norm_eps=fields.number(keys.norm_eps) if keys.norm_eps else 1e-5,
            trained_context=fields.integer(keys.context, Most.CONTEXT),
            tied_embeddings=keys.tied if tied is None else tied,
        )

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        own = f"{self.gguf_name}."
        refuse_foreign_gguf(fields, own)
        num_heads = fields.integer(own + "attention.head_count", Most.HEADS)
        num_kv_heads = fields.optional_integer(own + "attention.head_count_kv", num_heads)
        if num_kv_heads not in (None, num_heads) and self.keys.num_kv_heads is None:
            raise fields.error("attention.head_count_kv differs from attention.head_count")
        usual = plain_config(
            fields,
            vocab_size=vocab_size_of_gguf(fields, own, weights),
            hidden_size=fields.integer(own + "embedding_length", Most.WIDTH),
            num_layers=fields.integer(own + "block_count", Most.LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            intermediate_size=fields.integer(own + "feed_forward_length", Most.FFN_WIDTH),
            norm_eps=fields.number(own + "attention.layer_norm_epsilon"),
            trained_context=fields.integer(own + "context_length", Most.CONTEXT),
            tied_embeddings="output.weight" not in weights.names(),
        )
        config = self.shape_from_gguf(fields, own, usual)
        fields.finish(harmless_in_gguf(own))
        return config

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> stored.Parameters:
        orders = (stored.FusedByHead(config.num_heads),) if self.fused_by_head else ()
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
    fields: Fields,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    **others: Any,
) -> ModelConfig:
    """The usual config of these families; `others` are the fields of ModelConfig that differ."""
    if hidden_size % num_heads:
        raise fields.error(f"the hidden size {hidden_size} is not a multiple of {num_heads} heads")
    if num_heads % (num_kv_heads or num_heads):
        raise fields.error(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
    usual: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "head_dim": hidden_size // num_heads,
        "windows": (None,) * num_layers,
        "encoding": NOPE,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
    }
    return ModelConfig(**usual | others)


def _either(fields: Fields, names: str | tuple[str, str], limit: int) -> int:
    """A number that some published files have under an older name."""
    if isinstance(names, str):
        return fields.integer(names, limit)
    name, older = names
    first, second = fields.optional_integer(name, limit), fields.optional_integer(older, limit)
    if first is not None and second is not None and first != second:
        raise fields.error(f"{name} is {first}, but {older} is {second}")
    found = first if first is not None else second
    return fields.integer(name, limit) if found is None else found
