"""What a class of one's own does wrong is one sentence, before a kernel reads its memory."""

import re
from dataclasses import replace

import pytest
import torch

from ropewalk.cache.types import Capability, KeyStorage
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import (
    EncodingError,
    ForgetGates,
    KeyBias,
    LinearBias,
    PairBias,
    PositionalEncoding,
    TableBias,
    create,
)
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.model.encodings.common.rotary import Far, Rotation
from ropewalk.model.encodings.common.validate import check_hooks
from ropewalk.model.encodings.rope import RoPE
from tests.model.tiny import CONFIG, CONTEXT, CPU, ENCODINGS, tiny


def said(encoding, context=CONTEXT):
    with pytest.raises(EncodingError) as refused:
        check_hooks(encoding, CONFIG, context, CPU)
    text = str(refused.value)
    assert text.startswith(f"{type(encoding).__name__}: ")
    assert text.endswith(". docs/encodings.md says what a class must keep to.")
    return text


@pytest.mark.parametrize("context", [1, 5, 40, CONTEXT])
@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_right_passes(name, context):
    encoding = tiny(name).encoding
    if encoding.max_positions is None or context <= encoding.max_positions:
        check_hooks(encoding, CONFIG, context, CPU)


def with_hooks(**hooks):
    return type("Own", (PositionalEncoding,), hooks)()


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (
            lambda x: x[:, :5],
            r"gates returns float32 \[6, 5\] for float32 \[6, 24\], and must return",
        ),
        (lambda x: x[0, :6], r"gates returns float32 \[6\] for "),
        (lambda x: x[:, :6] > 0, r"gates returns bool \[6, 6\] for .* a float for each of 6 heads"),
        (lambda x: None, "gates returns NoneType, not Tensor"),
        (lambda x: x[:, :6] / 0, "gates returns numbers that are not finite"),
        (lambda x: x[:, :6] - x.mean(), "gates returns something else for a token when other"),
        (lambda x: x[:, :6] @ torch.ones(6, 6), "gates fails "),
    ],
)
def test_gates(act, why):
    assert re.search(why, said(with_hooks(gates=lambda self, x: act(x))))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (
            lambda x, q: q[:, :2],
            r"query_bias returns float32 \[6, 2, 8\] for float32 \[6, 24\] and",
        ),
        (lambda x, q: q[..., 0], r"query_bias returns float32 \[6, 6\] .* floats \[6, 6, span\]"),
        (lambda x, q: None, "query_bias returns NoneType, not Tensor"),
        (lambda x, q: q.log(), "query_bias returns numbers that are not finite"),
        (lambda x, q: q - x.mean(), "query_bias returns something else for a token when other"),
    ],
)
def test_query_bias(act, why):
    assert re.search(why, said(with_hooks(query_bias=lambda self, x, q: act(x, q))))


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        (torch.ones(256), r"query_scales returns float32 \[256\], and must return float32 \[posi"),
        (torch.ones(256, 5), r"query_scales returns float32 \[256, 5\], and .* \[positions, 6\]"),
        (
            torch.ones(256, 1).double(),
            r"query_scales returns float64 \[256, 1\], and must return f",
        ),
        (torch.ones(7, 1), "query_scales has 7 positions for a context of 256; set max_positions"),
        (torch.arange(256)[:, None].log(), "query_scales holds numbers that are not finite"),
        (2.0, "query_scales returns float, not Tensor"),
    ],
)
def test_query_scales(scales, why):
    assert re.search(why, said(with_hooks(query_scales=lambda self: scales)))


def test_query_bias_is_the_only_bias():
    both = {
        "query_bias": lambda self, x, q: q,
        "score_bias": lambda self: LinearBias(torch.ones(6)),
    }
    assert "query_bias takes the place of score_bias" in said(with_hooks(**both))


def plain(seen):
    return seen.q @ seen.keys_by_head().mT


def of_last_queries(seen):
    """By distance, as if the last query stood at the last key."""
    queries, keys = seen.scores.shape[-2:]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return plain(seen) * torch.exp(-distance.clamp(min=0).float())


