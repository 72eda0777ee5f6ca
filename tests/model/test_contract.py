"""Every encoding on every backend, on every path, equals one uncached pass; that, the oracle.

The check functions are used twice: here on what is right, in test_planted_mistakes.py on what is
wrong.
"""

import random
from functools import cache, partial

import pytest
import torch

from ropewalk.model.attention.base import spec_for, why_not_bias
from ropewalk.model.encodings.base import freeze_all
from tests.model import oracle
from tests.model.in_8_bits import cache_by_hand
from tests.model.paths import BLOCK, PATHS, four_ragged
from tests.model.running import make_batch, new_cache, run_uncached
from tests.model.tiny import ABSOLUTE, CPU, ENCODINGS, IN_KERNELS, on_kernels, parameters_of, tiny
from tests.products import combined, pairs

WINDOWS = (None, 5, None)  # the second layer's is longer than a block, and no multiple of it
EXACT = 1e-10
# With keys and values in 8 bits: the same numbers in float64, and in float32 a few in thousands
# are rounded the other way.
IN_8_BITS = {torch.float64: 1e-6, torch.float32: 0.02}
# The formulas in float64 against sines and cosines of float32 angles at positions up to 230.
FLOAT32_ANGLES = 1e-4
# On average over logits whose deviation is 1.8: rounding to 24 and to 8 bits, in three layers.
ROUNDED = {"float32": 1e-5, "bfloat16": 0.1}  # at most 3e-6 and 0.06 when this was written


pytestmark = pytest.mark.usefixtures("one_thread")


IN_TORCH = ("reference", "sdpa")
BACKENDS = (*IN_TORCH, "cpu")
# One encoding for each of the harder things that attention does about positions.
KINDS = ("alibi-rounded", "table", "t5-materialised", "rope-raw-scaled", "rope-block-partial")
NO_OTHERS = KINDS[::2]  # whose like kernels/test_gpu_layers.py has not among its whole decoders


def computes(backend, encoding):
    """No kernel computes what depends on queries and keys together."""
    return backend in IN_TORCH or encoding in IN_KERNELS


def even(encoding):
    """Of every two encodings, the first: to take turns with."""
    return list(ENCODINGS).index(encoding) % 2 == 0


@pytest.fixture(scope="module")
def made(backends):
    """A decoder with WINDOWS of (encoding, name of a backend, dtype), each made once."""

    @cache
    def make(encoding, backend, dtype=torch.float64):
        return tiny(encoding, backends[backend], dtype, windows=WINDOWS)

    return make


# ------------------------------------------------------------------------------ the checks


def check_oracle(decoder, *, base=0, length=140, tolerance=EXACT, tables=torch.float32):
    """One uncached pass equals the decoder written from the papers."""
    tokens = random.Random(base).choices(range(61), k=length)
    expected = oracle.logits(decoder, tokens, base=base, tables=tables)
    found = run_uncached(decoder, tokens, base=base)
    assert expected.std() > 0.3  # flat logits would agree whatever the positions
    assert (found - expected).abs().max() <= tolerance


def check_path(decoder, uncached, path, tolerance=EXACT, stored=None):
    """Every row of logits that a path computes equals that of one `uncached` pass."""
    # One seed: paths that share requests share what is expected.
    for tokens, base, shared, parts in PATHS[path](decoder, random.Random(0), stored):
        expected = uncached(tuple(tokens), base=base)
        computed = set()
        for first, rows in parts:
            assert (rows.double() - expected[first : first + len(rows)]).abs().max() <= tolerance
            computed.update(range(first, first + len(rows)))
        assert computed == set(range(shared, len(tokens)))


def check_rounding(decoder, uncached, path, tolerance):
    """What a narrower dtype makes of its own weights is right but for rounding: on average."""
    errors = []
    for tokens, base, _, parts in PATHS[path](decoder, random.Random(0)):
        expected = uncached(tuple(tokens), base=base)
        errors += [rows - expected[first : first + len(rows)] for first, rows in parts]
    assert torch.cat(errors).square().mean().sqrt() <= tolerance


@cache
def exactly(encoding, weights=torch.float64):
    """One uncached pass in float64, with weights rounded to a dtype: each is computed once."""
    decoder = tiny(encoding, windows=WINDOWS)
    if weights is not torch.float64:
        rounded = parameters_of(tiny(encoding, dtype=weights, windows=WINDOWS))
        for name, parameter in parameters_of(decoder).items():
            parameter.copy_(rounded[name])
        freeze_all(decoder.encoding)
    return cache(partial(run_uncached, decoder))


@cache
def exactly_in_8_bits(encoding):
    """The same with keys and values rounded by hand; in the paths' blocks, which storages go by."""
    decoder = tiny(encoding, windows=WINDOWS)
    return cache(partial(run_uncached, decoder, block_size=BLOCK, make_cache=cache_by_hand))


# ---------------------------------------------------------------------- on what is right


# A backend sees how many rows of each request are in a step, not which path the step is of.
@pairs(
    encoding=ENCODINGS,
    path=PATHS,
    backend=BACKENDS,
    possible=lambda encoding, path, backend: computes(backend, encoding),
)
def test_every_path_equals_one_uncached_pass(encoding, path, backend, made):
    check_path(made(encoding, backend), exactly(encoding), path)


