"""UMT5: T5 v1.1 with a relative bias in every layer."""

from typing import ClassVar

from ropewalk.model.architectures.fields import Absent
from ropewalk.model.architectures.mt5 import MT5
from ropewalk.model.architectures.t5 import T5


class UMT5(T5):
    model_type = "umt5"
    model_class = "UMT5ForConditionalGeneration"
    gguf_name = None  # GGUF stores it as t5 with more biases
    absent: ClassVar[Absent] = MT5.absent
    feed_forward = "gated-gelu"
    per_layer = True
    harmless = ("scalable_attention",)  # the layout of the weights before conversion
