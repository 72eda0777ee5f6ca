"""Granite: Llama with factors on embeddings, scores, what is added, and logits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Default, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.program import Op, Part, Scale
from ropewalk.model.recipes import ADD, Layer
from ropewalk.model.weights.base import WeightFile


@dataclass(frozen=True, slots=True)
class ScaledPreNorm:
    """x + factor · attention(norm(x)), then x + factor · mlp(norm(x))."""

    factor: float

    def __call__(self, layer: Layer) -> Iterator[Op]:
        scale = Scale("d", "d", self.factor, Part.RESIDUAL)
        yield layer.norm("attention_norm")
        yield from layer.attention()
        yield scale
        yield ADD
        yield layer.norm("mlp_norm")
        yield from layer.mlp()
        yield scale
        yield ADD


class Granite(GatedDecoder):
    model_type = "granite"
    model_class = "GraniteForCausalLM"
    gguf_name: str | None = "granite"
    gguf_pairs = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        embedding_multiplier=1.0,
        attention_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | {
        "embedding_scale": Default(1.0, LLAMA_CPP),
        "residual_scale": Default(1.0, LLAMA_CPP),
    }

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, bool(fields.flag("mlp_bias"))

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        embedding = fields.number("embedding_multiplier")
        attention = fields.number("attention_multiplier")
        residual = fields.number("residual_multiplier")
        divisor = fields.number("logits_scaling")
        config = super().config_from_hf(fields, weights)
        return _scaled(config, embedding, attention, residual, divisor)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields, own = self.described_by_gguf(fields), f"{self.gguf_name}."
        if fields.flag(own + "rope.scaling.finetuned") is False:
            raise fields.error(
                "rope.scaling.finetuned is false, which means to llama.cpp that nothing is "
                "rotated, but of Granite only models with RoPE are served"
            )
        embedding = fields.number(own + "embedding_scale")
        attention = fields.optional_number(own + "attention.scale")  # absent: the usual one
        residual = fields.number(own + "residual_scale")
        divisor = fields.number(own + "logit_scale")
        for unused in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
            fields.get(f"{own}ssm.{unused}")  # of Granite 4 where no layer is a state space
        fields.get(own + "expert_shared_feed_forward_length")
        config = super().config_from_gguf(fields, weights)
        return _scaled(config, embedding, attention, residual, divisor)


def _scaled(
    config: ModelConfig,
    embedding: float,
    attention: float | None,
    residual: float,
    divisor: float,
) -> ModelConfig:
    return replace(
        config,
        embed_scale=embedding,
        attention_scale=attention,
        block=ScaledPreNorm(residual),
        logit_scale=1 / divisor,
    )