def of_positions(seen):
    """Counts keys by their positions, which padding has as well."""
    before = seen.positions[..., None] >= seen.key_positions[..., None, :]
    counted = (plain(seen).sigmoid() * before.unsqueeze(-3)).flip(-1).cumsum(-1).flip(-1)
    return -(counted.clamp(max=4) ** 2)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda seen: seen.scores[0], r"content_bias returns float32 \[6, 6\] for scores float32 "),
        (lambda seen: seen.scores > 0, r"content_bias returns bool \[6, 6, 6\] for scores"),
        (lambda seen: None, "content_bias returns NoneType, not Tensor"),
        (lambda seen: 1 / 0, "content_bias fails .test_hooks.py, line .*: ZeroDivision"),
        (lambda seen: seen.scores.log(), "content_bias returns numbers that are not finite"),
        # Of other queries; of keys that are not seen; of other requests.
        (lambda seen: seen.scores * 0 + seen.q.mean(), "something else for a query and a key"),
        (lambda seen: seen.q @ seen.keys_by_head().mT.cumsum(-1).flip(-1), "something else for"),
        (lambda seen: seen.q @ seen.q.mT.cumsum(-1).expand_as(seen.scores), "content_bias"),
        (lambda seen: (seen.q @ seen.keys_by_head().mT) / seen.scores.dim(), "other requests are"),
        (lambda seen: seen.q @ seen.keys_by_head()[(0,) * (seen.q.dim() - 3)].mT, "other requests"),
        (of_last_queries, "something else for"),
        (lambda seen: plain(seen) / seen.keys.abs().amax((-1, -2, -3), keepdim=True), "later keys"),
        (of_positions, "something else for"),
        (lambda seen: seen.scores.sigmoid_().flip(-1).cumsum(-1).flip(-1), "changes the scores"),
    ],
)
def test_content_bias(act, why):
    assert re.search(why, said(with_hooks(content_bias=lambda self, seen: act(seen))))


@pytest.mark.parametrize(
    "other",
    [
        {"score_bias": lambda self: LinearBias(torch.ones(6))},
        {"query_bias": lambda self, x, q: q},
        {"gates": lambda self, x: -x[:, :6].abs()},
        {"rotation": lambda self: Rotation(*torch.ones(2, CONTEXT, 4), "half", KeyStorage.RAW)},
    ],
)
def test_content_bias_is_the_only_bias(other):
    own = with_hooks(content_bias=lambda self, seen: seen.q @ seen.keys_by_head().mT, **other)
    assert re.search("content_bias (takes the place of|is given queries and keys as)", said(own))


@pytest.mark.parametrize(
    ("weight", "bias", "why"),
    [
        ((6, 24), (1,), r"a bias of \[1\], not of \[6, 24\] and \[6\]"),
        ((1, 24), (6,), r"a weight of \[1, 24\] and a bias of \[6\], not of "),
        ((6, 24), (), r"a bias of \[\], not of "),
    ],
)
def test_forget_gates_have_a_row_for_each_head(weight, bias, why):
    gates = ForgetGates(torch.ones(weight), torch.ones(bias))
    assert re.search(why, said(with_hooks(forget_gates=lambda self: gates)))


def test_forget_gates_are_no_gates_themselves():
    own = with_hooks(forget_gates=lambda self: torch.ones(6, 24))
    assert re.search("forget_gates returns Tensor, not ForgetGates", said(own))


def rotates(act):
    return with_hooks(rotate=lambda self, q, k, positions, offsets: act(q, k, positions))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda q, k, at: (q[..., :4], k), r"rotate returns float32 \[6, 6, 4\] and float32 \["),
        (lambda q, k, at: (q[:, :1], k), "rotate returns float32 "),
        (lambda q, k, at: (q, k.double()), r"and float64 \[6, 2, 8\] for "),
        (lambda q, k, at: (q, None), "and NoneType for "),
        (lambda q, k, at: q, "rotate returns Tensor, not tuple"),
        (lambda q, k, at: (q, k / 0), "rotate returns numbers that are not finite"),
        (lambda q, k, at: (q, k * torch.ones(8)), "bfloat16 .* and float32 .* for bfloat16"),
        (lambda q, k, at: (q, k[at]), "rotate fails .test_hooks.py, line .*: IndexError: "),
        (lambda q, k, at: (q, k * at.max()), "when other tokens are computed with it"),
        (
            lambda q, k, at: (q * torch.arange(1, len(q) + 1)[:, None, None], k),
            "other tokens are computed",
        ),
        (lambda q, k, at: (q, k * (1 + at)[:, None, None]), "override capability and shift"),
    ],
)
def test_rotate(act, why):
    with pytest.raises(EncodingError, match=why):
        check_hooks(rotates(act), CONFIG, CONTEXT, CPU)


