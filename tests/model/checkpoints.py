"""Tiny random checkpoints as transformers writes them, and the same weights as GGUF."""

import math
import re

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.encodings.base import create
from ropewalk.model.loading.checkpoints import load_program
from tests.model.tiny import in_torch

CPU = torch.device("cpu")
END = "<|end|>"
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END, "th"]
ROPE = {"rope_type": "default", "rope_theta": 1234.0}
COMMON = {
    "vocab_size": 260,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rope_parameters": ROPE,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def llama(**changes):
    """Two key heads for six query heads, heads wider than width / heads."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6, "head_dim": 10}
    return transformers.LlamaConfig(**COMMON | shape | {"num_key_value_heads": 2} | changes)


def mistral(**changes):
    """One key head."""
    shape = {"hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "head_dim": 12}
    return transformers.MistralConfig(
        **COMMON | shape | {"num_key_value_heads": 1, "sliding_window": None} | changes
    )


def qwen2(**changes):
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    return transformers.Qwen2Config(**COMMON | shape | {"num_key_value_heads": 3} | changes)


def qwen3(**changes):
    shape = {"hidden_size": 40, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 16}
    return transformers.Qwen3Config(**COMMON | shape | {"num_key_value_heads": 2} | changes)


def phi3(**changes):
    """Two key heads for six query heads."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "original_max_position_embeddings": 16}
    return transformers.Phi3Config(**COMMON | shape | more | changes)


def smollm3(**changes):
    """Odd numbers of layers and heads."""
    shape = {"hidden_size": 50, "intermediate_size": 56, "num_attention_heads": 5}
    more = {"num_key_value_heads": 1, "num_hidden_layers": 5}
    return transformers.SmolLM3Config(**COMMON | shape | more | changes)


def ernie4_5(**changes):
    shape = {"hidden_size": 40, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 16}
    return transformers.Ernie4_5Config(**COMMON | shape | {"num_key_value_heads": 2} | changes)


def glm4(**changes):
    """Three query heads for each key head; half of each rotates."""
    shape = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 6, "head_dim": 16}
    more = {"num_key_value_heads": 2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
    return transformers.Glm4Config(**COMMON | shape | more | changes)


def helium(**changes):
    """A key head for each query head."""
    shape = {"hidden_size": 60, "intermediate_size": 40, "num_attention_heads": 5, "head_dim": 12}
    return transformers.HeliumConfig(**COMMON | shape | {"num_key_value_heads": 5} | changes)


def ministral3(**changes):
    """Three query heads for each key head; queries grow within the tests' lengths."""
    shape = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 6, "head_dim": 16}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    yarn |= {"rope_theta": 1234.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 2.5}
    more = {"num_key_value_heads": 2, "rope_parameters": yarn | {"llama_4_scaling_beta": 0.4}}
    return transformers.Ministral3Config(**COMMON | shape | more | changes)


def starcoder2(**changes):
    """Two key heads for six query heads."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    return transformers.Starcoder2Config(**COMMON | shape | {"num_key_value_heads": 2} | changes)


def cohere2(**changes):
    """Every third layer sees all keys and is not rotated."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    windows = {"sliding_window": 19, "sliding_window_pattern": 3, "num_hidden_layers": 4}
    more = {"num_key_value_heads": 2, "logit_scale": 0.3, **windows}
    return transformers.Cohere2Config(**COMMON | shape | more | changes)


def gemma(**changes):
    shape = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "head_dim": 14}
    return transformers.GemmaConfig(**COMMON | shape | {"num_key_value_heads": 1} | changes)


def gemma2(**changes):
    """Every other layer sees all keys; caps low enough to bend what they cap."""
    shape = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "head_dim": 14}
    more = {
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "sliding_window": 19,
        "query_pre_attn_scalar": 14,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.5,
    }
    return transformers.Gemma2Config(**COMMON | shape | more | changes)


def gemma3(**changes):
    """Every third layer sees all keys; two key heads for four query heads, wider than usual."""
    shape = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "head_dim": 14}
    rotations = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1234.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    }
    more = {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "sliding_window": 19,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 14,
        "rope_parameters": rotations,
    }
    return transformers.Gemma3TextConfig(**COMMON | shape | more | changes)


def olmo2(**changes):
    """Two key heads for six query heads."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    return transformers.Olmo2Config(**COMMON | shape | {"num_key_value_heads": 2} | changes)


def exaone4(**changes):
    """Every third layer sees all keys and is not rotated."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    windows = {"sliding_window": 19, "sliding_window_pattern": 3, "num_hidden_layers": 4}
    more = {"num_key_value_heads": 2, **windows}
    return transformers.Exaone4Config(**COMMON | shape | more | changes)


