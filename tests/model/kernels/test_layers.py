"""Layers in one call give, bit by bit, what their parts give one after another."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from ropewalk.model.attention.bias import step_biases
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, LinearBias, PositionalEncoding
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.kernels.cpu.layers import KernelLayers, Part
from ropewalk.model.kernels.cpu.modules import KernelRotate
from ropewalk.model.kernels.substitutes import substitute
from ropewalk.model.layers.decoder import Layers
from ropewalk.server.engine.forward_timer import TimedDecoder
from tests.model.few_bits import BITS, round_weights
from tests.model.running import CPU, Running, make_batch, new_cache
from tests.model.tiny import CONFIG, CONTEXT, ENCODINGS, WIDE_ROPE, tiny

BLOCK = 16
LENGTHS = ((37, 37), (20, 1), (5, 2), (18, 3))  # tokens of a request, and those to be computed


def substituted(encoding, kernels, dtype=torch.float32, *, bits=16, **changes):
    decoder = tiny(encoding, CpuBackend(kernels), dtype, **changes)
    round_weights(decoder, bits, kernels)
    substitute(decoder, kernels, dtype)
    return decoder


def ragged(lengths=LENGTHS):
    draw, blocks = random.Random(3), itertools.count(1)
    requests = []
    for length, count in lengths:
        held = [next(blocks) for _ in range(-(-length // BLOCK))]
        tokens = [draw.randrange(61) for _ in range(length)]
        requests.append((Running(tokens, held, computed=length - count), count))
    return make_batch(requests, BLOCK)


def both(decoder, rows=None, stored=None, lengths=LENGTHS):
    """Output and cache of the one call, and of the parts; of all rows, or of these."""
    fused, batch = decoder.layers, ragged(lengths)
    assert isinstance(fused, KernelLayers)
    rows = torch.arange(len(batch.tokens)) if rows is None else rows
    generator = torch.Generator().manual_seed(4)
    blocks = 1 + sum(-(-length // BLOCK) for length, _ in lengths)
    made = new_cache(decoder, blocks, BLOCK, stored)
    noise = [torch.randn(part.shape, generator=generator) for part in made.whole]
    x = torch.randn(len(batch.tokens), 24, generator=generator).to(decoder.embed.weight.dtype)
    found = []
    for way in (fused, partial(Layers.forward, fused)):
        kv = new_cache(decoder, blocks, BLOCK, stored)
        for part, numbers in zip(kv.whole, noise, strict=True):
            part.copy_(numbers)
        biases = step_biases(decoder.encoding, len(fused), batch, BLOCK)
        found.append((way(x.clone(), batch, kv, biases, rows), *kv.whole))
    return found


def equal(found):
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(encoding, dtype, kernels):
    options = {}
    if ENCODINGS[encoding].name == WIDE_ROPE:  # its tables are too wide for the kernels
        encoding, options = "rope", ENCODINGS[encoding].options
    decoder = substituted(encoding, kernels, dtype, options=options)
    assert equal(both(decoder))
    assert equal(both(decoder, rows=torch.tensor([36, 37, 42])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["rope", "rope-raw", "alibi"])
def test_keys_and_values_in_8_bits(encoding, dtype, kernels):
    """The numbers and scales that the kernel stores are those of cache/rounding.py."""
    decoder = substituted(encoding, kernels, dtype)
    assert equal(both(decoder, stored=torch.int8))
    assert equal(both(decoder, rows=torch.tensor([36, 37, 42]), stored=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "qkv_bias": True},
        {"out_bias": True, "mlp_bias": True},
        {"kv_heads": 6},
        {"windows": (7, None, 7)},
    ],
    ids=["norms", "biases", "no-groups", "windows"],
)
def test_every_shape(changes, bits, dtype, kernels):
    decoder = substituted("rope-interleaved", kernels, dtype, bits=bits, **changes)
    assert equal(both(decoder))
    assert equal(both(decoder, rows=torch.tensor([0, 42])))
    assert equal(both(decoder, rows=torch.tensor([], dtype=torch.int64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 8, 9, 12])
def test_few_rows(count, bits, dtype, kernels):
    decoder = substituted("rope", kernels, dtype, bits=bits)
    assert equal(both(decoder, lengths=((37, count),)))


GPT2 = {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "changes",
    [
        GPT2 | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {"norm": "layer", "qkv_clip": 0.4},
        {"gated": False, "activation": "relu"},
        {"activation": "gelu"},
        {"block": "parallel"} | GPT2,
        {"block": "parallel_one_norm", "gated": False, "activation": "silu"},
    ],
    ids=["gpt-2", "clip", "relu", "gelu-gate", "parallel", "parallel-one-norm"],
)
def test_every_kind_of_layer(changes, bits, dtype, kernels):
    decoder = substituted("rope-partial", kernels, dtype, bits=bits, **changes)
    assert equal(both(decoder))
    assert equal(both(decoder, rows=torch.tensor([0, 42])))
    assert equal(both(decoder, lengths=((150, 150), (40, 23))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_rows_that_are_enough_for_every_thread(bits, dtype, threads, kernels):
    """Each then takes some of them through all that lies before attention, and after it."""
    decoder = substituted("rope", kernels, dtype, bits=bits, qk_norm=True)
    lengths = ((170, 170), (20, 1), (40, 23))
    assert equal(both(decoder, lengths=lengths))
    assert equal(both(decoder, rows=torch.arange(5, 190), lengths=lengths))
    assert equal(both(decoder, rows=torch.tensor([169]), lengths=lengths))


def test_layers_that_compute_something_else_are_left_alone(kernels):
    decoder = substituted("rope", kernels, block="post_norm")
    assert not any(isinstance(each, KernelLayers) for each in decoder.modules())


class Unlike(RoPE):
    """Turns in a way of its own."""

    def rotate(self, q, k, positions, offsets):
        return 0.5 * q, k + positions[:, None, None]


class Biased(RoPE):
    """Turns as RoPE does, and adds something besides."""

    def score_bias(self):
        return LinearBias(torch.ones(CONFIG.heads))


class Mixed(PositionalEncoding):
    """Turns in the first and in the last layer, in a way of its own there; each adds its own."""

    @classmethod
    def create(cls, options, config, context, device):
        made = cls()
        rope = partial(dict, context=context, device=device)
        options = ENCODINGS["rope"].options
        made.each = nn.ModuleList(
            [RoPE(**rope(options)), PositionalEncoding(), Unlike(**rope(options))]
        )
        for index, own in enumerate(made.each[1:]):
            bias = LinearBias(torch.full((CONFIG.heads,), 0.1 + index))
            own.score_bias = lambda bias=bias: bias
        return made

    def for_layer(self, layer):
        return self.each[layer]


class Late(PositionalEncoding):
    """Each layer's encoding follows from weights, so that it is made once these are loaded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONFIG.layers, CONFIG.heads), requires_grad=False)
        self.each = ()

    @classmethod
    def create(cls, options, config, context, device):
        return cls()

    def freeze(self):
        rope = ENCODINGS["rope"].options | {"context": CONTEXT, "device": CPU}
        self.each = [RoPE(**rope | {"base": 9.0 + layer}) for layer in range(len(self.weight))]
        for own, slopes in zip(self.each, self.weight.float(), strict=True):
            own.score_bias = lambda slopes=slopes: LinearBias(slopes)

    def for_layer(self, layer):
        return self.each[layer] if self.each else self


