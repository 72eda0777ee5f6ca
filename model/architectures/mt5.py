"""mT5: T5 v1.1 with a multilingual vocabulary; its output is never scaled."""

from typing import ClassVar

from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.t5 import T5


class MT5(T5):
    model_type = "mt5"
    model_class = "MT5ForConditionalGeneration"
    former_class = None
    gguf_name = None  # GGUF stores it as t5
    absent: ClassVar[Absent] = T5.absent | by(
        TRANSFORMERS,
        vocab_size=250112,
        d_ff=1024,
        num_layers=8,
        num_heads=6,
        decoder_start_token_id=0,
    )
    feed_forward = "gated-gelu"

    def scales_output(self, fields: Fields, tied: bool) -> bool:
        return False
