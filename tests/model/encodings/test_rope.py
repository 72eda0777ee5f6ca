"""RoPE's properties, layers, storages and costs; test_parity.py compares it with transformers."""

from dataclasses import replace

import pytest
import torch

from ropewalk.cache.types import Capability, KeyStorage, Op
from ropewalk.model.encodings.base import EncodingError, EncodingSpec, create
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.encodings.rope import RoPE
from tests.model.encodings import rope_properties
from tests.model.encodings.rope_properties import SPAN, WIDTH
from tests.model.tiny import CONFIG, CPU, ROPE

POSITIONS = torch.tensor([0, 1, 7, 130, 4000])
OFFSETS = POSITIONS % 16


def made(width=8, layout="half", base=10000.0, context=5000):
    return RoPE(base=base, width=width, layout=layout, context=context, device=CPU)


def heads(dim, count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dim)
    shape = (len(POSITIONS), count, dim)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))


STRETCHED = {"factor": 4.0, "original_context": 16}
VARIANTS = {
    "plain": {},
    "interleaved": {"layout": "interleaved"},
    "partial": {"width": 16},
    "partial-interleaved": {"width": 30, "layout": "interleaved"},
    "linear": {"scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {
        "scaling": {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.0, **STRETCHED}
    },
    "yarn": {"scaling": {"type": "yarn", **STRETCHED}},
    "dynamic": {"scaling": {"type": "dynamic", **STRETCHED}, "layout": "interleaved"},
    "proportional": {"scaling": {"type": "proportional", "share": 0.4}},
    "longrope": {
        "width": 32,
        "scaling": {
            "type": "longrope",
            "short_factors": [1.0] * 16,
            "long_factors": [1.0 + pair for pair in range(16)],
            "original_context": 16,
            "magnitude": 1.0,
        },
    },
}


@pytest.fixture(params=VARIANTS)
def rope(request):
    """Every kind of rotation, over heads of the properties' width."""
    options = {"base": 100.0, "width": WIDTH, "layout": "half", **VARIANTS[request.param]}
    return create(EncodingSpec("rope", options), replace(CONFIG, head_dim=WIDTH), SPAN, CPU)


def on_rows(rope):
    """Queries and keys turn alike, so one head of either will do."""

    def rotate(x, positions):
        q, k = rope.rotate(x[:, None], x[:, None], positions, positions % 16)
        assert torch.equal(q, k)
        return q[:, 0]

    return rotate


def test_norms_grow_by_the_magnitude_alone(rope):
    rope_properties.keeps_norms(on_rows(rope), rope.magnitude)
    rope_properties.keeps_angles(on_rows(rope), rope.magnitude)


def test_scores_depend_on_the_distance_alone(rope):
    rope_properties.depends_on_distance_alone(on_rows(rope))


def test_position_zero_is_the_identity_up_to_the_magnitude(rope):
    scaled = on_rows(rope)
    if rope.magnitude == 1.0:
        rope_properties.leaves_position_zero(scaled)
    else:
        rope_properties.leaves_position_zero(lambda x, at: scaled(x, at) / rope.cos[0, 0].double())
        assert rope.cos[0, 0].item() == pytest.approx(rope.magnitude)


def test_inputs_are_left_as_they_were(rope):
    rope_properties.leaves_its_input(on_rows(rope))


def test_a_token_alone_is_turned_as_among_others(rope):
    rope_properties.decodes_one_at_a_time(on_rows(rope))


def test_layers_that_turn():
    rope = create(EncodingSpec("rope", ROPE | {"layers": [0, 2]}), CONFIG, 16, CPU)
    q, k = heads(8)
    positions = torch.arange(1, 1 + len(POSITIONS))
    assert [rope.rotates(layer) for layer in range(3)] == [True, False, True]
    assert rope.for_layer(0) is rope.for_layer(2) is rope
    still = rope.for_layer(1)
    assert still.rotate(q, k, positions, OFFSETS) == (q, k)
    assert still.score_bias() is None
    everywhere = create(EncodingSpec("rope", ROPE), CONFIG, 16, CPU)
    assert all(everywhere.for_layer(layer) is everywhere for layer in range(3))


