"""Tiny random checkpoints of the families without gates, as transformers writes them."""

import torch
import transformers

COMMON = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}


def bloom(**changes):
    """Six heads: no power of two."""
    return transformers.BloomConfig(
        **COMMON | {"hidden_size": 36, "n_head": 6, "n_layer": 3} | changes
    )


def mpt(attn_config=None, **changes):
    """Twelve heads, all but no power of two."""
    shape = {"d_model": 36, "n_heads": 12, "n_layers": 2, "max_seq_len": 200}
    return transformers.MptConfig(**COMMON | shape | {"attn_config": attn_config or {}} | changes)


def falcon(**changes):
    shape = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3}
    kind = {
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "new_decoder_architecture": False,
        "bias": True,
    }
    return transformers.FalconConfig(
        **COMMON | shape | kind | {"max_position_embeddings": 64} | changes
    )


def gpt2(**changes):
    shape = {"n_embd": 36, "n_head": 3, "n_layer": 3, "n_positions": 160}
    return transformers.GPT2Config(**COMMON | shape | changes)


def opt(**changes):
    shape = {
        "hidden_size": 36,
        "ffn_dim": 50,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "max_position_embeddings": 160,
        "word_embed_proj_dim": 36,
    }
    return transformers.OPTConfig(**COMMON | shape | changes)


def xglm(**changes):
    shape = {
        "d_model": 36,
        "ffn_dim": 50,
        "attention_heads": 3,
        "num_layers": 3,
        "max_position_embeddings": 40,
    }
    return transformers.XGLMConfig(**COMMON | shape | changes)


def gpt_neox(**changes):
    shape = {
        "hidden_size": 48,
        "intermediate_size": 50,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "max_position_embeddings": 40,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1234.0,
            "partial_rotary_factor": 0.25,
        },
    }
    return transformers.GPTNeoXConfig(**COMMON | shape | changes)


def gptj(**changes):
    shape = {"n_embd": 48, "n_head": 3, "n_layer": 3, "n_positions": 160, "rotary_dim": 8}
    return transformers.GPTJConfig(**COMMON | shape | changes)


def random_model(config):
    """A float32 model whose every weight matters: norms off one, biases off zero.

    Not with eager attention, which adds Falcon's bias twice.
    """
    model = transformers.AutoModelForCausalLM.from_config(config)
    if config.model_type == "mpt":
        # transformers reads alibi_bias_max but builds the slopes for 8, whatever it is.
        inner = model.transformer
        build, most = inner.build_mpt_alibi_tensor, config.attn_config.alibi_bias_max
        inner.build_mpt_alibi_tensor = lambda *a, **k: build(*a, **k, alibi_bias_max=most)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * values if norm else 0.2 * values)
    return model.eval()
