"""RoPE against the rotations of transformers; and keys that stay as they were written."""

import pytest
import torch
from transformers import GPTJConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from model.encodings.base import EncodingError, EncodingSpec, create
from model.encodings.rope import RoPE
from tests.model.tiny import CONFIG, CPU, ROPE

POSITIONS = torch.tensor([0, 1, 7, 130, 4000])


def made(width=8, layout="half", base=10000.0, context=5000):
    return RoPE(base=base, width=width, layout=layout, context=context, device=CPU)


def heads(dim, count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dim)
    shape = (len(POSITIONS), count, dim)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_half_split_equals_llama(base):
    q, k = heads(64)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=5000,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, POSITIONS[None])
    theirs = modeling_llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    ours = made(64, base=base).rotate(q, k, POSITIONS)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b[0].transpose(0, 1), atol=1e-6)


def test_interleaved_equals_gptj():
    config = GPTJConfig(n_positions=5000, n_embd=64, n_head=1, rotary_dim=16)
    q, k = heads(64)
    table = modeling_gptj.create_sinusoidal_positions(config.n_positions, 16)
    sin, cos = table[POSITIONS][None].split(8, dim=-1)
    for ours, x in zip(made(16, "interleaved").rotate(q, k, POSITIONS), (q, k), strict=True):
        theirs = modeling_gptj.apply_rotary_pos_emb(x[None, ..., :16], sin, cos)[0]
        assert torch.allclose(ours[..., :16], theirs, atol=2e-3)  # their angles round differently
        assert torch.equal(ours[..., 16:], x[..., 16:])


def test_partial_width_equals_gpt_neox():
    config = GPTNeoXConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=5000,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    q, k = heads(64)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, POSITIONS[None])
    theirs = modeling_gpt_neox.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    for a, b in zip(made(16).rotate(q, k, POSITIONS), theirs, strict=True):
        assert torch.allclose(a, b[0].transpose(0, 1), atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_appending_changes_no_earlier_key(layout):
    """Bit by bit: a key's rotation depends on its own position alone."""
    rope = made(layout=layout)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(60, 2, 8, generator=generator).bfloat16()
    positions = torch.arange(60)
    _, whole = rope.rotate(keys, keys, positions)
    for length in (1, 17, 59):
        _, part = rope.rotate(keys[:length], keys[:length], positions[:length])
        assert torch.equal(part, whole[:length])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_distance(layout):
    q, k = heads(8, dtype=torch.float64)
    rope = made(layout=layout)

    def score(at, distance):
        one = torch.full((len(POSITIONS),), at)
        turned = rope.rotate(q, k, one + distance)[0], rope.rotate(q, k, one)[1]
        return (turned[0] * turned[1]).sum(-1)

    assert (score(0, 5) - score(100, 5)).abs().max() < 1e-4  # angles are float32
    assert (score(0, 5) - score(0, 6)).abs().max() > 1e-2


def test_tables_stay_float32_when_the_model_is_cast():
    rope = made().bfloat16()
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    exact = torch.cos(4000 * 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64))
    assert (rope.cos[4000] - exact).abs().max() < 3e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": 0.0}, "a base above 0"),
        ({"width": 7}, "an even width"),
        ({"width": 10}, "of at most head_dim 8"),
        ({"layout": "sideways"}, "half or interleaved"),
        ({"factor": 2.0}, "takes the options base, width and layout"),
    ],
)
def test_options_are_checked(changes, words):
    with pytest.raises(EncodingError, match=words):
        create(EncodingSpec("rope", ROPE | changes), CONFIG, 10, CPU)


def test_no_option_has_a_default():
    with pytest.raises(EncodingError):
        create(EncodingSpec("rope", {"base": 10000.0, "width": 8}), CONFIG, 10, CPU)