def test_layers_that_turn_otherwise():
    """As an encoding of their own would turn them, in every storage; what is fixed is checked."""
    others = {"base": 90.0, "width": 6, "layout": "interleaved"}
    q, k = heads(8)
    positions = torch.arange(1, 1 + len(POSITIONS))
    for storage in KeyStorage:
        options = ROPE | {"layers": [0, 2], "storage": storage}
        rope = create(EncodingSpec("rope", options | {"elsewhere": others}), CONFIG, 16, CPU)
        alone = create(EncodingSpec("rope", others | {"storage": storage}), CONFIG, 16, CPU)
        found = rope.for_layer(1)
        assert found.key_storage is storage and rope.for_layer(0) is rope.for_layer(2) is rope
        expected = alone.rotate(q, k, positions, OFFSETS)
        for one, other in zip(found.rotate(q, k, positions, OFFSETS), expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(found.shift(k, 3), alone.shift(k, 3))
        told = rope.fixed_tensors()
        assert all(
            torch.equal(told[f"elsewhere.{name}"], tensor)
            for name, tensor in alone.fixed_tensors().items()
        )


def test_work_is_the_same_at_every_length():
    """Six query and two key heads turn 3 pairs in each of 2 layers; one row of both tables."""
    options = ROPE | {"width": 6, "layers": [0, 2]}
    rope = create(EncodingSpec("rope", options), CONFIG, 16, CPU)
    assert rope.work(CONFIG, 1, 16) == rope.work(CONFIG, 100_000, 16)
    assert rope.work(CONFIG, 9, 16) == PositionalWork(
        rotations=2 * (6 + 2), flops=2 * (6 + 2) * 3 * 6, bytes=2 * 3 * 4
    )
    still = create(EncodingSpec("rope", ROPE | {"layers": []}), CONFIG, 16, CPU)
    assert still.work(CONFIG, 9, 16) == PositionalWork()
    others = {"elsewhere": ROPE | {"width": 2}}
    both = create(EncodingSpec("rope", options | others), CONFIG, 16, CPU)
    assert both.work(CONFIG, 9, 16) == rope.work(CONFIG, 9, 16) + PositionalWork(
        rotations=6 + 2, flops=(6 + 2) * 3 * 2, bytes=2 * 4
    )


def test_work_by_storage():
    """40 keys in blocks of 16: the query turns once for each, or every key once more."""

    def work(storage):
        rope = create(
            EncodingSpec("rope", ROPE | {"storage": storage, "layers": [1]}), CONFIG, 16, CPU
        )
        return rope.work(CONFIG, 40, 16)

    assert work("absolute").rotations == 6 + 2
    assert work("raw") == PositionalWork(
        rotations=6 + 2 * 40, flops=(6 + 2 * 40) * 3 * 8, bytes=40 * 8 * 4
    )
    assert work("block") == PositionalWork(
        rotations=6 * 3 + 2, flops=(6 * 3 + 2) * 3 * 8, bytes=4 * 8 * 4
    )


def test_far_keys_are_as_if_they_were_nearer():
    """From the last of ten tokens, groups of 2 and a near distance of 4, as Self-Extend has it."""

    def distances(**options):
        rotation = create(EncodingSpec("rope", ROPE | options), CONFIG, 10, CPU).rotation()
        assert rotation.storage is KeyStorage.RAW
        at, keys, far = torch.tensor([9]), torch.arange(10), rotation.far
        seen = torch.where(far.between(at, keys)[0], far.queries[9] - far.keys, 9 - keys)
        return seen.tolist()

    assert distances(near=4, group=2) == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    assert distances(near=4) == [4, 4, 4, 4, 4, 4, 3, 2, 1, 0]
    assert distances(near=3, group=1) == [*range(9, -1, -1)]
    assert distances(near=30, group=2) == [*range(9, -1, -1)]


def test_far_keys_cost_another_query():
    near, far = (
        create(EncodingSpec("rope", ROPE | options), CONFIG, 16, CPU).work(CONFIG, 40, 16)
        for options in ({"storage": "raw"}, {"near": 4, "group": 2})
    )
    assert (far.rotations, far.flops) == (near.rotations + 3 * 6, near.flops + 3 * 6 * 3 * 8)
    assert far.bytes == near.bytes + 8 * 4


def test_work_within_windows():
    """Of 40 keys, layer 1 sees 20 and the others all."""
    config = replace(CONFIG, windows=(None, 20, 100))

    def rotations(storage):
        options = ROPE | {"storage": storage, "layers": [0, 1]}
        rope = create(EncodingSpec("rope", options), config, 16, CPU)
        return rope.work(config, 40, 16).rotations

    assert rotations("absolute") == 2 * (6 + 2)
    assert rotations("raw") == 2 * 6 + 2 * (40 + 20)
    assert rotations("block") == 6 * (3 + 2) + 2 * 2
    alibi = create(EncodingSpec("alibi", {}), config, 16, CPU)
    assert alibi.work(config, 40, 16).bias_values == 6 * (40 + 20 + 40)


def test_what_moves_cost_by_storage():
    for storage in KeyStorage:
        rope = create(EncodingSpec("rope", ROPE | {"storage": storage}), CONFIG, 16, CPU)
        assert rope.key_storage is storage
        free = storage is not KeyStorage.ABSOLUTE
        for op in (Op.EVICT_RENUMBER, Op.MOVE_SPAN):
            assert (rope.capability(op, torch.float32) is Capability.FREE) == free
            rounds = Capability.FREE if free else Capability.APPROXIMATE
            assert rope.capability(op, torch.int8) is rope.capability(op, torch.bfloat16) is rounds
        assert (rope.rotation() is None) == (not free)
        assert rope.for_layer(0) is rope
    mixed = create(EncodingSpec("rope", ROPE | {"storage": "raw", "layers": [0]}), CONFIG, 16, CPU)
    assert mixed.for_layer(1).rotation() is None


def test_angles_of_a_block_are_exact_and_others_rounded_as_published():
    """At position 4,000 the fastest pair's float32 angle may be off by 1e-4."""
    exact = torch.cos(4000 * made().frequencies.double())
    block = RoPE(
        base=1e4, width=8, layout="half", context=5000, device=CPU, storage=KeyStorage.BLOCK
    )
    assert (block.cos[4000] - exact).abs().max() < 1e-7
    assert torch.equal(made().cos[4000], torch.cos(4000 * made().frequencies))


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
        ({"factor": 2.0}, "takes the options base, width and layout, and optionally scaling"),
        ({"layers": [0, 3]}, r"indices from 0 to 2, but are \[0, 3\]"),
        ({"scaling": {"type": "ntk"}}, "'ntk'"),
        ({"elsewhere": ROPE}, "elsewhere needs layers"),
        ({"layers": [0], "elsewhere": ROPE | {"storage": "raw"}}, "has itself only base, width"),
        ({"layers": [0], "elsewhere": {"base": 5.0}}, "has itself only base, width"),
        ({"layers": [0], "elsewhere": [1]}, r"but is \[1\]"),
        ({"group": 4}, "set near as well"),
        ({"near": 0}, "near must be an integer from 1 to"),
        ({"near": 8, "group": 1.5}, "group must be an integer from 1 to"),
        ({"near": 8, "storage": "block"}, "leave storage out, or set it to raw instead of block"),
        ({"layers": [0], "elsewhere": ROPE | {"near": 8}}, "has itself only base, width"),
        ({"storage": "page"}, "storage must be one of absolute, raw, block, but is 'page'"),
    ],
)
def test_options_are_checked(changes, words):
    with pytest.raises(EncodingError, match=words):
        create(EncodingSpec("rope", ROPE | changes), CONFIG, 10, CPU)


def test_no_option_has_a_default():
    with pytest.raises(EncodingError):
        create(EncodingSpec("rope", {"base": 10000.0, "width": 8}), CONFIG, 10, CPU)
