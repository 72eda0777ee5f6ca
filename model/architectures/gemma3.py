"""Gemma 3 with images, of which the text is served: a decoder as in gemma3_text.py."""

import re
from collections.abc import Mapping
from typing import ClassVar

from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.gemma3_text import Gemma3Text
from ropewalk.model.architectures.images import DERIVED, WithImages


class Gemma3(WithImages):
    model_type = "gemma3"
    model_class = "Gemma3ForConditionalGeneration"
    texts: ClassVar[Mapping[str, GatedDecoder]] = {"gemma3_text": Gemma3Text()}
    harmless = frozenset(
        {
            *("mm_tokens_per_image", "image_token_index"),
            *("image_token_id", "boi_token_index", "eoi_token_index"),
        }
    )
    derived = re.compile(DERIVED)
