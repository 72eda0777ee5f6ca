"""The families that have only a decoder, as tiny random models: a row for each, with what differs.

tests/model/test_parity.py runs every row in every way that it names.
"""

from dataclasses import dataclass

import transformers

from tests.model import plain
from tests.model.checkpoints import (
    cohere2,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    granite,
    granite4,
    granitemoe,
    helium,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from tests.model.plain import bloom, falcon, gpt2, gpt_neox, gptj, mpt, opt, xglm


@dataclass(frozen=True)
class Row:
    config: transformers.PretrainedConfig
    ways: tuple[str, ...]  # names of test_parity.WAYS; safetensors is always one of them
    context: int | None = None  # positions served; None: as many as the model was trained on
    trained: int | None = None  # positions that the model must be found to be trained on
    lengths: tuple[int, ...] = (1, 40, 17, 2, 16)  # tokens of the prompts of a ragged batch
    prompt: int = 17  # tokens before a greedy answer
    answer: int = 16  # tokens of it
    tolerance: float = 1e-4  # of any logit


def row(config, *ways, **differs):
    return Row(config, ("safetensors", *ways), **differs)


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 150.0, **parameters}}


ORIGINAL = 16  # positions before any scaling; logits are compared to four times as many or more
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 2.5}
BANDS = {"factor": 8.0, "low_freq_factor": 0.4, "high_freq_factor": 2.0}
SCALED = {"context": 96, "lengths": (75, 3, 1, 40, 66), "prompt": 9}
ALL = ("reference", "cpu", "one call")
WINDOWS = {
    "attention_bias": True,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GATED = {
    "llama": row(llama(), "gguf"),
    "llama-tied": row(llama(tie_word_embeddings=True, num_key_value_heads=1), "gguf", answer=32),
    "llama-biases": row(llama(attention_bias=True, mlp_bias=True, num_key_value_heads=3), "gguf"),
    "llama-multi-head": row(llama(num_key_value_heads=6, head_dim=None), "gguf"),
    "mistral": row(mistral(), "gguf"),
    "mistral-window": row(mistral(sliding_window=7), answer=32),
    "qwen2": row(qwen2(), "gguf"),
    "qwen2-tied": row(qwen2(tie_word_embeddings=True, num_key_value_heads=2), "gguf"),
    "qwen2-windows": row(
        qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1), answer=32
    ),
    "qwen3": row(qwen3(), "gguf"),
    "qwen3-biases-windows": row(qwen3(**WINDOWS), answer=32),
    "llama-linear": row(llama(**rope("linear", factor=3.0)), "gguf", **SCALED),
    "llama-llama3": row(
        llama(**rope("llama3", **BANDS, original_max_position_embeddings=ORIGINAL), head_dim=16),
        "gguf",
        **SCALED,
    ),
    "llama-yarn-weights": row(
        llama(**rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.2)), **SCALED
    ),
    "llama-proportional": row(
        llama(**rope("proportional", partial_rotary_factor=0.5, factor=2.0)), **SCALED
    ),
    "mistral-yarn-window": row(
        mistral(**rope("yarn", **YARN), sliding_window=19), answer=32, **SCALED
    ),
    "qwen2-yarn-recipe": row(
        qwen2(**rope("yarn", **YARN), max_position_embeddings=ORIGINAL), "gguf", **SCALED
    ),
    "qwen3-yarn-said": row(
        qwen3(**rope("yarn", **YARN, attention_factor=1.3, truncate=False)), **SCALED
    ),
    "phi3": row(phi3(), "gguf", **SCALED),
    "phi3-window-tied": row(
        phi3(sliding_window=18, tie_word_embeddings=True, num_key_value_heads=6),
        "gguf",
        answer=32,
        **SCALED,
    ),
    "phi3-partial": row(
        phi3(**rope("default", partial_rotary_factor=0.5), num_key_value_heads=1), "gguf", **SCALED
    ),
    "ernie4_5": row(ernie4_5(), "gguf"),
    "ernie4_5-biases": row(ernie4_5(use_bias=True, tie_word_embeddings=False), "gguf"),
    "ernie4_5-llama3": row(
        ernie4_5(**rope("llama3", **BANDS, original_max_position_embeddings=ORIGINAL)), **SCALED
    ),
    "glm4": row(glm4(), "gguf"),
    "glm4-tied-no-biases": row(glm4(attention_bias=False, tie_word_embeddings=True), "gguf"),
    "glm4-yarn": row(glm4(**rope("yarn", **YARN, partial_rotary_factor=0.25)), **SCALED),
    "helium": row(helium()),
    "ministral3": row(ministral3(), "gguf", *ALL, answer=32, **SCALED),
    "ministral3-window-tied": row(
        ministral3(sliding_window=21, tie_word_embeddings=True, num_key_value_heads=6), **SCALED
    ),
    "helium-biases": row(helium(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "smollm3": row(smollm3(), "gguf", answer=32, **SCALED),
    "smollm3-named-layers": row(
        smollm3(no_rope_layers=[0, 1, 0, 0, 1], tie_word_embeddings=False), **SCALED
    ),
    "smollm3-interval-windows": row(
        smollm3(
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=17,
            attention_bias=True,
            mlp_bias=True,
            num_key_value_heads=5,
        ),
        **SCALED,
    ),
    "smollm3-yarn": row(smollm3(**rope("yarn", **YARN)), **SCALED),
    "smollm3-unrotated": row(smollm3(no_rope_layers=[0] * 5), **SCALED),
    "exaone4": row(exaone4(), "gguf", *ALL, answer=32, **SCALED),
    "exaone4-full-scaled": row(
        exaone4(
            **rope("llama3", **BANDS, original_max_position_embeddings=ORIGINAL),
            sliding_window=None,
            sliding_window_pattern=None,
            layer_types=["full_attention"] * 4,
            tie_word_embeddings=True,
            head_dim=8,
        ),
        "gguf",
        **SCALED,
    ),
    "olmo3": row(olmo3(), "gguf", *ALL, answer=32, **SCALED),
    "granite4": row(granite4(), *ALL, answer=32),
    "granite4-unrotated": row(
        granite4(position_embedding_type=None, attention_bias=True, tie_word_embeddings=True)
    ),
    "cohere2": row(cohere2(), "gguf", *ALL, answer=32),
    "cohere2-biases-untied": row(
        cohere2(attention_bias=True, tie_word_embeddings=False, num_key_value_heads=None),
        "one call",
    ),
    "gemma": row(gemma(), "gguf", answer=32),
    "gemma-biases-untied": row(
        gemma(attention_bias=True, tie_word_embeddings=False, hidden_act="gelu"), *ALL
    ),
    "gemma2": row(gemma2(), "gguf", *ALL, answer=32),
    "gemma2-biases-untied-uncapped": row(
        gemma2(
            attention_bias=True,
            tie_word_embeddings=False,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
        "one call",
    ),
    "gemma3": row(gemma3(), "gguf", *ALL, answer=32, **SCALED),
    "gemma3-biases-untied-scale": row(
        gemma3(attention_bias=True, tie_word_embeddings=False, query_pre_attn_scalar=9), **SCALED
    ),
    "granite": row(granite(), "gguf", *ALL, answer=32),
    "granite-biases-tied-scaled": row(
        granite(
            **rope("yarn", **YARN),
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            head_dim=10,
        ),
        "one call",
        **SCALED,
    ),
    "olmoe": row(olmoe(), "gguf", *ALL, answer=32),
    "olmoe-all-normalized": row(olmoe(norm_topk_prob=True, num_experts_per_tok=7), "one call"),
    "qwen3-moe": row(qwen3_moe(), "gguf", *ALL, answer=32),
    "qwen3-moe-one": row(qwen3_moe(norm_topk_prob=False, num_experts_per_tok=1), "one call"),
    "mixtral": row(mixtral(), *ALL),
    "granitemoe": row(granitemoe(), "gguf", *ALL, answer=32),
    "olmo2": row(olmo2(), "gguf", *ALL, answer=32),
    "olmo2-biases-tied-scaled": row(
        olmo2(
            **rope("yarn", **YARN),
            attention_bias=True,
            tie_word_embeddings=True,
            num_key_value_heads=6,
        ),
        "one call",
        **SCALED,
    ),
}

PLAIN = {"context": 256, "lengths": (1, 160, 17, 2, 64), "tolerance": 2e-4}
LAYER_NORMS = {
    "bloom": row(bloom(), *ALL, answer=32, **PLAIN),
    "bloom-eight-heads": row(
        bloom(n_head=4, n_layer=1, tie_word_embeddings=False), "one call", **PLAIN
    ),
    "mpt": row(mpt(), "one call", answer=32, **PLAIN),
    "mpt-bias-max": row(
        mpt({"alibi_bias_max": 5, "clip_qkv": 0.6, "softmax_scale": 0.4}), "one call", **PLAIN
    ),
    "falcon": row(falcon(), *ALL, answer=32, **PLAIN),
    "falcon-no-bias": row(
        falcon(bias=False, num_attention_heads=8, ffn_hidden_size=50), "one call", **PLAIN
    ),
    "gpt2": row(gpt2(), *ALL, answer=32, **PLAIN),
    "gpt2-inner": row(
        gpt2(n_inner=50, scale_attn_weights=False, activation_function="relu"), "one call", **PLAIN
    ),
    "gpt2-untied": row(gpt2(n_head=1, tie_word_embeddings=False), "one call", **PLAIN),
    "gpt2-other-inner": row(gpt2(n_inner=50), "gguf", trained=160, **PLAIN),
    "gpt2-untied-other-inner": row(
        gpt2(n_inner=50, tie_word_embeddings=False), "gguf", trained=160, **PLAIN
    ),
    "opt": row(opt(), "one call", answer=32, **PLAIN),
    "opt-350m": row(opt(do_layer_norm_before=False, word_embed_proj_dim=20), **PLAIN),
    "opt-no-bias": row(opt(enable_bias=False, activation_function="gelu"), "one call", **PLAIN),
    "xglm": row(xglm(), *ALL, answer=32, **PLAIN),
    "xglm-unscaled": row(xglm(scale_embedding=False, attention_heads=2), "one call", **PLAIN),
    "gpt-neox": row(gpt_neox(), "one call", answer=32, **PLAIN),
    "gpt-neox-sequential": row(
        gpt_neox(use_parallel_residual=False, hidden_act="gelu_new"), "one call", **PLAIN
    ),
    "gpt-neox-no-bias": row(
        gpt_neox(attention_bias=False, num_attention_heads=6), "one call", **PLAIN
    ),
    "starcoder2": row(starcoder2(), "gguf", *ALL, answer=32, **PLAIN),
    "starcoder2-window-untied": row(
        starcoder2(sliding_window=7, tie_word_embeddings=False, use_bias=False), "one call", **PLAIN
    ),
    "gptj": row(gptj(), *ALL, answer=32, **PLAIN),
    "gptj-whole-head": row(gptj(rotary_dim=16, n_inner=50), "one call", **PLAIN),
}

# Far past the trained length: answers begin within it and end outside.
TRAINED = 40
FAR = {"trained": TRAINED, "lengths": (1, 4 * TRAINED + 3, 17, 2, TRAINED), "prompt": TRAINED - 7}
ALIBI = {"context": 400, **FAR}
PARALLEL = {"context": 4 * TRAINED + 8, **FAR}


def trained_bloom(**changes):
    return plain.bloom(**{"seq_length": TRAINED} | changes)


def trained_mpt(attn_config=None, **changes):
    return plain.mpt(attn_config, **{"max_seq_len": TRAINED} | changes)


def trained_falcon(**changes):
    return plain.falcon(**{"max_position_embeddings": TRAINED} | changes)


def trained_neox(*, share=0.25, scaling=None, **changes):
    """share: how much of each head turns."""
    turned = {"rope_type": "default", "rope_theta": 1234.0, "partial_rotary_factor": share}
    usual = {"max_position_embeddings": TRAINED, "rope_parameters": turned | (scaling or {})}
    return plain.gpt_neox(**usual | changes)


def trained_gptj(**changes):
    return plain.gptj(**{"n_positions": TRAINED} | changes)


BEYOND = {
    "bloom-12-heads": row(trained_bloom(n_head=12), "gguf", "cpu", answer=32, **ALIBI),
    "bloom-5-odd-heads": row(trained_bloom(n_head=5, hidden_size=35, n_layer=1), "gguf", **ALIBI),
    "bloom-16-heads-untied": row(
        trained_bloom(n_head=16, hidden_size=64, tie_word_embeddings=False), "gguf", **ALIBI
    ),
    "bloom-1-head": row(
        trained_bloom(n_head=1, hidden_size=10, layer_norm_epsilon=1e-3), "gguf", **ALIBI
    ),
    "mpt-6-odd-heads": row(
        trained_mpt(n_heads=6, d_model=30, n_layers=1), "gguf", answer=32, **ALIBI
    ),
    "mpt-8-heads-untied": row(
        trained_mpt(n_heads=8, d_model=32, tie_word_embeddings=False), "gguf", **ALIBI
    ),
    "mpt-7-heads-clipped": row(
        trained_mpt({"clip_qkv": 0.7, "softmax_scale": 0.6}, n_heads=7, d_model=42), "cpu", **ALIBI
    ),
    "mpt-clipped": row(trained_mpt({"clip_qkv": 0.5}), "gguf", **ALIBI),
    "mpt-5-heads-steep": row(
        trained_mpt({"alibi_bias_max": 16}, n_heads=5, d_model=40), "gguf", **ALIBI
    ),
    "falcon-12-heads": row(trained_falcon(num_attention_heads=12), "cpu", **ALIBI),
    "falcon-5-heads": row(
        trained_falcon(num_attention_heads=5, hidden_size=50, num_hidden_layers=1), **ALIBI
    ),
    "falcon-8-heads-untied": row(
        trained_falcon(
            num_attention_heads=8, tie_word_embeddings=False, bias=False, activation="relu"
        ),
        answer=32,
        **ALIBI,
    ),
    "neox-odd-heads": row(
        trained_neox(hidden_size=45, share=0.4, intermediate_size=31),
        "gguf",
        "cpu",
        answer=48,
        **PARALLEL,
    ),
    "neox-one-head": row(
        trained_neox(hidden_size=22, num_attention_heads=1, share=1.0, hidden_act="relu"),
        **PARALLEL,
    ),
    "neox-sequential": row(
        trained_neox(use_parallel_residual=False, hidden_act="gelu_fast", share=0.5),
        "cpu",
        **PARALLEL,
    ),
    "neox-sequential-6-heads": row(  # with the activation that the format stands for
        trained_neox(use_parallel_residual=False, share=0.5, num_attention_heads=6),
        "gguf",
        **PARALLEL,
    ),
    "neox-no-bias": row(
        trained_neox(attention_bias=False, num_attention_heads=12, share=0.5), **PARALLEL
    ),
    "neox-tied": row(
        trained_neox(tie_word_embeddings=True, num_hidden_layers=1, layer_norm_eps=1e-3),
        "gguf",
        **PARALLEL,
    ),
    "neox-linear": row(
        trained_neox(share=0.75, scaling={"rope_type": "linear", "factor": 3.0}), **PARALLEL
    ),
    "neox-yarn": row(
        trained_neox(
            share=0.5,
            scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": TRAINED,
            },
        ),
        **PARALLEL,
    ),
    "gptj-one-pair": row(trained_gptj(rotary_dim=2, num_hidden_layers=1, n_inner=31), **PARALLEL),
    "gptj-one-head": row(
        trained_gptj(n_embd=22, n_head=1, rotary_dim=22, activation_function="relu"), **PARALLEL
    ),
    "gptj-odd-heads": row(
        trained_gptj(n_embd=45, rotary_dim=14, layer_norm_epsilon=1e-3),
        "gguf",
        "cpu",
        answer=48,
        **PARALLEL,
    ),
    "gptj-many-heads": row(
        trained_gptj(n_head=8, rotary_dim=4, activation_function="gelu"), **PARALLEL
    ),
    "gptj-tied": row(trained_gptj(tie_word_embeddings=True), "gguf", **PARALLEL),
}

FAMILIES = GATED | LAYER_NORMS | BEYOND
