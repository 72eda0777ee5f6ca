"""mT5: T5 v1.1 with a multilingual vocabulary; its output is never scaled."""

from model.architectures.fields import Fields
from model.architectures.t5 import T5


class MT5(T5):
    model_type = "mt5"
    model_class = "MT5ForConditionalGeneration"
    gguf_name = None  # GGUF stores it as t5
    feed_forward = "gated-gelu"

    def scales_output(self, fields: Fields, tied: bool) -> bool:
        return False
