"""A program in one call gives, bit by bit, what its ops do in a call each; and torch's numbers."""

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import EncodingError, LinearBias, PositionalEncoding
from ropewalk.model.encodings.learned import Learned
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.backends import decoder_on
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.kernels.cpu.executor import CpuExecutor, why_not
from ropewalk.model.kernels.cpu.lowering import Kind, Lowering, fused
from ropewalk.model.program import Add, Attend, Clip, Gate, Part, Scale
from ropewalk.model.recipes import ADD, Layer
from ropewalk.model.watch import Watch
from ropewalk.server.engine.statistics import TimedDecoder
from tests.model.few_bits import BITS, round_weights
from tests.model.running import CPU, Running, full_of_nan, make_batch, new_cache, run_uncached
from tests.model.tiny import (
    CONFIG,
    CONTEXT,
    ENCODINGS,
    FIRE,
    IN_KERNELS,
    WIDE_ROPE,
    Fire,
    in_torch,
    on_kernels,
    program_of,
    tiny,
)
from tests.products import pairs

DTYPES = [torch.float32, torch.bfloat16]

BLOCK = 16
LENGTHS = ((37, 37), (20, 1), (5, 2), (18, 3))  # tokens of a request, and those to be computed
FRESH = ((37, 37), (5, 5), (18, 18))  # all that is read from the cache is written before
MANY = ((170, 170), (20, 1), (40, 23))  # of which each thread takes some
INTEGERS = ("tokens", "positions", "offsets", "slots", "context_lens")


class Apart(Lowering):
    """Every op in a call of its own, so that all values outlive one."""

    def looks_around(self, op):
        return True

    def emit(self, *given, **more):
        super().emit(*given, **more)
        self._end_stage()


class OpByOp(CpuExecutor):
    def __init__(self, program, kernels):
        super().__init__(program, kernels)
        self._answers = Apart(program, fused(program.ops), kernels, None).done()
        if program.prompt_ops:
            self._prompts = Apart(program, fused(program.prompt_ops), kernels, None).done()


def both(encoding, kernels, dtype=torch.float32, *, bits=16, **changes):
    """The same decoder in one call, and op by op."""
    program = program_of(tiny(encoding, dtype=dtype, **changes))
    program = round_weights(program, bits, kernels)
    return [Decoder(program, kind(program, kernels)) for kind in (CpuExecutor, OpByOp)]


def stages(decoder):
    return decoder.executor._answers.stages


def kinds(decoder):
    """Of all ops, in order."""
    return [Kind(op.kind) for op in decoder.executor._answers.ops]


