"""What all architectures share in reading descriptions. Knows no particular one."""

import re

from model.architectures.fields import Fields
from model.config import Activation
from model.weights.base import WeightFile, shown

# Bounds on what a description may claim, far above any model this decoder fits.
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_WIDTH = 1 << 17
MAX_FFN_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 22

# In config.json: training, bookkeeping and generation defaults. None changes the logits.
HARMLESS = """
    _attn_implementation_autoset _name_or_path attention_dropout bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_llama_config label2id
    length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
# In GGUF metadata: keys of the file or tokenizer; the model's own start with its name.
GGUF_OTHERS = re.compile(r"(general|tokenizer|quantize|split)\.")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def refuse_foreign(
    fields: Fields, model_type: str, model_class: str, adopted: str | None = None
) -> None:
    """Refuse heads other than the language model's, custom code, and quantised weights.

    adopted: the family's original code ("modeling_x.XForCausalLM"), since integrated into
    transformers. Checkpoints may still name it or its class; it is never run.
    """
    classes = fields.texts("architectures")
    served = {model_class} if adopted is None else {model_class, adopted.split(".")[-1]}
    if classes is not None and served.isdisjoint(classes):
        raise fields.error(
            f"architectures is {shown(', '.join(classes))}, "
            f"but of {model_type} models only {model_class} can be served"
        )
    code = fields.get("auto_map")
    own = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
    if code is not None and (adopted is None or own != adopted):
        raise fields.error("auto_map asks to run code from the checkpoint, which is refused")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config is not supported; use unquantised weights")


def activation(fields: Fields, key: str, default: str) -> Activation:
    """The activation of the feed-forward part, by transformers' name for it."""
    name = fields.text(key) or default
    if name not in ACTIVATIONS:
        raise fields.error(f"{key} {shown(name)} is not supported")
    return ACTIVATIONS[name]


def refuse_split(fields: Fields) -> None:
    """Refuse one of several GGUF files."""
    if fields.get("split.count") not in (None, 0, 1):
        raise fields.error("it is one of several files of a split model, so merge them first")


def vocab_size_of_gguf(fields: Fields, own: str, weights: WeightFile) -> int:
    """Rows of the embedding: the metadata may omit their number, but must not contradict it."""
    name = "token_embd.weight"
    if name not in weights.names():
        raise fields.error(f"tensor {name} is missing")
    rows = weights.shape(name)[0]
    claimed = fields.optional_integer(own + "vocab_size", MAX_VOCAB)
    if rows > MAX_VOCAB or claimed not in (None, rows):
        raise fields.error(f"vocab_size is {claimed}, but {name} has {rows} rows")
    return rows
