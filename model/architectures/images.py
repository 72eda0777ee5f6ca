"""Models with images, of which the text is served: a decoder of a family of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import harmless_in_hf, refuse_foreign
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile, shown

DERIVED = r"(model\.)?(vision_tower|multi_modal_projector)\..*"


class WithImages(Architecture):
    """Files of GGUF have the text alone, under the text's name."""

    model_class: ClassVar[str]  # in config.json's architectures
    texts: ClassVar[Mapping[str, GatedDecoder]]  # what the text may be, by its model_type
    harmless: ClassVar[frozenset[str]]  # keys without effect on logits

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        refuse_foreign(fields, self.model_type, self.model_class)
        text = fields.section("text_config")
        if text is None:
            raise fields.missing("text_config")
        kind = text.text("model_type")
        if kind is None:
            raise text.missing("model_type")
        family = self.texts.get(kind)
        if family is None:
            raise text.error(f"model_type must be {' or '.join(self.texts)}, not {shown(kind)}")
        config = family.config_from_hf(text, weights)
        tied = fields.flag("tie_word_embeddings")
        if tied is None and text.flag("tie_word_embeddings") is None:
            tied = not any(name.endswith("lm_head.weight") for name in weights.names())
        fields.finish(harmless_in_hf("vision_config", *self.harmless))
        return config if tied is None else replace(config, tied_embeddings=tied)

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> stored.Parameters:
        text = next(iter(self.texts.values()))  # whose names and orders are those of the others
        return stored.decoder(config, self._names(names), norm_order=text.norm_order)

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        own = self._names(names)
        return {f"{own.head}.weight": f"{own.embed}.weight"} if config.tied_embeddings else {}

    def _names(self, names: frozenset[str]) -> stored.Names:
        """Tensors are as transformers 5 names them, or as it did when the family was published."""
        at, head = "language_model.model.", "language_model.lm_head"
        if f"{at}embed_tokens.weight" not in names:
            at, head = "model.language_model.", "lm_head"
        return replace(
            next(iter(self.texts.values())).names,
            embed=f"{at}embed_tokens",
            norm=f"{at}norm",
            head=head,
            layer=f"{at}layers.{{}}.",
        )
