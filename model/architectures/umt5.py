"""UMT5: T5 v1.1 with a relative bias in every layer."""

from typing import ClassVar

from ropewalk.model.architectures.fields import Absent, Fields
from ropewalk.model.architectures.mt5 import MT5
from ropewalk.model.architectures.t5 import T5


class UMT5(T5):
    model_type = "umt5"
    model_class = "UMT5ForConditionalGeneration"
    former_class = None
    gguf_name = None  # GGUF stores it as t5 with more biases
    absent: ClassVar[Absent] = MT5.absent
    feed_forward = "gated-gelu"
    per_layer = True
    harmless = ("scalable_attention",)  # the layout of the weights before conversion

    def scales_output(self, fields: Fields, tied: bool) -> bool:
        # Published models are not tied, but transformers 5 saves them as if they were.
        if tied and fields.states("tie_word_embeddings"):
            fields.assume(
                "tie_word_embeddings is true, so logits are divided by the root of d_model "
                "(transformers); set it to false for a model that was published without"
            )
        return super().scales_output(fields, tied)
