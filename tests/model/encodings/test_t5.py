"""T5's bias against the buckets of transformers, at every distance; tables that end early."""

from dataclasses import replace

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, create
from ropewalk.model.encodings.t5 import T5
from tests.model.tiny import CONFIG, CPU

DISTANCES = torch.arange(-2000, 2001)
SHAPES = [(32, 128), (32, 20), (12, 64), (33, 100), (7, 1000), (4, 3), (64, 513), (6, 2048)]


def made(buckets=32, max_distance=128, context=4096, heads=3, **options):
    """With random weights, frozen as after loading."""
    spec = EncodingSpec("t5", {"buckets": buckets, "max_distance": max_distance, **options})
    encoding = create(spec, replace(CONFIG, num_heads=heads), context, CPU)
    generator = torch.Generator().manual_seed(buckets)
    for module in encoding.modules():
        if isinstance(module, T5):
            for parameter in module.parameters(recurse=False):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            module.freeze()
    return encoding


def theirs(weight, distances, *, bidirectional, max_distance):
    """[heads, distances]: distance is query - key, the opposite of theirs."""
    buckets = T5Attention._relative_position_bucket(
        -distances, bidirectional=bidirectional, num_buckets=len(weight), max_distance=max_distance
    )
    return weight[buckets].T


@pytest.mark.parametrize(("buckets", "max_distance"), SHAPES)
def test_two_way_table_equals_transformers(buckets, max_distance):
    ours = made(buckets, max_distance, bidirectional=True)
    expected = theirs(ours.weight, DISTANCES, bidirectional=True, max_distance=max_distance)
    assert torch.equal(ours.score_bias().at(DISTANCES), expected)


@pytest.mark.parametrize(("buckets", "max_distance"), SHAPES)
def test_causal_table_equals_transformers_but_for_a_constant(buckets, max_distance):
    """Less the last bucket's bias, to one rounding; keys after the query are never seen."""
    ours = made(buckets, max_distance)
    past = DISTANCES[DISTANCES >= 0]
    expected = theirs(ours.weight, past, bidirectional=False, max_distance=max_distance)
    expected = expected.double() - ours.weight[-1].double()[:, None]
    assert torch.equal(ours.score_bias().at(past), expected.float())


def test_the_table_ends_where_the_bias_stays_the_same():
    causal, two_way = made().score_bias(), made(bidirectional=True).score_bias()
    assert (causal.table.shape, causal.zero) == ((3, 114), 0)
    assert not causal.table[:, -1].any()
    assert causal.table[:, -2].all()
    # 16 buckets each way end at 91.
    assert (two_way.table.shape, two_way.zero) == ((3, 183), 91)


@pytest.mark.parametrize("form", ["table", "materialised"])
def test_other_forms_keep_the_last_bucket(form):
    """All of transformers' values; softmax ignores by how much the window form is lower."""
    ours, window = made(form=form), made()
    past = DISTANCES[DISTANCES >= 0]
    values = ours.score_bias().at(past)
    assert torch.equal(values, theirs(ours.weight, past, bidirectional=False, max_distance=128))
    lower = values - window.score_bias().at(past)
    assert (lower - ours.weight[-1][:, None]).abs().max() < 1e-6
    assert ours.weight[-1].abs().min() > 0.01


def test_a_two_way_table_is_in_the_table_form():
    default, asked = (made(bidirectional=True, **more) for more in ({}, {"form": "table"}))
    assert torch.equal(default.score_bias().table, asked.score_bias().table)
    spread = made(bidirectional=True, form="materialised").score_bias()
    assert torch.equal(spread.at(DISTANCES), asked.score_bias().at(DISTANCES))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_short_context_cuts_the_table_and_no_value(bidirectional):
    distances = torch.arange(-9 if bidirectional else 0, 10)
    short, full = (
        made(context=context, bidirectional=bidirectional).score_bias() for context in (10, 4096)
    )
    assert short.table.shape[1] == len(distances)
    assert torch.equal(short.at(distances), full.at(distances))


def test_work_is_bounded_by_the_last_bucket():
    """Keys from distance 113 on add zero; each layer reads the table, which all share."""
    config = replace(CONFIG, num_heads=3)
    near, far = made().work(config, 50, 16), made().work(config, 100_000, 16)
    assert (near.bias_values, near.flops, near.bytes) == (3 * 3 * 50,) * 2 + (3 * 50 * 4,)
    assert (far.bias_values, far.bytes) == (3 * 3 * 113, 3 * 113 * 4)
    assert made(per_layer=True).work(config, 50, 16).bytes == 3 * near.bytes
    two_way = made(bidirectional=True).work(config, 1000, 16)
    assert (two_way.bias_values, two_way.bytes) == (3 * 3 * 1000, 3 * 183 * 4)


def test_work_of_the_other_forms_grows_with_the_context():
    """Every key pays an add; the dense bias is written once and read by each of 3 layers."""
    config = replace(CONFIG, num_heads=3)
    table, dense = (made(form=form).work(config, 1000, 16) for form in ("table", "materialised"))
    assert (table.bias_values, table.flops) == (dense.bias_values, dense.flops) == (9000, 9000)
    assert (table.bias_built, table.bytes) == (0, 4 * 3 * 114)
    assert (dense.bias_built, dense.bytes) == (3000, 4 * (3 * 114 + 3000 + 9000))
    per_layer = made(form="materialised", per_layer=True).work(config, 1000, 16)
    assert per_layer.bias_built == 9000
    assert per_layer.bytes == 4 * (9 * 114 + 9000 + 9000)


def test_all_bytes_are_the_biases():
    for form in ("window", "table", "materialised"):
        work = made(form=form).work(CONFIG, 300, 16)
        assert work.bias_bytes == work.bytes > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"but got \[\]"),
        ({"buckets": 32}, r"but got \['buckets'\]"),
        ({"buckets": 32, "max_distance": 128, "slopes": 3}, "'slopes'"),
        ({"buckets": 1, "max_distance": 128}, "2 buckets or more"),
        ({"buckets": 3, "max_distance": 128, "bidirectional": True}, "4 or more"),
        ({"buckets": 32, "max_distance": 16}, "a max_distance above 16, but got 16"),
        (
            {"buckets": 32, "max_distance": 128, "form": "band"},
            "must be one of window, .* is 'band'",
        ),
        (
            {"buckets": 32, "max_distance": 128, "bidirectional": True, "form": "window"},
            "no window form when bidirectional, .*; use the form table",
        ),
    ],
)
def test_refusals(options, words):
    with pytest.raises(EncodingError, match=words):
        create(EncodingSpec("t5", options), CONFIG, 64, CPU)


def test_a_context_shorter_than_the_last_bucket_is_all_window():
    config = replace(CONFIG, num_heads=3)
    assert made(context=12).work(config, 12, 16).bias_values == CONFIG.num_layers * 3 * 12