def own(encoding, kernels, monkeypatch, dtype=torch.float32):
    spec = EncodingSpec(f"{__name__}:{encoding}", {})
    if issubclass(globals()[encoding], RoPE):
        spec = replace(spec, options=ENCODINGS["rope"].options)
    monkeypatch.setitem(ENCODINGS, encoding, spec)
    return substituted(encoding, kernels, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("encoding", "by_tables", "one_call"),
    [
        ("Biased", [True, True, True], True),
        ("Unlike", [False, False, False], False),
        ("Mixed", [True, False, False], False),
        ("Late", [True, True, True], True),
    ],
)
def test_encodings_of_ones_own(encoding, by_tables, one_call, dtype, kernels, monkeypatch):
    """Also where it is their code that turns, between two calls of the kernels."""
    decoder = own(encoding, kernels, monkeypatch, dtype)
    rotates = [layer.attention.kernel_rotate for layer in decoder.layers]
    assert [isinstance(each, KernelRotate) for each in rotates] == by_tables
    assert (decoder.one_call is not None) == one_call
    lengths = ((170, 170), (20, 1), (40, 23))  # of which each thread takes some
    for kept in (None, torch.tensor([0, 42])):
        assert equal(both(decoder, rows=kept))
        assert equal(both(decoder, rows=kept, lengths=lengths))
    assert equal(both(decoder, stored=torch.int8))


