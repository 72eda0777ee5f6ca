"""The checks of the contract can fail: each planted mistake breaks one of them.

A mistake is a change to a decoder that is right. The same check passes without it.
"""

from dataclasses import replace

import pytest
import torch

from model.attention.reference import ReferenceAttention
from model.encodings.base import LinearBias, TableBias
from model.encodings.rope import RoPE
from tests.model.test_contract import check_oracle, check_path
from tests.model.tiny import ENCODINGS, tiny


class Changed:
    """The reference backend, but for what it is told."""

    name = "changed"

    def __init__(self, *, batch=None, bias=None, spec=None):
        self.batch, self.bias, self.spec = batch, bias, spec

    def why_not(self, spec):
        return None

    def __call__(self, spec):
        attend = ReferenceAttention(self.spec(spec) if self.spec else spec)

        def attend_changed(q, kv, batch, bias):
            seen = self.batch(batch) if self.batch else batch
            return attend(q, kv, seen, self.bias(bias, batch) if self.bias else bias)

        return attend_changed


def by_row(batch):
    """Positions from the row index: right for whole prompts that start at 0."""
    positions = torch.cat(
        [
            torch.arange(end - start)
            for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)
        ]
    )
    return replace(batch, positions=positions)


def forgetful(batch):
    """The last key before the newest is not seen once a second block is in use."""
    tables = batch.block_tables.clone()
    beyond = batch.context_lens > 4
    tables[beyond, 1] = tables[beyond, 0]
    return replace(batch, block_tables=tables)


def dropped_in_decode(bias, batch):
    return None if batch.max_query == 1 else bias


def flipped(bias, batch):
    if isinstance(bias, LinearBias):
        return LinearBias(-bias.slopes)
    return TableBias(-bias.table, bias.zero)


def reversed_heads(bias, batch):
    if isinstance(bias, LinearBias):
        return LinearBias(bias.slopes.flip(0))
    return TableBias(bias.table.flip(0), bias.zero)


def one_further(bias, batch):
    return TableBias(bias.table, bias.zero + 1)


def with_backend(encoding, **changes):
    return tiny(encoding, Changed(**changes))


def wrong_layout(encoding):
    decoder = tiny(encoding)
    for module in decoder.modules():
        if isinstance(module, RoPE):
            module.layout = "interleaved" if module.layout == "half" else "half"
    return decoder


def coarse_angles(encoding):
    """Angles rounded to bfloat16 before sine and cosine."""
    decoder = tiny(encoding)
    rope = decoder.encoding
    positions = torch.arange(len(rope.cos), dtype=torch.float32)
    angles = (positions[:, None] * rope.frequencies).bfloat16().float()
    rope.cos, rope.sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return decoder


def one_position_off(encoding):
    """Of the queries alone: with keys off as well, a relative encoding is right again."""
    decoder = tiny(encoding)
    for layer in decoder.layers:
        layer.attention.encoding = Off(layer.attention.encoding)
    return decoder


class Off(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.inner = encoding

    def rotate(self, q, k, positions):
        return self.inner.rotate(q, k, positions + 1)[0], self.inner.rotate(q, k, positions)[1]

    def score_bias(self):
        return self.inner.score_bias()


def shifted_table(encoding):
    decoder = tiny(encoding)
    table = decoder.encoding.table
    if isinstance(table, torch.nn.Parameter):
        decoder.encoding.offset += 1 if decoder.encoding.offset == 0 else -1
    else:
        decoder.encoding.table = table.roll(-1, 0)
    return decoder


def scaled_scores(encoding):
    return tiny(encoding, attention_scale=None)


ROTARY = ["rope", "rope-interleaved", "rope-partial"]
RELATIVE = ["alibi", "t5"]
ADDED = ["learned", "sinusoidal", "sinusoidal-split"]
AGAINST_THE_PAPERS = [
    *((wrong_layout, name) for name in ROTARY),
    *((coarse_angles, name) for name in [*ROTARY, "rope-scaled"]),
    *((one_position_off, name) for name in ROTARY),
    *((lambda name: with_backend(name, bias=flipped), name) for name in RELATIVE),
    *((lambda name: with_backend(name, bias=reversed_heads), name) for name in RELATIVE),
    *((lambda name: with_backend(name, bias=lambda bias, batch: None), name) for name in RELATIVE),
    (lambda name: with_backend(name, bias=one_further), "t5"),
    *((shifted_table, name) for name in ADDED),
]
BETWEEN_PATHS = [
    *((lambda name: with_backend(name, bias=dropped_in_decode), name) for name in RELATIVE),
    # Not ALiBi: a wrong position of the query lowers all its scores alike, which softmax ignores.
    (lambda name: with_backend(name, batch=by_row), "t5"),
    *((lambda name: with_backend(name, batch=forgetful), name) for name in ["nope", *RELATIVE]),
]


def fails(check):
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(("plant", "encoding"), AGAINST_THE_PAPERS)
def test_the_oracle_finds(plant, encoding):
    check_oracle(tiny(encoding), base=3, length=60)
    fails(lambda: check_oracle(plant(encoding), base=3, length=60))


@pytest.mark.parametrize(("plant", "encoding"), BETWEEN_PATHS)
def test_another_path_finds(plant, encoding):
    check_path(tiny(encoding), tiny(encoding), "decode")
    fails(lambda: check_path(plant(encoding), tiny(encoding), "decode"))


def test_the_oracle_finds_scaled_logits_of_t5():
    """The oracle reads the scale from the config, so the config must say the same of both."""
    wrong = scaled_scores("t5")
    wrong.config = replace(wrong.config, attention_scale=1.0)
    check_oracle(tiny("t5"), length=60)
    fails(lambda: check_oracle(wrong, length=60))


def test_every_encoding_of_the_product_has_a_mistake():
    planted = {ENCODINGS[name].name for _, name in [*AGAINST_THE_PAPERS, *BETWEEN_PATHS]}
    assert planted == {"rope", "alibi", "t5", "learned", "sinusoidal", "nope"}
