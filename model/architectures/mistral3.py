"""Mistral Small 3.1 and Ministral 3 with images, of which the text is served."""

import re
from collections.abc import Mapping
from typing import ClassVar

from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.images import DERIVED, WithImages
from ropewalk.model.architectures.ministral3 import Ministral3
from ropewalk.model.architectures.mistral import Mistral


class Mistral3(WithImages):
    model_type = "mistral3"
    model_class = "Mistral3ForConditionalGeneration"
    texts: ClassVar[Mapping[str, GatedDecoder]] = {"ministral3": Ministral3(), "mistral": Mistral()}
    harmless = frozenset(
        {
            *("image_token_index", "image_token_id", "vision_feature_layer"),
            *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        }
    )
    derived = re.compile(DERIVED)
