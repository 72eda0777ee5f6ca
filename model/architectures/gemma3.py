"""Gemma 3 with images, of which the text is served: a decoder as in gemma3_text.py."""

import re
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import harmless_in_hf, refuse_foreign
from ropewalk.model.architectures.fields import Absent, Fields
from ropewalk.model.architectures.gemma3_text import Gemma3Text
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile

TEXT = Gemma3Text()


class Gemma3(Gemma3Text):
    model_type = "gemma3"
    model_class = "Gemma3ForConditionalGeneration"
    gguf_name = None  # GGUF files have the text alone
    harmless = frozenset(
        {
            *("vision_config", "mm_tokens_per_image", "image_token_index"),
            *("image_token_id", "boi_token_index", "eoi_token_index"),
        }
    )
    absent: ClassVar[Absent] = {}  # `text_config` is read with the text's
    derived = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        refuse_foreign(fields, self.model_type, self.model_class)
        text = fields.section("text_config")
        if text is None:
            raise fields.missing("text_config")
        config = TEXT.config_from_hf(text, weights)
        tied = fields.flag("tie_word_embeddings")
        fields.finish(harmless_in_hf(*self.harmless))
        return config if tied is None else replace(config, tied_embeddings=tied)

    def _names(self, names: frozenset[str]) -> stored.Names:
        """Tensors are as transformers 5 names them, or as it did when the family was published."""
        at, head = "language_model.model.", "language_model.lm_head"
        if f"{at}embed_tokens.weight" not in names:
            at, head = "model.language_model.", "lm_head"
        return replace(
            self.names,
            embed=f"{at}embed_tokens",
            norm=f"{at}norm",
            head=head,
            layer=f"{at}layers.{{}}.",
        )