def ragged(lengths=LENGTHS):
    draw, blocks = random.Random(3), itertools.count(1)
    requests = []
    for length, count in lengths:
        held = [next(blocks) for _ in range(-(-length // BLOCK))]
        tokens = [draw.randrange(61) for _ in range(length)]
        requests.append((Running(tokens, held, computed=length - count), count))
    return make_batch(requests, BLOCK)


def found(decoder, rows=None, stored=None, lengths=LENGTHS):
    """Logits and cache after a pass that wants all rows, or these."""
    batch = ragged(lengths)
    if rows is not None:
        batch = replace(batch, output_rows=torch.tensor(rows, dtype=torch.int64))
    generator = torch.Generator().manual_seed(4)
    blocks = 1 + sum(-(-length // BLOCK) for length, _ in lengths)
    kv = new_cache(decoder, blocks, BLOCK, stored)
    for part in kv.whole:
        part.copy_(torch.randn(part.shape, generator=generator))
    return decoder(batch, kv), *kv.whole


def equal(decoders, rows=None, **more):
    one, other = (found(each, rows, **more) for each in decoders)
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", IN_KERNELS)
def test_every_encoding(encoding, dtype, kernels):
    options = {}
    if ENCODINGS[encoding].name == WIDE_ROPE:  # its tables are too wide for the kernels
        encoding, options = "rope", ENCODINGS[encoding].options
    decoders = both(encoding, kernels, dtype, options=options)
    parts = {
        "t5-materialised": 2,
        "t5-materialised-per-layer": 4,
        "fire": 2,
        "several": 13,
        "shaw": 7,
    }
    assert len(stages(decoders[0])) == parts.get(encoding, 1)
    for stored in (None, torch.int8):
        assert equal(decoders, stored=stored)
        assert equal(decoders, [36, 37, 42], stored=stored)


@pairs(
    changes=[
        {"qk_norm": True, "qkv_bias": True},
        {"qk_norm": True, "qk_norm_whole": True},
        {"out_bias": True, "mlp_bias": True},
        {"num_kv_heads": 6},
        {"windows": (7, None, 7)},
    ],
    bits=BITS,
    dtype=DTYPES,
)
def test_every_shape(changes, bits, dtype, kernels):
    decoders = both("rope-interleaved", kernels, dtype, bits=bits, **changes)
    for rows in (None, [0, 42], []):
        assert equal(decoders, rows)


@pairs(count=[1, 2, 4, 5, 6, 8, 9, 12], bits=BITS, dtype=DTYPES)
def test_few_rows(count, bits, dtype, kernels):
    assert equal(both("rope", kernels, dtype, bits=bits), lengths=((37, count),))


GPT2 = {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh"}


@pairs(
    changes=[
        GPT2 | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {"norm": "layer", "qkv_clip": 0.4},
        {"gated": False, "activation": "relu"},
        {"activation": "gelu"},
        {"block": "parallel"} | GPT2,
        {"block": "parallel_one_norm", "gated": False, "activation": "silu"},
        {"block": "post_norm"},
        {"score_cap": 0.3},
    ],
    bits=BITS,
    dtype=DTYPES,
)
def test_every_kind_of_layer(changes, bits, dtype, kernels):
    decoders = both("rope-partial", kernels, dtype, bits=bits, **changes)
    assert len(stages(decoders[0])) == 1
    assert equal(decoders)
    assert equal(decoders, [0, 42])
    assert equal(decoders, lengths=((150, 150), (40, 23)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "changes",
    [
        {"embed_scale": 3.3},
        {"head_bias": True},
        {"head_bias": True, "logit_scale": 0.3},
        {"logit_scale": 2.3, "logit_cap": 0.8},
        {"embed_norm": True},
        {"tied_embeddings": True},
        {"embed_norm": True} | GPT2,
        {"embed_width": 12},
    ],
    ids=str,
)
def test_what_is_around_the_layers(changes, bits, kernels):
    decoders = both("rope", kernels, torch.bfloat16, bits=bits, **changes)
    assert len(stages(decoders[0])) == 1
    assert equal(decoders)
    assert equal(decoders, [36, 41])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_vectors_of_positions_that_are_scaled(encoding, dtype, kernels):
    options = {**ENCODINGS[encoding].options, "scale": 0.7}
    decoders = both(encoding, kernels, dtype, options=options, embed_scale=3.3)
    assert Kind.PLACE in kinds(decoders[0]) and len(stages(decoders[0])) == 1
    assert equal(decoders)


@pairs(bits=BITS, dtype=DTYPES, count=[1, 2, 3])
def test_rows_that_are_enough_for_every_thread(bits, dtype, count, threads, kernels):
    """Each then takes some of them through all that lies between two attentions."""
    threads(count)
    two_layers = {"num_layers": 2, "windows": (None, None)}
    decoders = both("rope", kernels, dtype, bits=bits, qk_norm=True, logit_scale=0.3, **two_layers)
    for rows in (None, list(range(5, 190)), [169]):
        assert equal(decoders, rows, lengths=MANY)


# ------------------------------------------------------------------ beside torch's executor


def in_any_order(layer: Layer):
    """A block in an order that no family has: norm, MLP, attention, norm. As its file has it."""
    yield layer.norm("mlp_norm")
    yield from layer.mlp()
    yield Scale("d", "d", 0.1)  # or a softmax would be so sharp that rounding decides it
    yield from layer.attention("d")
    yield layer.norm("attention_norm", x="d", to="d")
    yield ADD


def close(decoder, exact, dtype, **more):
    """Up to rounding, on average."""
    one, other = (found(each, **more)[0].double() for each in (decoder, exact))
    return (one - other).square().mean().sqrt() <= TOLERANCE[dtype] * other.square().mean().sqrt()


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ["rope", "alibi", "learned", "t5-materialised"])
def test_a_block_in_an_order_that_no_family_has(encoding, dtype, kernels):
    program = program_of(tiny(encoding, dtype=dtype, block=in_any_order))
    decoders = [Decoder(program, kind(program, kernels)) for kind in (CpuExecutor, OpByOp)]
    if encoding != "t5-materialised":
        assert len(stages(decoders[0])) == 1  # all of it in C++
    for lengths in (LENGTHS, MANY, ((9, 1),)):
        assert equal(decoders, lengths=lengths)
        assert close(decoders[0], in_torch(program), dtype, lengths=lengths)


FORMS = [
    {},
    {"qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    {"qk_norm": True, "qk_norm_whole": True, "logit_scale": 0.3},
    GPT2,
    {"block": "parallel", "gated": False, "activation": "relu"},
    {"block": "parallel_one_norm", "activation": "gelu"},
    {"block": "post_norm", "embed_width": 12},
    {"qkv_clip": 0.4, "embed_norm": True, "embed_scale": 3.3, "head_bias": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_every_form_beside_torch(changes, dtype, kernels):
    plain = tiny("rope", dtype=dtype, **changes)
    program = program_of(plain)
    decoder = Decoder(program, CpuExecutor(program, kernels))
    for rows, lengths in ((None, LENGTHS), ([36], FRESH), (None, MANY)):
        assert close(decoder, plain, dtype, rows=rows, lengths=lengths)


def test_what_is_not_fused_runs_in_the_same_call(kernels):
    """A clip between a linear layer and its activation, and a gate whose halves are read again."""
    program = program_of(tiny("rope", dtype=torch.float32))
    ops = []
    for op in program.ops:
        if isinstance(op, Gate):
            ops += [Clip("gate up", "gate up", 0.1), op, Add("h up", "h")]
        elif isinstance(op, Add):
            ops += [Scale("d", "d", 0.5), op]
        else:
            ops.append(op)
    program = replace(program, ops=tuple(ops))
    decoders = [Decoder(program, kind(program, kernels)) for kind in (CpuExecutor, OpByOp)]
    assert Kind.GATE in kinds(decoders[0]) and len(stages(decoders[0])) == 1
    assert equal(decoders)
    assert close(decoders[0], in_torch(program), torch.float32)


@dataclass(frozen=True, slots=True)
class Unheard(Scale):
    """An op that no kernel knows."""


def test_what_kernels_do_not_know_runs_in_torch(kernels, caplog):
    """All of the program, and the log says why."""
    caplog.set_level("INFO")
    program = program_of(tiny("rope", dtype=torch.float32))
    assert decoder_on(CpuBackend(kernels), program, kernels).executor.name == "cpu"
    unheard = replace(program, ops=(*program.ops[:1], Unheard("x", "x", 2.0), *program.ops[1:]))
    assert why_not(unheard, kernels) == "its kernels do not know the op Unheard"
    exact = program_of(tiny("rope"))
    assert decoder_on(CpuBackend(kernels), exact, kernels).executor.name == "torch"
    assert "it computes float32 and bfloat16, not torch.float64" in caplog.text


# ---------------------------------------------------------------------- foreign encodings


class Unlike(RoPE):
    """Turns in a way of its own."""

    def rotate(self, q, k, positions, offsets):
        return 0.5 * q, k + positions[:, None, None]


class Biased(RoPE):
    """Turns as RoPE does, and adds something besides."""

    def score_bias(self):
        return LinearBias(torch.ones(CONFIG.num_heads))


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
            bias = LinearBias(torch.full((CONFIG.num_heads,), 0.1 + index))
            own.score_bias = lambda bias=bias: bias
        return made

    def for_layer(self, layer):
        return self.each[layer]


class Late(PositionalEncoding):
    """Each layer's encoding follows from weights, so that it is made once these are loaded."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(CONFIG.num_layers, CONFIG.num_heads), requires_grad=False
        )
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


class Doubled(Learned):
    def embed(self, x, positions):
        return 2 * super().embed(x, positions)


class Short(RoPE):
    def tables(self, context):
        return super().tables(20)


class Anothers(RoPE):
    """Rotates as another one does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rotate = RoPE(**options | {"base": 3.0}).rotate


def own(encoding, monkeypatch):
    spec = EncodingSpec(f"{__name__}:{encoding}", {})
    for kind, name in ((RoPE, "rope"), (Learned, "learned")):
        if issubclass(globals()[encoding], kind):
            spec = replace(spec, options=ENCODINGS[name].options)
    monkeypatch.setitem(ENCODINGS, encoding, spec)
    return encoding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("encoding", "by_tables", "calls"),
    [
        ("Biased", [True, True, True], 1),
        ("Unlike", [False, False, False], 4),
        ("Mixed", [True, False, False], 2),
        ("Late", [True, True, True], 1),
        ("Doubled", [False, False, False], 2),
        ("Short", [False, False, False], 4),
        ("Anothers", [False, False, False], 4),
    ],
)
def test_encodings_of_ones_own(encoding, by_tables, calls, dtype, kernels, monkeypatch):
    """Also where it is their code that turns, between two calls of the kernels."""
    decoders = both(own(encoding, monkeypatch), kernels, dtype)
    made = stages(decoders[0])
    assert kinds(decoders[0]).count(Kind.ROTATE) == sum(by_tables)
    assert len([stage for stage in made if stage.op is None]) == calls
    if encoding == "Short":
        return  # its tables end before the context does
    for rows in (None, [0, 42]):
        assert equal(decoders, rows)
        assert equal(decoders, rows, lengths=MANY)
    assert equal(decoders, stored=torch.int8)


@pytest.mark.parametrize("encoding", ["Biased", "Unlike", "Mixed", "Late", "Doubled", "Anothers"])
def test_encodings_of_ones_own_beside_torch(encoding, kernels, monkeypatch):
    plain = tiny(own(encoding, monkeypatch), SdpaAttention, torch.float32)
    program = program_of(plain)
    decoder = Decoder(program, CpuExecutor(program, kernels))
    assert close(decoder, plain, torch.float32, lengths=((20, 20), (7, 7)))


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
    decoder, _ = both(own("Careless", monkeypatch), kernels, torch.bfloat16)
    with pytest.raises(EncodingError, match=r"embed of Careless.*\.to\(x\.dtype\)"):
        decoder(ragged(), new_cache(decoder, 12, BLOCK))
    monkeypatch.setattr(Careless, "embed", PositionalEncoding.embed)
    with pytest.raises(EncodingError, match=r"rotate of Careless returns torch\.float32 .* keep"):
        decoder(ragged(), new_cache(decoder, 12, BLOCK))


def test_what_layers_share_they_still_share(kernels):
    """Or arguments of attention would be made for every layer in every step."""
    decoder, _ = both("rope", kernels)
    assert len(decoder.executor._answers.attends) == 1


def test_attention_by_another_backend(kernels):
    """Asked for by --attention: the rest stays in the kernels."""
    plain = tiny("t5", SdpaAttention, torch.float32)
    program = program_of(plain)
    decoder = Decoder(program, CpuExecutor(program, kernels, SdpaAttention))
    attending = [stage for stage in stages(decoder) if isinstance(stage.op, Attend)]
    assert len(attending) == CONFIG.num_layers
    for lengths in (LENGTHS, MANY):
        assert close(decoder, plain, torch.float32, lengths=lengths)


# ------------------------------------------------------------------------ steps and times


def cache(decoder, stored=None):
    made = full_of_nan(new_cache(decoder, 12, BLOCK, stored))
    if stored is torch.int8:
        made.whole.keys.zero_(), made.whole.values.zero_()
    return made


def same(decoders, batch, ours, theirs):
    """Of both ways: logits, and what they store."""
    ones, others = decoders
    pairs = [(ones(batch, ours), others(batch, theirs))]
    pairs += zip(ours.whole, theirs.whole, strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


def fresh_copy(batch, **changes):
    """In other tensors."""
    tensors = {name: getattr(batch, name).clone() for name in INTEGERS}
    return replace(batch, **tensors | changes)


@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "learned", "t5-materialised"])
def test_a_batch_that_is_changed_in_place(encoding, kernels):
    """As steps that decode change it; another one comes between, and another cache."""
    decoders = both(encoding, kernels)
    decoder, op_by_op = decoders
    ours, theirs, others = (cache(decoder) for _ in range(3))
    assert same(decoders, ragged(FRESH), ours, theirs)
    assert same(decoders, ragged(FRESH), others, cache(decoder))
    batch = ragged(((38, 1), (6, 1), (19, 1)))
    between = ragged(((20, 20), (9, 9)))
    for step in range(6):
        assert torch.equal(decoder(batch, ours), op_by_op(fresh_copy(batch), theirs))
        if step == 3:
            assert same(decoders, between, cache(decoder), cache(decoder))
            assert torch.equal(decoder(batch, ours), op_by_op(batch, theirs))
            assert not torch.equal(decoder(batch, others), op_by_op(batch, theirs))
        for name in ("positions", "offsets", "slots", "context_lens"):
            getattr(batch, name).add_(1)
        batch = replace(batch, max_context=batch.max_context + 1)
        batch.tokens.add_(3).remainder_(61)


@pytest.mark.parametrize("token", [-1, 61, 2**40])
def test_a_token_that_is_not_in_the_vocabulary(token, kernels):
    decoder, _ = both("rope", kernels)
    kv = cache(decoder)
    batch = ragged(FRESH)
    batch.tokens[40] = token
    with pytest.raises(IndexError, match="not in the vocabulary"):
        decoder(batch, kv)
    assert all(part.isnan().all() for part in kv.whole)


@pytest.mark.parametrize(
    ("encoding", "apart"),
    [("rope", True), ("nope", True), ("alibi", False), ("Unlike", True), ("Biased", False)],
)
def test_a_timed_pass_hears_from_inside(encoding, apart, kernels, monkeypatch):
    if encoding in globals():
        own(encoding, monkeypatch)
    decoder, _ = both(encoding, kernels)
    timed = TimedDecoder(decoder, every=1)
    batch = ragged([(20, 20), (7, 7)])  # all that is read from the cache is written before
    logits = timed(batch, new_cache(decoder, 12, BLOCK))
    assert torch.equal(logits, decoder(batch, new_cache(decoder, 12, BLOCK)))
    (times,) = timed.drain()
    assert 0 < times.attention < times.forward
    assert (times.position is not None) == apart


def test_the_parts_of_the_time_are_added_up(kernels):
    decoder, _ = both("rope", kernels)
    watch = Watch()
    for _ in range(2):
        before = watch.seconds.clone()
        decoder(ragged(), new_cache(decoder, 12, BLOCK), watch)
        grown = watch.seconds > before
        assert grown[[part for part in Part if part is not Part.ACTIVATION]].all()
    assert not watch.seconds[Part.ACTIVATION]  # linear layers do it
    assert watch.seconds.sum() < watch.read().whole


class Shared(Fire):
    """A bias whose values are not stored one after another: each kind of attention copies it."""

    def between(self, queries, keys):
        far = (queries[..., :, None] - keys[..., None, :]).float() * -0.02
        return far.expand(CONFIG.num_heads, *far.shape)


def test_a_bias_is_kept_for_every_kind_of_attention_that_reads_it(kernels, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "shared", EncodingSpec(f"{__name__}:Shared", FIRE))
    plain = tiny("shared", dtype=torch.float32, windows=(None, 8, None))
    tokens = random.Random(1).choices(range(61), k=1500)  # a bias of many pages
    expected = run_uncached(plain, tokens)
    found = run_uncached(on_kernels(plain, kernels), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_that_reads_what_nothing_wrote_is_refused():
    def block(layer):
        yield layer.norm("mlp_norm", to="z")
        yield from layer.mlp()
        yield ADD

    with pytest.raises(ValueError, match=r"Linear\('n', 'gate up'\) reads 'n', which no op before"):
        tiny("rope", block=block)
