"""A pass in one call gives, bit by bit, what the decoder's parts give one after another."""

from dataclasses import replace

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.learned import Learned
from tests.model.few_bits import BITS
from tests.model.kernels.test_layers import BLOCK, GPT2, ragged, substituted
from tests.model.running import full_of_nan, new_cache
from tests.model.tiny import ENCODINGS, WIDE_ROPE

FRESH = ((37, 37), (5, 5), (18, 18))  # all that is read from the cache is written before
BY_PARTS = ("t5-materialised", "t5-materialised-per-layer", "fire")
INTEGERS = ("tokens", "positions", "offsets", "slots", "context_lens")


def cache(decoder, stored=None):
    made = full_of_nan(new_cache(decoder, 12, BLOCK, stored))
    if stored is torch.int8:
        made.whole.keys.zero_(), made.whole.values.zero_()
    return made


def same(decoder, batch, ours, theirs):
    """Of both ways: logits, and what they store."""
    pairs = [(decoder(batch, ours), decoder.by_parts(batch, theirs))]
    pairs += zip(ours.whole, theirs.whole, strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def fresh_copy(batch, **changes):
    """In other tensors."""
    tensors = {name: getattr(batch, name).clone() for name in INTEGERS}
    return replace(batch, **tensors | changes)


@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(encoding, dtype, stored, kernels):
    options = {}
    if ENCODINGS[encoding].name == WIDE_ROPE:  # its tables are too wide for the kernels
        encoding, options = "rope", ENCODINGS[encoding].options
    decoder = substituted(encoding, kernels, dtype, options=options)
    assert (decoder.one_call is None) == (encoding in BY_PARTS)
    batch = ragged(FRESH)
    assert same(decoder, batch, cache(decoder, stored), cache(decoder, stored))
    some = replace(batch, output_rows=torch.tensor([36, 41, 59]))
    assert same(decoder, some, cache(decoder, stored), cache(decoder, stored))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "changes",
    [
        {"embed_scale": 3.3},
        {"head_bias": True},
        {"embed_norm": True},
        {"tied_embeddings": True},
        {"windows": (7, None, 7)},
        {"embed_norm": True} | GPT2,
        {"block": "parallel"},
    ],
    ids=str,
)
def test_every_shape(changes, bits, kernels):
    decoder = substituted("rope", kernels, torch.bfloat16, bits=bits, **changes)
    assert decoder.one_call is not None
    assert same(decoder, ragged(FRESH), cache(decoder), cache(decoder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_vectors_of_positions_that_are_scaled(encoding, dtype, kernels):
    options = {**ENCODINGS[encoding].options, "scale": 0.7}
    decoder = substituted(encoding, kernels, dtype, options=options, embed_scale=3.3)
    assert same(decoder, ragged(FRESH), cache(decoder), cache(decoder))


class Doubled(Learned):
    def embed(self, x, positions):
        return 2 * super().embed(x, positions)


def test_what_derives_from_an_encoding_embeds_in_its_own_way(kernels, monkeypatch):
    spec = EncodingSpec(f"{__name__}:Doubled", ENCODINGS["learned"].options)
    monkeypatch.setitem(ENCODINGS, "doubled", spec)
    decoder = substituted("doubled", kernels)
    assert decoder.one_call is not None
    assert same(decoder, ragged(FRESH), cache(decoder), cache(decoder))


def test_rows_whose_logits_are_wanted(kernels):
    decoder = substituted("rope", kernels, torch.bfloat16)
    for rows in ([36], [36, 41, 59]):
        batch = replace(ragged(FRESH), output_rows=torch.tensor(rows))
        assert same(decoder, batch, cache(decoder), cache(decoder))


@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "learned"])
def test_a_batch_that_is_changed_in_place(encoding, kernels):
    """As steps that decode change it; another one comes between, and another cache."""
    decoder = substituted(encoding, kernels)
    ours, theirs, others = (cache(decoder) for _ in range(3))
    assert same(decoder, ragged(FRESH), ours, theirs)
    assert same(decoder, ragged(FRESH), others, cache(decoder))
    batch = ragged(((38, 1), (6, 1), (19, 1)))
    between = ragged(((20, 20), (9, 9)))
    for step in range(6):
        assert torch.equal(decoder(batch, ours), decoder.by_parts(fresh_copy(batch), theirs))
        if step == 3:
            assert same(decoder, between, cache(decoder), cache(decoder))
            assert torch.equal(decoder(batch, ours), decoder.by_parts(batch, theirs))
            assert not torch.equal(decoder(batch, others), decoder.by_parts(batch, theirs))
        for name in ("positions", "offsets", "slots", "context_lens"):
            getattr(batch, name).add_(1)
        batch.tokens.add_(3).remainder_(61)


@pytest.mark.parametrize("token", [-1, 61, 2**40])
def test_a_token_that_is_not_in_the_vocabulary(token, kernels):
    decoder = substituted("rope", kernels)
    kv = cache(decoder)
    batch = ragged(FRESH)
    batch.tokens[40] = token
    with pytest.raises(IndexError, match="not in the vocabulary"):
        decoder(batch, kv)
    assert all(part.isnan().all() for part in kv.whole)


@pytest.mark.parametrize("changes", [{"embed_width": 12}, {"block": "post_norm"}], ids=str)
def test_decoders_that_compute_something_else_are_left_alone(changes, kernels):
    assert substituted("rope", kernels, **changes).one_call is None