# Each encoding on each backend, by turns on one of the paths.
@pytest.mark.parametrize(
    ("encoding", "path", "backend"),
    combined(
        ENCODINGS,
        PATHS,
        BACKENDS,
        always=lambda encoding, path, backend: (
            (list(ENCODINGS).index(encoding) + 2 * BACKENDS.index(backend)) % len(PATHS)
            == list(PATHS).index(path)
        ),
        possible=lambda encoding, path, backend: computes(backend, encoding),
    ),
)
def test_every_path_in_8_bits_equals_one_uncached_pass(encoding, path, backend, made):
    """What is attended to is what was stored, of the same chunk too: hits and preemptions agree."""
    dtype = torch.float32 if backend == "cpu" else torch.float64  # which the kernel has not
    decoder = made(encoding, backend, dtype)
    check_path(decoder, exactly_in_8_bits(encoding), path, IN_8_BITS[dtype], torch.int8)


@pytest.mark.parametrize(
    ("encoding", "dtype", "backend"),
    combined(
        ENCODINGS,
        ROUNDED,
        (*BACKENDS, "triton"),  # which has no float64
        always=lambda encoding, dtype, backend: (
            backend == ("sdpa" if even(encoding) == (dtype == "float32") else "cpu")
            or (backend == "triton" and dtype == "float32" and encoding in NO_OTHERS)
        ),
        possible=lambda encoding, dtype, backend: computes(backend, encoding),
    ),
)
def test_narrower_numbers_are_only_rounded(encoding, dtype, backend, made):
    narrow = getattr(torch, dtype)
    # Triton's interpreter needs milliseconds for a program: the path with one step.
    path = "prefill" if backend == "triton" else "ragged"
    uncached = exactly(encoding, narrow)
    check_rounding(made(encoding, backend, narrow), uncached, path, ROUNDED[dtype])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_kernels_refuse_what_they_do_not_compute(encoding, backends):
    """By the kind of bias: a server then takes another backend."""
    decoder = tiny(encoding, dtype=torch.float32)
    given = spec_for(decoder.config, torch.float32, CPU, decoder.encoding)
    refused = backends["cpu"].why_not(given) or ""
    assert refused == (why_not_bias(given) or "")  # which Triton's asks as well
    assert ("does not know a bias of the kind" in refused) == (encoding not in IN_KERNELS)


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "table"])
def test_one_uncached_pass_equals_the_oracle(encoding):
    decoder = tiny(encoding)
    check_oracle(decoder, length=40)
    check_oracle(decoder, base=90)
    check_oracle(decoder, base=190, length=40, tolerance=FLOAT32_ANGLES, tables=torch.float64)


SHAPES = {
    "one-key-head": {"num_kv_heads": 1, "num_heads": 5, "head_dim": 10}
    | {"qkv_bias": True, "qk_norm": True},
    "many-heads": {"num_heads": 12, "num_kv_heads": 12, "hidden_size": 17},
    "norms-of-all-heads": {"qk_norm": True, "qk_norm_whole": True, "logit_scale": 0.7},
    "windows": {"windows": WINDOWS},
    "gpt2": {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh"}
    | {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_embeddings": True},
    "opt-350m": {"norm": "layer", "norm_bias": True, "gated": False, "activation": "relu"}
    | {"block": "post_norm", "embed_width": 11},
    "neox": {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu"}
    | {"block": "parallel", "head_bias": True},
    "gptj": {"norm": "layer", "gated": False, "block": "parallel_one_norm"},
    "capped": {"score_cap": 0.4, "logit_cap": 0.9, "logit_scale": 1.3, "windows": WINDOWS},
    "bloom": {"embed_norm": True, "embed_scale": 3.0, "qkv_clip": 0.9, "attention_scale": 0.2},
}


@pytest.mark.parametrize("encoding", ["rope", "t5", "alibi", "learned"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoders_of_every_shape_equal_the_oracle(shape, encoding):
    check_oracle(tiny(encoding, **SHAPES[shape]), length=50)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoders_of_every_shape_on_every_backend(shape, backend, backends):
    changes = SHAPES[shape]
    exact = partial(run_uncached, tiny("rope", **changes))
    check_path(tiny("rope", backends[backend], **changes), exact, "ragged")


# ------------------------------------------------------------------------------ properties


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_swapping_two_tokens_changes_the_last_logits(encoding):
    decoder = tiny(encoding)
    tokens = [5, 9, 33, 7, 21, 8]
    swapped = [9, 5, *tokens[2:]]
    difference = run_uncached(decoder, tokens)[-1] - run_uncached(decoder, swapped)[-1]
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_adding_a_constant_to_all_positions(encoding):
    decoder, tokens = tiny(encoding), random.Random(1).choices(range(61), k=20)
    moved = (run_uncached(decoder, tokens, base=100) - run_uncached(decoder, tokens)).abs().max()
    # Some divide or multiply by the query's position, rounded ALiBi rounds by the key's, and groups
    # have ends.
    if encoding in {*ABSOLUTE, "fire", "alibi-rounded", "rope-far", "sharper", "rope-sharper"}:
        assert moved > 0.1
    elif encoding.startswith("rope"):  # whose angles are float32
        assert moved < FLOAT32_ANGLES
    else:
        assert moved <= EXACT


def test_batch_mates_change_no_bit(kernels):
    """The CPU kernels sum every row independently of the rest of the batch."""
    decoder = on_kernels(tiny("table", dtype=torch.float32), kernels)
    rng = random.Random(5)
    together = four_ragged(rng)
    kv = new_cache(decoder, 40, BLOCK)
    everything = decoder(make_batch([(s, len(s.tokens)) for s in together], BLOCK), kv)
    start = 0
    for sequence in together:
        alone = run_uncached(decoder, sequence.tokens, block_size=BLOCK)
        rows = everything[start : start + len(sequence.tokens)]
        assert torch.equal(rows, alone)
        start += len(sequence.tokens)
