"""Every encoding on every backend: cached, chunked, ragged, shuffled equals one uncached pass."""

import random

import pytest
import torch

from model.attention.cpu import CpuBackend
from model.attention.reference import ReferenceAttention
from model.attention.sdpa import SdpaAttention
from model.kernels.substitutes import substitute
from tests.model.running import Running, make_batch, new_cache, run_uncached
from tests.model.tiny import ENCODINGS, tiny

BLOCK = 4


@pytest.fixture(params=["reference", "sdpa", "cpu"])
def setting(request, kernels):
    """Backend, dtype, tolerance. The oracle always is the reference in float64."""
    return {
        "reference": (ReferenceAttention, torch.float64, 1e-10),
        "sdpa": (SdpaAttention, torch.float64, 1e-10),
        "cpu": (CpuBackend(kernels), torch.float32, 2e-4),
    }[request.param]


def drive(decoder, sequences, rng, oracle, tolerance):
    """Random subsets advance by random chunks until all are computed; every row is compared."""
    blocks = 1 + sum(len(s.blocks) for s in sequences)
    kv = new_cache(decoder, blocks, BLOCK)
    kv._keys.fill_(torch.nan)
    kv._values.fill_(torch.nan)
    while any(s.computed < len(s.tokens) for s in sequences):
        pending = [s for s in sequences if s.computed < len(s.tokens)]
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        work = [(s, rng.choice([1, rng.randint(1, len(s.tokens) - s.computed)])) for s in chosen]
        logits = decoder(make_batch(work, BLOCK, table_width=16), kv)
        start = 0
        for sequence, count in work:
            rows = logits[start : start + count]
            expected = oracle[id(sequence)][sequence.computed : sequence.computed + count]
            assert (rows.double() - expected).abs().max() <= tolerance
            start += count
            sequence.computed += count


def four_ragged(rng, base=0):
    lengths = [37, 9, 1, 22]
    needed = [-(-n // BLOCK) for n in lengths]
    ids = rng.sample(range(1, sum(needed) + 1), sum(needed))
    return [
        Running([rng.randrange(61) for _ in range(n)], [ids.pop() for _ in range(k)], base=base)
        for n, k in zip(lengths, needed, strict=True)
    ]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ragged_shuffled_chunks_equal_one_uncached_pass(encoding, window, setting):
    backend, dtype, tolerance = setting
    rng = random.Random(f"{encoding}/{window}")
    windows = (window, None, window)
    exact = tiny(encoding, windows=windows)
    decoder = tiny(encoding, backend, dtype, windows=windows)
    for base in (0, 11):
        sequences = four_ragged(rng, base)
        oracle = {id(s): run_uncached(exact, s.tokens, base=base) for s in sequences}
        drive(decoder, sequences, rng, oracle, tolerance)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_swapping_two_tokens_changes_the_last_logits(encoding):
    decoder = tiny(encoding)
    tokens = [5, 9, 33, 7, 21, 8]
    swapped = [9, 5, *tokens[2:]]
    difference = run_uncached(decoder, tokens)[-1] - run_uncached(decoder, swapped)[-1]
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("encoding", "relative"),
    [(name, name != "added") for name in ENCODINGS],
)
def test_adding_a_constant_to_all_positions(encoding, relative):
    decoder = tiny(encoding)
    tokens = [random.Random(1).randrange(61) for _ in range(20)]
    moved = run_uncached(decoder, tokens, base=100) - run_uncached(decoder, tokens)
    # RoPE's angles are float32, so its differences carry their rounding.
    assert (moved.abs().max() < 1e-3) == relative


def test_one_key_value_head_and_uneven_head_size(setting):
    backend, dtype, tolerance = setting
    changes = {"kv_heads": 1, "heads": 5, "head_dim": 10, "qkv_bias": True, "qk_norm": True}
    rng = random.Random(3)
    sequences = four_ragged(rng)
    exact = tiny("rope", **changes)
    oracle = {id(s): run_uncached(exact, s.tokens) for s in sequences}
    drive(tiny("rope", backend, dtype, **changes), sequences, rng, oracle, tolerance)


def test_batch_mates_change_no_bit(kernels):
    """The CPU kernels sum every row independently of the rest of the batch."""
    decoder = tiny("table", CpuBackend(kernels), torch.float32)
    substitute(decoder, kernels, torch.float32)
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