@pytest.mark.parametrize("encoding", ["Biased", "Unlike", "Mixed", "Late"])
def test_encodings_of_ones_own_without_kernels(encoding, kernels, monkeypatch):
    """The same up to rounding: both ways of a substituted decoder might be wrong alike."""
    decoder = own(encoding, kernels, monkeypatch)
    plain = tiny(encoding, SdpaAttention, torch.float32)
    batch = ragged([(20, 20), (7, 7)])
    found, expected = (each(batch, new_cache(each, 12, BLOCK)) for each in (decoder, plain))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


class Short(RoPE):
    def tables(self, context):
        return super().tables(20)


class Anothers(RoPE):
    """Rotates as another one does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rotate = RoPE(**options | {"base": 3.0}).rotate


@pytest.mark.parametrize("encoding", ["Short", "Anothers"])
def test_tables_that_are_not_what_rotates(encoding, kernels, monkeypatch):
    decoder = own(encoding, kernels, monkeypatch)
    assert all(layer.attention.kernel_rotate is None for layer in decoder.layers)


class Careless(PositionalEncoding):
    """Its table is wider than the model, and so is what it returns."""

    @classmethod
    def create(cls, options, config, context, device):
        made = cls()
        made.max_positions = context
        return made

    def embed(self, x, positions):
        return x + torch.ones(x.shape[1])

    def rotate(self, q, k, positions, offsets):
        return q.float(), k


def test_another_dtype_is_refused_before_a_kernel_reads_it(kernels, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "careless", EncodingSpec(f"{__name__}:Careless", {}))
    decoder = substituted("careless", kernels, dtype=torch.bfloat16)
    with pytest.raises(EncodingError, match=r"embed of Careless.*\.to\(x\.dtype\)"):
        decoder(ragged(), new_cache(decoder, 12, BLOCK))
    monkeypatch.setattr(Careless, "embed", PositionalEncoding.embed)
    with pytest.raises(EncodingError, match=r"rotate of Careless returns torch\.float32 .* keep"):
        decoder(ragged(), new_cache(decoder, 12, BLOCK))


def test_what_layers_share_they_still_share(kernels):
    """Or arguments of attention would be made for every layer in every step."""
    layers = substituted("rope", kernels).layers
    first, *others = (layer.attention.encoding for layer in layers)
    assert all(each is first for each in others)


def test_other_attention_is_left_alone(kernels):
    decoder = tiny("rope", SdpaAttention, torch.float32)
    substitute(decoder, kernels, torch.float32)
    assert not any(isinstance(each, KernelLayers) for each in decoder.modules())


@pytest.mark.parametrize(
    ("encoding", "apart"),
    [("rope", True), ("nope", True), ("alibi", False), ("Unlike", True), ("Biased", False)],
)
def test_a_timed_pass_hears_from_inside(encoding, apart, kernels, monkeypatch):
    made = partial(own, monkeypatch=monkeypatch) if encoding in globals() else substituted
    decoder = made(encoding, kernels)
    timed = TimedDecoder(decoder, CPU, every=1)
    batch = ragged([(20, 20), (7, 7)])  # all that is read from the cache is written before
    logits = timed(batch, new_cache(decoder, 12, BLOCK))
    assert torch.equal(logits, decoder(batch, new_cache(decoder, 12, BLOCK)))
    (times,) = timed.drain()
    assert 0 < times.attention < times.forward
    assert (times.position is not None) == apart
    assert decoder.layers.seconds is None


def test_the_parts_of_the_time_are_added_up(kernels):
    decoder = substituted("rope", kernels)
    seconds = torch.zeros(len(Part), dtype=torch.float64)
    decoder.layers.seconds = seconds
    for _ in range(2):
        before = seconds.clone()
        decoder(ragged(), new_cache(decoder, 12, BLOCK))
        assert (seconds > before).all()