def granite(**changes):
    """Two key heads for six query heads, and factors that are not 1."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    factors = {"embedding_multiplier": 3.5, "attention_multiplier": 0.2}
    factors |= {"residual_multiplier": 0.4, "logits_scaling": 1.7}
    return transformers.GraniteConfig(
        **COMMON | shape | factors | {"num_key_value_heads": 2} | changes
    )


def olmo3(**changes):
    """Every fourth layer sees all keys, with a rotation that is scaled."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.5}
    rotations = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 150.0, **yarn},
        "sliding_attention": {"rope_type": "default", "rope_theta": 150.0},
    }
    more = {"num_hidden_layers": 5, "sliding_window": 19, "rope_parameters": rotations}
    return transformers.Olmo3Config(**COMMON | shape | more | {"num_key_value_heads": 2} | changes)


def granite4(**changes):
    """Without experts and state-space layers."""
    factors = {"embedding_multiplier": 3.5, "attention_multiplier": 0.2}
    factors |= {"residual_multiplier": 0.4, "logits_scaling": 1.7}
    shape = {"hidden_size": 48, "shared_intermediate_size": 40, "num_attention_heads": 6}
    shape |= {"num_key_value_heads": 2, "layer_types": ["attention"] * 3, "num_local_experts": 0}
    more = {"mamba_n_heads": 8, "position_embedding_type": "rope"}  # the former for its validation
    return transformers.GraniteMoeHybridConfig(**COMMON | factors | shape | more | changes)


def olmoe(**changes):
    """Two key heads for six query heads; seven experts of which a token uses three."""
    shape = {"hidden_size": 48, "intermediate_size": 20, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 3}
    return transformers.OlmoeConfig(**COMMON | shape | more | changes)


def qwen3_moe(**changes):
    """As olmoe's, with heads wider than width / heads."""
    shape = {"hidden_size": 48, "moe_intermediate_size": 20, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 3, "head_dim": 10}
    return transformers.Qwen3MoeConfig(**COMMON | shape | more | {"norm_topk_prob": True} | changes)


def mixtral(**changes):
    shape = {"hidden_size": 48, "intermediate_size": 20, "num_attention_heads": 6}
    return transformers.MixtralConfig(
        **COMMON | shape | {"num_key_value_heads": 2, "num_local_experts": 4} | changes
    )


def granitemoe(**changes):
    """Two key heads for six query heads, and factors that are not 1."""
    shape = {"hidden_size": 48, "intermediate_size": 20, "num_attention_heads": 6}
    factors = {"embedding_multiplier": 3.5, "attention_multiplier": 0.2}
    factors |= {"residual_multiplier": 0.4, "logits_scaling": 1.7}
    more = {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 4}
    return transformers.GraniteMoeConfig(**COMMON | shape | factors | more | changes)


def random_model(config):
    """A float32 model whose every weight matters: norms off one, biases off zero."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * values if "norm" in name else 0.25 * values)
    return model


def tiny_tokenizer():
    """One token per byte, an end marker and a merge."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def save(model, folder, **options):
    """Save as transformers does, with a tokenizer."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def gguf_architecture(config):
    others = {"mistral": "llama", "gpt_neox": "gptneox", "gemma3_text": "gemma3", "olmo3": "olmo2"}
    others |= {"qwen3_moe": "qwen3moe", "ministral3": "mistral3"}
    name = others.get(config.model_type, config.model_type)
    return next(arch for arch, its in gguf.MODEL_ARCH_NAMES.items() if its == name)


def gguf_name(config):
    """A function: a tensor's name in transformers to that in GGUF, as the gguf package has it."""
    names = gguf.get_tensor_name_map(gguf_architecture(config), config.num_hidden_layers)
    suffixes = (".weight", ".bias")
    return lambda name: (
        names.get_name(name, suffixes)
        or names.get_name(name.removeprefix("transformer."), suffixes)
    )


def paired_heads(name, config):
    """The number of heads in the rows if GGUF stores them in pairs, else None."""
    paired = ("llama", "mistral", "ministral3", "smollm3", "granite", "granitemoe")
    if config.model_type not in paired:
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2])


def stored_values(name, values, config):
    """As llama.cpp's converters reorder them."""
    if heads := paired_heads(name, config):
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if "query_key_value" in name:  # head by head in transformers, all of q first in GGUF
        parts = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
        return parts.swapaxes(0, 1).reshape(values.shape)
    if config.model_type in ("gemma", "gemma2", "gemma3_text") and "norm" in name:
        return 1 + values
    if config.model_type == "gpt2" and re.search(r"\.c_\w+\.weight$", name):
        return values.T  # stored the other way round by transformers
    return values


def of_experts(name, values):
    """Of all experts' weights [experts, ...] of a layer, or their router's, those of GGUF."""
    layer, _, kind = name.removeprefix("model.layers.").partition(".")
    named = {
        "experts.gate_up_proj": ("gate_exps", "up_exps"),
        "experts.down_proj": ("down_exps",),
        "router.weight": ("gate_inp",),
    }
    names = named.get(".".join(kind.split(".")[-2:]))
    if names is None:
        return {}
    parts = zip(names, np.split(values, len(names), axis=-2), strict=True)
    return {f"blk.{layer}.ffn_{each}.weight": np.ascontiguousarray(part) for each, part in parts}


