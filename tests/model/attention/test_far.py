"""Keys that are far from a query are turned otherwise than near ones: Self-Extend and ReRoPE."""

from dataclasses import replace

import pytest
import torch

from ropewalk.cache.kv import LayerKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import TableBias
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.encodings.common.rotary import Far
from tests.model.attention.test_cpu import problem, spec
from tests.model.attention.test_rotation import (
    CONTEXT,
    LENGTHS,
    ORDERS,
    TOLERANCE,
    backends,
    made,
    placed,
)
from tests.model.attention.triton_here import TritonHere
from tests.products import pairs

SIDES = {  # the distance from which keys are far, and how many positions share an angle there
    "all far but itself": (1, 4),
    "self-extend": (20, 8),
    "an odd group": (33, 7),
    "one group": (12, None),
    "groups of one": (9, 1),
    "none far": (CONTEXT, 4),
}


def by_hand(given, q, kv, batch, bias, rope, near, group):
    """From the distance that each pair of positions has, in float64."""
    exact, out = ReferenceAttention(given), torch.empty_like(q, dtype=torch.float64)
    for r, context in enumerate(batch.context_lens.tolist()):
        rows = slice(*batch.query_starts[r : r + 2].tolist())
        keys, values, at = exact.gather(kv, batch, r, context)
        queries, own = q[rows].double(), batch.positions[rows]
        distance = own[:, None] - at
        far = own[:, None] // group - at // group + near - near // group
        angles = torch.where(distance < near, distance, far)[..., None] * rope.frequencies.double()
        of_q, of_k = (complex_pairs(each, rope) for each in (queries, keys.double()))
        turned = torch.einsum(
            "qhp,khp,qkp->hqk",
            of_q,
            of_k.conj(),
            torch.polar(torch.full_like(angles, rope.magnitude**2), angles),
        )
        rest = torch.einsum(
            "qhd,khd->hqk", queries[..., rope.width :], keys[..., rope.width :].double()
        )
        scores = (turned.real + rest) * given.scale
        if given.cap:
            scores = given.cap * torch.tanh(scores / given.cap)
        scores = scores + bias.between(own, at)
        hidden = exact.hidden(rows.stop - rows.start, context, q.device)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.double())
    return out


def complex_pairs(x, rope):
    x = x[..., : rope.width]
    if rope.layout == "half":
        return torch.complex(*x.chunk(2, dim=-1))
    return torch.complex(x[..., 0::2], x[..., 1::2])


def problem_of(given, block_size, order, side, **options):
    near, group = SIDES[side]
    q, kv, batch = problem(given, block_size, LENGTHS)
    batch = placed(batch, ORDERS[order](batch, block_size), block_size)
    rope = made(KeyStorage.RAW, given.dtype, near=near, group=group, **options)
    heads = given.num_heads
    bias = TableBias(torch.randn(heads, 9, generator=torch.Generator().manual_seed(2)), zero=2)
    wide = LayerKV(*(each.double() for each in kv))
    exact = by_hand(given, q, wide, batch, bias, rope, near, group or CONTEXT)
    return (q, kv, batch, bias, rope.rotation()), exact


@pairs(
    side=SIDES,
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    heads=[(2, 2, 64), (6, 2, 40), (8, 1, 64)],
    layout=["half", "interleaved"],
    block_size=[1, 5, 16],
    order=ORDERS,
    window=[None, 30],
    cap=[None, 0.7],
)
def test_scores_are_those_of_each_distance(
    side, dtype, heads, layout, block_size, order, window, cap, kernels
):
    given = spec(*heads, dtype, window, cap=cap)
    asked, exact = problem_of(given, block_size, order, side, layout=layout, width=24)
    for backend in backends(kernels):
        assert (backend(given)(*asked) - exact).abs().max() <= TOLERANCE[dtype]


def test_positions_may_lie_anyhow(kernels):
    """As one for all keys, expanded."""
    given = spec(6, 2, 64, torch.float64)
    (*asked, rotation), exact = problem_of(given, 16, "in order", "one group")
    at = (torch.tensor(each).expand(CONTEXT) for each in (rotation.far.start, 0))
    expanded = replace(rotation, far=Far(rotation.far.start, *at))
    for backend in backends(kernels):
        found = backend(given)(*asked, expanded)
        assert (found - exact).abs().max() <= TOLERANCE[torch.float64]


@pytest.mark.triton
@pytest.mark.parametrize(("side", "cap"), [("self-extend", None), ("one group", 0.7)])
def test_in_triton(side, cap):
    given = spec(6, 2, 40, torch.float32, cap=cap)
    asked, exact = problem_of(given, 16, "in order", side, layout="interleaved", width=24)
    assert (TritonHere(given)(*asked) - exact).abs().max() <= TOLERANCE[torch.float32]
