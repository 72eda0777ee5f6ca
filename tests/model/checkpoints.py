"""Tiny random checkpoints as transformers writes them, and the same weights as GGUF."""

import math

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


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def gguf_name(name):
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def paired_heads(name, config):
    """The number of heads in the rows if GGUF stores them in pairs, else None."""
    if config.model_type not in ("llama", "mistral", "smollm3"):
        return None
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2])


def gguf_tensors(model):
    """{GGUF name: array}, queries and keys in the order that GGUF's Llama has."""
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy().astype(np.float32)
        if heads := paired_heads(name, config):
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensors[gguf_name(name)] = np.ascontiguousarray(values)
    return tensors


def fill_from_gguf(model, reader):
    """Load into a transformers model with tied embeddings, with the gguf package's own reader."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(gguf_name(name))
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
    writer.add_tokenizer_pre("default")
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
    arch = "llama" if config.model_type == "mistral" else config.model_type
    head_dim = getattr(config, "head_dim", None)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    add_tokenizer(writer, config.vocab_size, more)
    return writer


def write_gguf(path, model, kind="F32", metadata=None, tensors=()):
    """Matrices in the given type where their rows allow it, the rest in F32.

    metadata: called with the writer, to add more. tensors: more of them, by name.
    """
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf_writer(path, model.config)
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