def gguf_tensors(model):
    """{GGUF name: array}, with the divisors or factors of the frequencies."""
    config, tensors, gguf_named = model.config, {}, gguf_name(model.config)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            values = stored_values(name, tensor.numpy().astype(np.float32), config)
            tensors |= of_experts(name, values) or {gguf_named(name): np.ascontiguousarray(values)}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        width = config.head_dim
        unscaled = rope["rope_theta"] ** -(torch.arange(0, width, 2) / width)
        tensors["rope_freqs.weight"] = (unscaled / model.model.rotary_emb.inv_freq).numpy()
    if rope.get("rope_type") == "longrope":
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.float32(rope[f"{kind}_factor"])
    return tensors


def fill_from_gguf(model, reader):
    """Load into a transformers model with tied embeddings, with the gguf package's own reader."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    gguf_named = gguf_name(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(gguf_named(name))
            rows = tensor.data.reshape(-1, tensor.data.shape[-1])
            # Long ones: the package works through a few at a time.
            rows = rows.reshape(len(rows) // math.gcd(len(rows), 256), -1)
            values = gguf.quants.dequantize(rows, tensor.tensor_type).reshape(parameter.shape)
            if heads := paired_heads(name, model.config):
                pairs = values.reshape(heads, -1, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            parameter.copy_(torch.from_numpy(values.copy()))
    assert not stored


def add_tokenizer(writer, vocab_size, more=None):
    """The tiny tokenizer, with more tokens or padded to the size of the vocabulary."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = [f"<unused{index}>" for index in range(vocab_size - len(TOKENS))]
    tokens = [*TOKENS, *(unused if more is None else more)]
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    )
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(TOKENS.index(END))


def gguf_writer(path, config, more=None):
    """A writer with all metadata of the model and its tokenizer, with these tokens more."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf_architecture(config)])
    writer.add_context_length(
        first_of(config, "seq_length", "max_seq_len", "max_position_embeddings")
    )
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    ffn_width = first_of(config, "intermediate_size", "n_inner") or 4 * config.hidden_size
    writer.add_feed_forward_length(ffn_width)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "rms_norm_eps") or config.model_type == "cohere2":
        describe_gated(writer, config)
    else:
        describe_plain(writer, config)
    add_tokenizer(writer, config.vocab_size, more)
    return writer


def first_of(config, *names):
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def describe_gated(writer, config):
    head_dim = getattr(config, "head_dim", None)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "glm4":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if config.model_type in ("llama", "mistral"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if (
        config.model_type in ("gemma3_text", "exaone4", "olmo3", "cohere2")
        and config.sliding_window
    ):
        writer.add_sliding_window(config.sliding_window)
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        pattern = gguf.Keys.Attention.SLIDING_WINDOW_PATTERN.format(arch=writer.arch)
        if config.model_type == "gemma3_text":
            writer.add_uint32(pattern, windows.index(False) + 1)
        else:
            writer.add_array(pattern, windows)
    if "sliding_attention" in rope:
        base = gguf.Keys.Rope.FREQ_BASE_SWA.format(arch=writer.arch)
        writer.add_float32(base, rope["sliding_attention"]["rope_theta"])
    if config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("granite", "granitemoe"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def describe_plain(writer, config):
    kind = config.model_type
    writer.add_layer_norm_eps(
        first_of(config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
    )
    if kind == "bloom":
        writer.add_head_count_kv(config.n_head)
    elif kind == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv is not None:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    elif kind == "starcoder2":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    elif kind == "gptj":
        writer.add_rope_dimension_count(config.rotary_dim)
    elif kind == "gpt_neox":
        rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_parallel_residual(config.use_parallel_residual)


def describe_rotation(writer, model):
    """How frequencies are scaled; of Phi-3 also its window and how much of a head turns."""
    config, rope = model.config, getattr(model.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)


def write_gguf(path, model, kind="F32", metadata=None, tensors=()):
    """Matrices in the given type where their rows allow it, the rest in F32.

    metadata: called with the writer, to add more. tensors: more of them, by name.
    """
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf_writer(path, model.config)
    describe_rotation(writer, model)
    if metadata is not None:
        metadata(writer)
    for name, values in {**gguf_tensors(model), **dict(tensors)}.items():
        if values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    return finish(writer, path)


def finish(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(checkpoint, dtype=torch.float32, context=None, backend=SdpaAttention):
    """The checkpoint in a decoder."""
    config = checkpoint.config
    encoding = create(config.encoding, config, context or config.trained_context, CPU)
    return in_torch(load_program(checkpoint, encoding, dtype=dtype, device=CPU), backend)
