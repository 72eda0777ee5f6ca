"""What all architectures share in reading descriptions. Knows no particular one."""

from collections.abc import Callable
from enum import IntEnum

from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import Activation
from ropewalk.model.weights.base import WeightFile, shown


class Most(IntEnum):
    """Bounds on what a description may claim, far above any model this decoder fits."""

    LAYERS = 1024
    HEADS = 1024
    HEAD_DIM = 1024
    WIDTH = 1 << 17
    FFN_WIDTH = 1 << 20
    EXPERTS = 1024
    VOCAB = 1 << 22
    CONTEXT = 1 << 22


# In config.json: training, bookkeeping and generation defaults. None changes the logits.
HARMLESS = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind attention_dropout attn_implementation bad_words_ids
    begin_suppress_tokens bos_token_id cache_config cache_implementation chunk_size_feed_forward
    classifier_dropout compile_config constraints continuous_batching_config
    custom_pipelines decoder_start_token_id disable_compile diversity_penalty do_sample
    dola_layers dtype
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id
    epsilon_cutoff eta_cutoff experts_implementation exponential_decay_length_penalty
    finetuning_task force_words_ids forced_bos_token_id forced_eos_token_id
    gradient_checkpointing guidance_scale id2label initializer_range is_assistant
    is_llama_config label2id length_penalty low_memory max_cache_len max_length
    max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
    model_max_length model_type name_or_path no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_logits output_scores pad_token_id
    penalty_alpha prefill_chunk_size prefix pretraining_tp problem_type prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits repetition_penalty return_dict
    return_dict_in_generate sep_token_id sequence_bias speculation_type stop_strings
    suppress_tokens target_lookbehind task_specific_params temperature tf_legacy_loss
    token_healing tokenizer_class tokenizer_model_max_length tokenizer_padding_side top_h top_k
    top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention_2
    use_flash_attn use_mtp watermarking_config
"""
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, in config.json
TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def harmless_in_hf(*more: str) -> Callable[[str], bool]:
    """Whether a key of config.json changes no answer; `more`: keys of the family.

    Keys that begin with an underscore are private to the program that wrote them. Those of the
    few that mean something are read by their family, and then are not asked about.
    """
    known = {*HARMLESS.split(), *more}
    return lambda key: key.startswith("_") or key in known


def harmless_in_gguf(own: str) -> Callable[[str], bool]:
    """Whether a metadata key says nothing of the decoder: of the file, its tokenizer or its maker,
    or of embeddings (model/loading/embedding.py)."""
    return lambda key: not key.startswith(own) or key == f"{own}pooling_type"


def refuse_foreign(
    fields: Fields,
    model_type: str,
    model_class: str,
    adopted: str | None = None,
    former: str | None = None,
) -> None:
    """Refuse heads other than the language model's, attention to later tokens, custom code, and
    quantised weights.

    adopted: the family's original code ("modeling_x.XForCausalLM"), since integrated into
    transformers. Checkpoints may still name it or its class; it is never run. former: an older
    name of the class.
    """
    classes = fields.texts("architectures")
    # Embedding models are published as the bare decoder; its head is then the tied embedding.
    served = {model_class, model_class.replace("ForCausalLM", "Model")}
    served |= {name.split(".")[-1] for name in (adopted, former) if name is not None}
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
    _refuse_bidirectional(fields, "is_causal")


def activation(fields: Fields, key: str, default: str) -> Activation:
    """The activation of the feed-forward part, by transformers' name for it."""
    name = fields.text(key) or default
    if name not in ACTIVATIONS:
        raise fields.error(f"{key} {shown(name)} is not supported")
    return ACTIVATIONS[name]


def refuse_foreign_gguf(fields: Fields, own: str) -> None:
    """Refuse one of several GGUF files, and attention to later tokens."""
    if fields.get("split.count") not in (None, 0, 1):
        raise fields.error("it is one of several files of a split model, so merge them first")
    _refuse_bidirectional(fields, own + "attention.causal")


def _refuse_bidirectional(fields: Fields, key: str) -> None:
    """Some embedding models are decoders whose tokens attend to later ones, too."""
    if fields.flag(key) is False:
        raise fields.error(f"{key} is false, but only causal attention can be served")


def vocab_size_of_gguf(fields: Fields, own: str, weights: WeightFile) -> int:
    """Rows of the embedding: the metadata may omit their number, but must not contradict it."""
    name = "token_embd.weight"
    if name not in weights.names():
        raise fields.error(f"tensor {name} is missing")
    rows = weights.shape(name)[0]
    claimed = fields.optional_integer(own + "vocab_size", Most.VOCAB)
    if rows > Most.VOCAB or claimed not in (None, rows):
        raise fields.error(f"vocab_size is {claimed}, but {name} has {rows} rows")
    return rows
