"""UMT5: T5 v1.1 with a relative bias in every layer."""

from model.architectures.t5 import T5


class UMT5(T5):
    model_type = "umt5"
    model_class = "UMT5ForConditionalGeneration"
    gguf_name = None  # the format keeps it as a t5 with more biases
    feed_forward = "gated-gelu"
    per_layer = True
    harmless = ("scalable_attention",)  # how the weights lay before they were converted