def test_keys_that_move_are_those_that_rotate_makes():
    """RoPE's own shift, another one, and none at all."""

    class Backwards(RoPE):
        def shift(self, keys, delta):
            return super().shift(keys, -delta)

    class Forgetful(RoPE):
        def capability(self, op, dtype):
            return Capability.FREE

    class Honest(Forgetful):
        WHY_FIXED = "nobody has thought about it"

        def capability(self, op, dtype):
            return PositionalEncoding.capability(self, op, dtype)

    options = ENCODINGS["rope"].options
    check_hooks(Honest.create(options, CONFIG, CONTEXT, CPU), CONFIG, CONTEXT, CPU)
    for kind in (Backwards, Forgetful):
        assert "moved keys would differ" in said(kind.create(options, CONFIG, CONTEXT, CPU))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda x, at: x[:1], r"embed returns float32 \[1, 24\] for float32 \[6, 24\]"),
        (lambda x, at: x[:, :5], r"embed returns float32 \[6, 5\] for "),
        (lambda x, at: x + len(x), "embed returns something else for a token when"),
        (lambda x, at: x + at[:, None], "set WHY_FIXED"),
        (lambda x, at: None, "embed returns NoneType, not Tensor"),
        (lambda x, at: x * torch.ones(24), "embed returns float32 .* for bfloat16"),
    ],
)
def test_embed(act, why):
    own = with_hooks(embed=lambda self, x, positions: act(x, positions))
    with pytest.raises(EncodingError, match=why):
        check_hooks(own, CONFIG, CONTEXT, CPU)


class Steeper(TableBias):
    def between(self, queries, keys):
        return 2 * super().between(queries, keys)


HEADS = CONFIG.num_heads


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        (torch.zeros(HEADS, CONTEXT), "returns Tensor; it must return None or one of Linear"),
        (Steeper(torch.zeros(HEADS, 8)), "score_bias returns Steeper; "),
        (TableBias(torch.zeros(3, 8)), "score_bias has 3 heads, but must have 6 or 1"),
        (LinearBias(torch.zeros(2)), "score_bias has 2 heads, but"),
        (TableBias(torch.full((1, 8), torch.nan)), "score_bias holds NaN"),
        (KeyBias(torch.zeros(HEADS, 8)), f"has 8 key positions for a context of {CONTEXT}"),
        (PairBias(lambda q, k: torch.zeros(HEADS, 2, 2)), r"returns \[6, 2, 2\] for queries \[6\]"),
        (PairBias(lambda q, k: (q[:, None] - k[None]).float()[None]), r"returns \[1, 6, 6, .* not"),
        (PairBias(lambda q, k: 1 / 0), "score_bias fails .test_hooks.py, line .*: ZeroDivision"),
        (PairBias(lambda q, k: None), "score_bias returns NoneType, not Tensor"),
    ],
)
def test_score_bias(bias, why):
    own = with_hooks(score_bias=lambda self: bias)
    with pytest.raises(EncodingError, match=why):
        check_hooks(own, CONFIG, CONTEXT, CPU)


@pytest.mark.parametrize(
    ("shape", "why"),
    [((CONTEXT, 5), "with at most 4 pairs"), ((9, 4), f"has 9 positions for .* {CONTEXT}")],
)
def test_rotation(shape, why):
    turning = Rotation(torch.ones(shape), torch.zeros(shape), "half", KeyStorage.RAW)
    own = with_hooks(rotation=lambda self: turning)
    with pytest.raises(EncodingError, match=why):
        check_hooks(own, CONFIG, CONTEXT, CPU)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"start": 0}, "must start at a distance of 1 or more"),
        ({"queries": torch.arange(CONTEXT - 1)}, f"an int64 for each of {CONTEXT} positions"),
        ({"keys": torch.arange(CONTEXT).int()}, f"an int64 for each of {CONTEXT} positions"),
        ({"keys": torch.arange(CONTEXT) - 1}, f"positions that are not in a table of {CONTEXT}"),
        ({"queries": torch.arange(CONTEXT) + 1}, "positions that are not in a table"),
        ({}, "which only raw keys can be"),
    ],
)
def test_rotation_of_far_keys(changes, why):
    storage = KeyStorage.RAW if changes else KeyStorage.BLOCK
    far = replace(Far(9, torch.arange(CONTEXT), torch.arange(CONTEXT)), **changes)
    turning = Rotation(*torch.ones(2, CONTEXT, 4), "half", storage, far=far)
    own = with_hooks(rotation=lambda self: turning)
    with pytest.raises(EncodingError, match=why):
        check_hooks(own, CONFIG, CONTEXT, CPU)


