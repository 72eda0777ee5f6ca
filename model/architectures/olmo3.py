"""OLMo 3: OLMo 2 with windows; a scaling of RoPE is for the layers that see all keys."""

from typing import ClassVar

from ropewalk.model.architectures import kinds
from ropewalk.model.architectures.common import FULL, SLIDING, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.olmo2 import OLMo2
from ropewalk.model.config import EncodingSpec

THETA = 5e5
EVERY = 4  # so manieth layer sees all keys, where layer_types does not say which


class OLMo3(OLMo2):
    model_type = "olmo3"
    model_class = "Olmo3ForCausalLM"
    gguf_name = None  # olmo2 with a window
    absent: ClassVar[Absent] = OLMo2.absent | by(
        TRANSFORMERS, rope_theta=THETA, sliding_window=4096, sliding_window_pattern=EVERY
    )

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        every = fields.get("sliding_window_pattern")
        if fields.get("layer_types") is None and every not in (None, EVERY):
            raise fields.error("transformers ignores sliding_window_pattern; state layer_types")
        return kinds.windows(fields, layers)

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        def near() -> float:
            if fields.get("rope_theta") not in (None, THETA):
                raise fields.error(
                    "versions of transformers read rope_theta differently for layers with a "
                    "window; state it in rope_parameters, for full_attention and sliding_attention"
                )
            return THETA

        return kinds.rope_by_layer(
            fields,
            head_dim,
            context,
            full=kinds.full_layers(fields, layers),
            thetas={FULL: THETA, SLIDING: THETA},
            near=near,
        )
