"""Several positions for each token, against the rotations of transformers' vision models."""

import pytest
import torch
from transformers import Qwen2VLTextConfig
from transformers.models.llama4 import modeling_llama4
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.pixtral import modeling_pixtral
from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.encodings.common.rope_scaling import Yarn, frequencies
from ropewalk.model.encodings.common.rotation_axes import axial, dealt, grid_positions, sectioned
from ropewalk.model.encodings.rope import RoPE
from tests.model.tiny import CPU

ROWS, COLUMNS = 5, 7
GRID = grid_positions(ROWS, COLUMNS)


def heads(width, count=3, tokens=ROWS * COLUMNS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(width)
    return tuple(
        torch.randn(tokens, count, width, generator=generator, dtype=dtype) for _ in range(2)
    )


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_grid_positions_are_row_and_column():
    assert grid_positions(2, 3).tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("width", [16, 40])
def test_axial_equals_the_vision_tower_of_qwen2_vl(width):
    config = Qwen2VLVisionConfig(embed_dim=2 * width, num_heads=2)
    q, k = heads(width)
    cos, sin = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(q, GRID.t())
    theirs = modeling_qwen2_vl.apply_rotary_pos_emb_vision(q, k, cos, sin)
    base = config.rope_parameters["rope_theta"]
    close(axial(base, width).rotate(q, k, GRID), theirs)


@pytest.mark.parametrize("width", [16, 24])
def test_dealt_equals_pixtral(width):
    config = PixtralVisionConfig(hidden_size=2 * width, num_attention_heads=2)
    q, k = heads(width)
    cos, sin = modeling_pixtral.PixtralVisionRotaryEmbedding(config)(q, GRID.t())
    theirs = modeling_pixtral.apply_rotary_pos_emb(q, k, cos, sin)
    base = config.rope_parameters["rope_theta"]
    close(dealt(base, width).rotate(q, k, GRID), theirs)


def test_interleaved_axial_equals_the_vision_tower_of_llama4():
    """Its first axis is the column, and it counts from 1; its last token has no place."""
    width = 16
    config = Llama4VisionConfig(
        hidden_size=2 * width, num_attention_heads=2, image_size=6 * 14, patch_size=14
    )
    q, k = heads(width, tokens=36)
    turns = modeling_llama4.Llama4VisionRotaryEmbedding(config)(q)[:-1]
    theirs = modeling_llama4.vision_apply_rotary_emb(q[None], k[None], turns)
    base = config.rope_parameters["rope_theta"]
    positions = grid_positions(6, 6).flip(0) + 1
    ours = axial(base, width, layout="interleaved").rotate(q, k, positions)
    close(ours, [each[0] for each in theirs])


# A text, then an image of 2 by 3 patches, then a text: time, height, width.
MIXED = torch.tensor(
    [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 900],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 900],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 900],
    ]
)


@pytest.mark.parametrize("sections", [[4, 6, 6], [2, 3, 3, 2, 3, 3], [16, 0, 0]])
def test_sections_equal_qwen2_vl(sections):
    config = Qwen2VLTextConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    )
    q, k = heads(32, tokens=12)
    cos, sin = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, MIXED[:, None])
    theirs = modeling_qwen2_vl.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    ours = sectioned(frequencies(1e6, 32), sections).rotate(q, k, MIXED)
    close(ours, [each[0].transpose(0, 1) for each in theirs])


def test_a_text_is_rope():
    """All axes alike: what is cached for text is what serving by one axis would cache."""
    rope = RoPE(
        base=1e6,
        width=16,
        layout="half",
        context=100,
        device=CPU,
        scaling=Yarn(factor=4.0, original_context=32),
    )
    q, k = heads(20, tokens=100)
    positions = torch.arange(100)
    rotation = sectioned(rope.frequencies, [2, 3, 3], magnitude=rope.magnitude)
    for ours, expected in zip(
        rotation.rotate(q, k, positions.expand(3, -1)),
        rope.rotate(q, k, positions, positions),
        strict=True,
    ):
        assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize(
    "rotation",
    [
        axial(100.0, 16),
        axial(100.0, 24, axes=3),
        axial(100.0, 16, layout="interleaved"),
        dealt(100.0, 16),
        sectioned(frequencies(100.0, 16), [3, 5], axes=2),
    ],
)
def test_scores_depend_on_the_offset_along_each_axis(rotation):
    axes = int(rotation.axes.max()) + 1
    width = 2 * len(rotation.frequencies)
    q, k = heads(width, tokens=40, dtype=torch.float64)
    offset = torch.tensor([[3], [-2], [5]])[:axes]

    def scores(at, offset):
        here = torch.tensor([[20], [30], [10]])[:axes] + at
        turned = rotation.rotate(q, k, (here + offset).expand(-1, 40))[0]
        other = rotation.rotate(q, k, here.expand(-1, 40))[1]
        return (turned * other).sum(-1)

    for axis in range(axes):
        moved = torch.zeros(axes, 1, dtype=torch.int64)
        moved[axis] = 17
        assert (scores(0, offset) - scores(moved, offset)).abs().max() < 1e-4
        further = offset.clone()
        further[axis] += 1
        assert (scores(0, offset) - scores(0, further)).abs().max() > 1e-2
    turned, _ = rotation.rotate(q, k, torch.arange(40).expand(axes, -1))
    assert torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-6)
    assert torch.equal(turned[0], q[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: axial(100.0, 10), "10 coordinates cannot form equally many pairs for 2 axes"),
        (lambda: dealt(100.0, 16, axes=3), "pairs for 3 axes"),
        (lambda: axial(100.0, 0), "0 coordinates"),
        (lambda: sectioned(frequencies(100.0, 16), [4, 3]), "do not add up to the head's 8"),
        (lambda: sectioned(frequencies(100.0, 16), [9, -1]), "do not add up"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(EncodingError, match=words):
        make()
