"""ALiBi's slopes and biases against transformers, for many head counts."""

from dataclasses import replace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.alibi import slopes
from ropewalk.model.encodings.base import EncodingError, KeyBias, LinearBias, create
from tests.model.running import run_uncached
from tests.model.tiny import CONFIG, CPU, ENCODINGS, tiny
from tests.products import pairs

HEADS = [1, 2, 3, 5, 6, 8, 12, 16, 17, 31, 40, 64, 71, 96, 112]
# transformers takes powers of a rounded base, or divides by powers: a few units in the last place.
RELATIVE = 1e-5


def made(heads=8, context=2048, config=CONFIG, **options):
    return create(EncodingSpec("alibi", options), replace(config, num_heads=heads), context, CPU)


def bias(encoding, query, keys):
    """[heads, keys] for one query."""
    return encoding.score_bias().between(torch.tensor([query]), keys)[:, 0]


def distinct(values):
    """For each row, how many values."""
    return [len(row.unique()) for row in values]


# -------------------------------------------------------------------------------- slopes


@pytest.mark.parametrize("heads", HEADS)
def test_values_and_order_of_bloom_and_falcon(heads):
    """Their tensors are slope · position of the key; at position 1 the slope itself."""
    theirs = bloom_alibi(torch.ones(1, 3, dtype=torch.long), heads, torch.float32)[:, 0]
    torch.testing.assert_close(slopes(heads), theirs[:, 1], rtol=RELATIVE, atol=0)
    rounded = falcon_alibi(torch.ones(1, 3, dtype=torch.long), heads, torch.float32)[:, 0]
    assert torch.equal(slopes(heads).bfloat16().float(), rounded[:, 1])


@pytest.mark.parametrize("bias_max", [8, 4, 16, 5])
@pytest.mark.parametrize("heads", HEADS)
def test_values_and_order_of_mpt(heads, bias_max):
    theirs = mpt_alibi(heads, 3, bias_max)[:, 0]  # distances 2, 1, 0
    torch.testing.assert_close(slopes(heads, bias_max), -theirs[:, 1], rtol=RELATIVE, atol=0)


# ------------------------------------------------------------------------------ the bias


def test_the_bias_is_linear_in_the_distance_whatever_the_model_is_cast_to():
    encoding = made().to(torch.bfloat16)
    found = encoding.score_bias()
    assert isinstance(found, LinearBias)
    assert found.slopes.dtype is torch.float32
    assert bias(encoding, 7, torch.tensor([7, 6, 3]))[0].tolist() == [0, -0.5, -2.0]


@pytest.mark.parametrize("options", [{}, {"hf_exact": True}])
def test_scaled_like_the_scores(options):
    keys = torch.arange(50)
    plain = bias(made(**options), 49, keys)
    ours = bias(made(scaled=True, **options), 49, keys)
    torch.testing.assert_close(ours, plain * CONFIG.head_dim**-0.5)
    other = made(scaled=True, config=replace(CONFIG, attention_scale=0.25), **options)
    torch.testing.assert_close(bias(other, 49, keys), plain * 0.25)


@pytest.mark.parametrize("heads", HEADS)
def test_hf_exact_equals_falcon_bit_for_bit(heads):
    keys = torch.arange(2048)
    theirs = falcon_alibi(torch.ones(1, 2048, dtype=torch.long), heads, torch.float32)[:, 0]
    found = made(heads, hf_exact=True).score_bias()
    assert isinstance(found, KeyBias)
    assert torch.equal(found.between(torch.tensor([2047]), keys)[:, 0], theirs)


def test_hf_exact_ends_with_the_context_and_the_distance_form_does_not():
    assert made(context=37, hf_exact=True).max_positions == 37
    assert made(context=37).max_positions is None


@pytest.mark.parametrize("backend", [ReferenceAttention, SdpaAttention])
def test_hf_exact_in_a_context_that_ends_inside_a_block(backend, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "exact", EncodingSpec("alibi", {"hf_exact": True}))
    tokens = list(range(37))
    expected = run_uncached(tiny("exact"), tokens)
    decoder = tiny("exact", backend)
    decoder.encoding.by_key = decoder.encoding.by_key[:, :37]
    assert (run_uncached(decoder, tokens) - expected).abs().max() <= 1e-10


# ------------------------------------------------------------------------------ rounding


@pairs(heads=[8, 12, 71], query=[63, 2047, 100_000], dtype=[torch.float32, torch.bfloat16])
def test_by_distance_the_nearest_64_keys_have_64_biases(heads, query, dtype):
    nearest = torch.arange(query - 63, query + 1)
    assert distinct(bias(made(heads), query, nearest).to(dtype)) == [64] * heads


# --------------------------------------------------------------------------- the description


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slopes": [1]}, r"bias_max, scaled, hf_exact, but got \['slopes'\]"),
        ({"bias_max": 0}, "bias_max above 0, but got 0"),
        ({"bias_max": -8}, "bias_max above 0, but got -8"),
        ({"bias_max": float("nan")}, "bias_max above 0, but got nan"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(EncodingError, match=words):
        made(**options)


def test_work_counts_every_key_of_every_head():
    by_distance, by_key = (
        made(6).work(CONFIG, 100, 16),
        made(6, hf_exact=True).work(CONFIG, 100, 16),
    )
    values = CONFIG.num_layers * 6 * 100
    assert (by_distance.rotations, by_distance.bias_values) == (0, values)
    assert (by_distance.flops, by_distance.bytes) == (2 * values, 24)
    assert (by_key.bias_values, by_key.flops, by_key.bytes) == (values, values, 2400)
    assert (by_distance.bias_bytes, by_key.bias_bytes) == (by_distance.bytes, 2400)
