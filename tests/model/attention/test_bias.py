"""Dense biases: built once for each step, and added where the positions say."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ropewalk.model.attention.base import DenseBias
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.encodings.base import TableBias
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.layers.executor import Pass
from tests.model.attention.test_cpu import problem, spec
from tests.model.paths import BLOCK, four_ragged
from tests.model.running import make_batch, new_cache
from tests.model.tiny import tiny

LENGTHS = [(0, 9), (150, 1), (17, 4), (0, 1)]  # (keys in the cache, new rows)


def with_holes(batch, block_size):
    """As after blocks have been dropped and the others have kept their positions."""
    gaps = torch.tensor([0, 5, 0, 300, 7]).repeat(batch.block_bases.shape[1])
    bases = batch.block_bases + 3 + gaps[: batch.block_bases.shape[1]].cumsum(0)
    counts = batch.query_starts.diff()
    firsts = batch.context_lens - counts
    positions = [
        bases[r, index // block_size] + index % block_size
        for r, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True))
        for index in range(first, first + count)
    ]
    return replace(batch, block_bases=bases, positions=torch.stack(positions))


def built(encoding, batch, block_size):
    now = Pass(batch, SimpleNamespace(block_size=block_size))
    return [now.bias(encoding.for_layer(layer)) for layer in range(3)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_a_dense_bias_is_the_tables_also_where_positions_have_holes(block_size, causal, kernels):
    encoding = tiny("t5-materialised").encoding
    given = spec(6, 2, dtype=torch.float64, causal=causal)
    q, kv, batch = problem(given, block_size, LENGTHS)
    batch = with_holes(batch, block_size)
    dense = built(encoding, batch, block_size)[0]
    assert dense.values.shape == (6, 15, 151)
    table = TableBias(encoding.score_bias().table)
    exact = ReferenceAttention(given)(q, kv, batch, table, None)
    closed = replace(batch, positions=batch.positions - batch.block_bases[0, 0])
    assert (ReferenceAttention(given)(q, kv, closed, table, None) - exact).abs().max() > 1e-3
    for backend in (ReferenceAttention, SdpaAttention, CpuBackend(kernels)):
        assert (backend(given)(q, kv, batch, dense, None) - exact).abs().max() < 1e-12


def test_layers_that_share_a_bias_share_what_is_built():
    batch = make_batch([(four_ragged(random.Random(1))[0], 3)], BLOCK)
    shared = built(tiny("t5-materialised").encoding, batch, BLOCK)
    assert len({id(bias) for bias in shared}) == 1
    own = built(tiny("t5-materialised-per-layer").encoding, batch, BLOCK)
    assert all(isinstance(bias, DenseBias) for bias in [*shared, *own])
    assert len({bias.values.sum().item() for bias in own}) == 3


def test_only_what_asks_for_it_is_built():
    batch = make_batch([(four_ragged(random.Random(1))[0], 3)], BLOCK)
    assert built(tiny("rope").encoding, batch, BLOCK) == [None] * 3
    for form in ("t5", "t5-table"):
        encoding = tiny(form).encoding
        for bias in built(encoding, batch, BLOCK):
            assert type(bias) is TableBias
            assert bias.table is encoding.table


class Listening:
    """The reference, with a list of the biases that its layers were handed."""

    name = "listening"

    def __init__(self):
        self.heard = []

    def __call__(self, given):
        attend = ReferenceAttention(given)

        def attended(q, kv, batch, bias, rotation):
            self.heard.append(bias)
            return attend(q, kv, batch, bias, rotation)

        return attended


def test_every_step_builds_anew_for_all_layers():
    listening = Listening()
    decoder = tiny("t5-materialised", listening)
    sequence = four_ragged(random.Random(1))[0]
    kv = new_cache(decoder, 40, BLOCK)
    for _ in range(2):
        decoder(make_batch([(sequence, 5)], BLOCK), kv)
        sequence.computed += 5
    shapes = [tuple(bias.values.shape) for bias in listening.heard]
    assert shapes == [(6, 5, 5)] * 3 + [(6, 5, 10)] * 3
    assert len({id(bias) for bias in listening.heard}) == 2
