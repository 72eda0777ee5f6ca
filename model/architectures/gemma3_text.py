"""Gemma 3, its text alone: as Gemma 2, but with two rotations by kind of layer, q and k normed, and
nothing capped."""

from typing import ClassVar

from ropewalk.model.architectures import kinds, rotation
from ropewalk.model.architectures.common import FULL, LLAMA_CPP, SLIDING, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.gemma2 import SIZES, Gemma2
from ropewalk.model.config import EncodingSpec
from ropewalk.model.weights.base import WeightFile


class Gemma3Text(Gemma2):
    model_type = "gemma3_text"
    model_class = "Gemma3ForCausalLM"
    gguf_name: str | None = "gemma3"
    qk_norm = True
    largest = 62
    absent: ClassVar[Absent] = SIZES | by(
        TRANSFORMERS,
        vocab_size=262208,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP, **{"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6}
    )

    def caps(self, fields: Fields, own: str = "") -> tuple[float | None, float | None]:
        return None, None

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows(fields, layers)

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        return kinds.rope_by_layer(
            fields,
            head_dim,
            context,
            full=kinds.full_layers(fields, layers),
            thetas={FULL: 1e6, SLIDING: 1e4},
            near=lambda: fields.number("rope_local_base_freq"),
        )

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_in_gguf(fields, "gemma3.", layers)

    def rope_in_gguf(
        self, fields: Fields, weights: WeightFile, head_dim: int, context: int, layers: int
    ) -> EncodingSpec:
        far = super().rope_in_gguf(fields, weights, head_dim, context, layers)
        base = fields.number("gemma3.rope.freq_base_swa")
        near = rotation.rope_spec(fields, base, far.options["width"])
        return kinds.either(far, kinds.full_layers_in_gguf(fields, "gemma3.", layers), near)