def test_work_and_capability():
    def impossible(self, op, dtype):
        return Capability.IMPOSSIBLE

    assert "work returns int, not" in said(with_hooks(work=lambda self, *given: 3))
    assert "append is impossible; say why in WHY_FIXED" in said(with_hooks(capability=impossible))
    assert "capability returns str" in said(with_hooks(capability=lambda self, *given: "free"))


@pytest.mark.parametrize("whose", ["own", "of a layer"])
def test_fixed_tensors(whose):
    wrong = with_hooks(fixed_tensors=lambda self: {"table": [1.0]})
    if whose == "of a layer":
        layer = wrong
        wrong = with_hooks(for_layer=lambda self, index: layer if index == 2 else self)
    assert "fixed_tensors, for 'table', returns list, not Tensor" in said(wrong)
    assert "fixed_tensors returns list" in said(with_hooks(fixed_tensors=lambda self: []))


def test_layers_of_their_own_are_looked_at():
    wrong = rotates(lambda q, k, at: (q, k[:1]))
    own = with_hooks(for_layer=lambda self, layer: wrong if layer == 2 else self)
    with pytest.raises(EncodingError, match="rotate returns"):
        check_hooks(own, CONFIG, CONTEXT, CPU)


def test_what_fails_before_there_are_layers():
    """In `create` or `for_layer`, which building the decoder already calls."""

    def fail(*given):
        raise KeyError("size")

    assert "for_layer fails (test_hooks.py, line" in said(with_hooks(for_layer=fail))
    assert "for_layer returns NoneType" in said(with_hooks(for_layer=lambda self, layer: None))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Unmade", r"Unmade fails as it is built \(test_hooks.py, line \d+: TypeError: .* takes 1"),
        (
            "Layerless",
            r"Layerless fails as .*_hooks.py, line \d+: AttributeError: .* has no .*'of'",
        ),
        ("Scaleless", r"Scaleless fails as it is built \(test_hooks.py, line \d+: AttributeError"),
    ],
)
def test_a_class_that_cannot_be_built(kind, why):
    spec = EncodingSpec(f"{__name__}:{kind}", {})
    with pytest.raises(EncodingError, match=why):
        create(spec, CONFIG, CONTEXT, CPU)


class Unmade(PositionalEncoding):
    @classmethod
    def create(cls, options, config, context, device):
        return cls(options)


class Scaleless(PositionalEncoding):
    def freeze(self):
        self.made = torch.ones(CONTEXT, 1)

    def query_scales(self):
        return self.made


class Layerless(PositionalEncoding):
    @classmethod
    def create(cls, options, config, context, device):
        return cls()

    def for_layer(self, layer):
        return self.of[layer]


@pytest.mark.parametrize("name", ["t5-table", "rope", "fire"])
def test_work_is_by_default_what_the_hooks_say(name):
    """As those encodings count it that do nothing less; RoPE also reads angles."""
    encoding = tiny(name).encoding
    for context in (1, 30):
        told = PositionalEncoding.work(encoding, CONFIG, context, 16)
        if name == "fire":
            built = sum(CONFIG.seen(context)) * HEADS
            assert (told.bias_values, told.bias_built, told.flops) == (built, built, built)
        else:
            counted = encoding.work(CONFIG, context, 16)
            assert replace(told, bytes=0) == replace(counted, bytes=0)
            assert told.bytes == (0 if name == "rope" else counted.bytes)


@pytest.mark.parametrize("context", [1, 30])
def test_work_of_vectors_is_a_row_that_is_added(context):
    row = PositionalWork(flops=CONFIG.hidden_size, bytes=4 * CONFIG.hidden_size)
    for name, expected in (("nope", NO_WORK), ("learned", row), ("sinusoidal", row)):
        assert tiny(name).encoding.work(CONFIG, context, 16) == expected
