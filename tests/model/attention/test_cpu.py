"""The C++ kernel and SDPA against the reference, at sizes the models do not have."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ropewalk.cache.kv import LayerKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, NoBackend, choose
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.encodings.base import KeyBias, LinearBias, QueryBias, TableBias
from ropewalk.model.kernels.cpu.attention import CpuBackend
from tests.model.running import CPU, Running, make_batch
from tests.products import pairs


class InParts(SdpaAttention):
    """As for batches that are large."""

    most_pairs = 0


def spec(heads=6, kv_heads=2, head_dim=16, dtype=torch.float32, window=None, causal=True, cap=None):
    scale = head_dim**-0.5
    return AttentionSpec(heads, kv_heads, head_dim, scale, dtype, CPU, window, causal, cap=cap)


def problem(given, block_size, lengths):
    """Queries of several requests over a shuffled cache, NaN wherever nothing was written."""
    rng = random.Random(block_size)
    needed = [-(-(done + new) // block_size) for done, new in lengths]
    ids = rng.sample(range(1, sum(needed) + 1), sum(needed))
    shape = (sum(needed) + 1, block_size, given.num_kv_heads, given.head_dim)
    generator = torch.Generator().manual_seed(1)
    kv = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    work = []
    for (done, new), count in zip(lengths, needed, strict=True):
        blocks = [ids.pop() for _ in range(count)]
        index = torch.arange(done + new)
        at = torch.tensor(blocks)[index // block_size], index % block_size
        for cache in kv:
            cache[at] = torch.randn(len(index), *shape[2:], generator=generator)
        work.append((Running([0] * (done + new), blocks, computed=done), new))
    batch = make_batch(work, block_size)
    q = torch.randn(len(batch.tokens), given.num_heads, given.head_dim, generator=generator)
    return q.to(given.dtype), LayerKV(*(cache.to(given.dtype) for cache in kv)), batch


def biases(heads, batch):
    rows = len(batch.tokens)
    generator = torch.Generator().manual_seed(2)
    return [
        None,
        LinearBias(torch.rand(heads, generator=generator)),
        TableBias(torch.randn(heads, 9, generator=generator), zero=2),
        KeyBias(torch.randn(heads, 200, generator=generator)),
        DenseBias(torch.randn(heads, rows, batch.max_context, generator=generator)),
        QueryBias(torch.randn(heads, rows, 6, generator=generator)),
    ]


def test_capped_scores_are_not_rounded_before(kernels):
    """Products in bfloat16 would be off by some tenths where they are large."""
    given = spec(8, 4, 256, torch.bfloat16, cap=50.0)
    q, kv, batch = problem(given, 16, [(0, 128)])
    q = (10 * q.float()).to(torch.bfloat16)
    exact = ReferenceAttention(replace(given, dtype=torch.float64))(
        q.double(), LayerKV(*(each.double() for each in kv)), batch, None, None
    )
    for backend in (CpuBackend(kernels), SdpaAttention, InParts):
        assert (backend(given)(q, kv, batch, None, None) - exact).abs().max() < 0.03


@pairs(
    head_dim=(1, 10, 64, 80, 128),
    heads=((1, 1), (6, 2), (5, 1), (8, 8)),
    block_size=(1, 5, 16),
    window=(None, 1, 7),
    cap=(None, 0.7),
)
def test_fast_backends_equal_the_reference(head_dim, heads, block_size, window, cap, kernels):
    given = spec(*heads, head_dim, window=window, cap=cap)
    q, kv, batch = problem(given, block_size, [(0, 9), (30, 1), (17, 4), (0, 1)])
    for bias in biases(given.num_heads, batch):
        exact = ReferenceAttention(given)(q, kv, batch, bias, None)
        for backend in (CpuBackend(kernels), SdpaAttention, InParts):
            result = backend(given)(q, kv, batch, bias, None)
            assert (result - exact).abs().max() < 1e-5


@pairs(
    head_dim=(10, 64, 80),
    heads=((1, 1), (9, 3), (8, 1)),
    window=(None, 50, 130),
    causal=(True, False),
)
def test_many_rows_in_float64(head_dim, heads, window, causal, kernels):
    """Several tiles, tasks and chunks of keys, their borders included."""
    given = spec(*heads, head_dim, torch.float64, window, causal)
    q, kv, batch = problem(given, 16, [(0, 129), (63, 1), (0, 64), (70, 97), (64, 2)])
    for bias in biases(given.num_heads, batch):
        exact = ReferenceAttention(given)(q, kv, batch, bias, None)
        for backend in (CpuBackend(kernels), SdpaAttention, InParts):
            result = backend(given)(q, kv, batch, bias, None)
            assert (result - exact).abs().max() < 1e-12


LENGTHS = [(39, 1), (256, 1), (500, 1), (20, 1), (98, 2), (700, 1), (1, 1), (63, 1)]
FORMS = {"nothing": 0, "slopes": 1, "table": 2, "dense": 4}


def alone(batch, request):
    """Its rows of the batch, and a batch of its own."""
    first, last = batch.query_starts[request : request + 2].tolist()
    own = replace(
        batch,
        query_starts=torch.tensor([0, last - first]),
        positions=batch.positions[first:last],
        context_lens=batch.context_lens[request : request + 1],
        block_tables=batch.block_tables[request : request + 1],
        block_bases=batch.block_bases[request : request + 1],
    )
    return slice(first, last), own


@pytest.mark.parametrize(
    ("form", "heads", "window", "causal", "dtype"),
    [
        ("nothing", (6, 2), None, True, torch.float32),
        ("slopes", (6, 2), 100, True, torch.float32),
        ("table", (2, 2), None, True, torch.bfloat16),  # two rows of a request are few queries, too
        ("dense", (6, 2), None, True, torch.float64),
        ("nothing", (8, 2), 20, True, torch.float64),
        ("nothing", (2, 2), None, False, torch.float32),
    ],
)
def test_numbers_do_not_depend_on_threads_nor_on_other_requests(
    form, heads, window, causal, dtype, threads, kernels
):
    """Threads that are more than requests share halves of the keys, and then heads of these."""
    given = spec(*heads, 64, dtype, window, causal)
    q, kv, batch = problem(given, 16, LENGTHS)
    bias = biases(given.num_heads, batch)[FORMS[form]]
    exact = ReferenceAttention(given)(q, kv, batch, bias, None)
    attend = CpuBackend(kernels)(given)
    threads(1)
    together = attend(q, kv, batch, bias, None)
    assert (together - exact).abs().max() < (1e-5 if dtype is not torch.bfloat16 else 0.03)
    for count in (5, 17):
        threads(count)
        assert torch.equal(attend(q, kv, batch, bias, None), together)
    for count in (2, 3):
        threads(count)
        for request in range(len(LENGTHS)) if form != "dense" else ():  # by row of the whole batch
            rows, own = alone(batch, request)
            assert torch.equal(attend(q[rows], kv, own, bias, None), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_a_prompts_numbers_do_not_depend_on_those_beside_it(heads, dtype, threads, kernels):
    """Tasks have more queries where all have enough of them, and the last of a prompt has few."""
    given = spec(*heads, 64, dtype)
    q, kv, batch = problem(given, 16, [(0, 98), (0, 2000), (5, 100), (100, 33), (3, 290)])
    attend = CpuBackend(kernels)(given)
    threads(2)
    together = attend(q, kv, batch, None, None)
    for request in (0, 2, 3, 4):
        rows, own = alone(batch, request)
        assert torch.equal(attend(q[rows], kv, own, None, None), together[rows])
    threads(7)
    assert torch.equal(attend(q, kv, batch, None, None), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_a_prompts_numbers_do_not_depend_on_how_it_is_cut(heads, dtype, kernels):
    """A few rows of a prompt are summed like many, unlike as many rows of an answer."""
    given = spec(*heads, 64, dtype)
    q, kv, batch = problem(given, 16, [(0, 300)])
    attend = CpuBackend(kernels)(given)
    whole = attend(q, kv, replace(batch, prompts=torch.tensor([1])), None, None)
    ends = [0, 1, 3, 200, 296, 299, 300]
    for first, last in pairwise(ends):
        own = replace(
            batch,
            query_starts=torch.tensor([0, last - first]),
            positions=batch.positions[first:last],
            context_lens=torch.tensor([last]),
            prompts=torch.tensor([1]),
        )
        assert torch.equal(attend(q[first:last], kv, own, None, None), whole[first:last])
    answer = attend(q[299:], kv, replace(own, prompts=torch.tensor([0])), None, None)
    if dtype is torch.float32:  # rounding to bfloat16 can hide it
        assert not torch.equal(answer, whole[299:])


def test_a_key_that_is_not_a_number_shows(kernels):
    """The server tells such answers from good ones by looking at the logits."""
    given = spec()
    q, kv, batch = problem(given, 16, [(40, 1)])
    kv.keys[batch.block_tables[0, 1], 3] = torch.nan
    assert CpuBackend(kernels)(given)(q, kv, batch, None, None).isnan().all()


FAR = LinearBias(torch.tensor([0.01, 2.0, 0.5, 1.0, 8.0, 0.3]))  # by head


def test_keys_whose_weights_are_zero_are_passed_over(kernels):
    """Under the steep heads of a group alone, and under all heads of the other group."""
    given = spec(6, 2, 64)
    q, kv, batch = problem(given, 16, [(900, 1), (0, 400), (500, 3)])
    exact = ReferenceAttention(given)(q, kv, batch, FAR, None)
    assert (CpuBackend(kernels)(given)(q, kv, batch, FAR, None) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 40])
def test_a_far_key_that_is_not_a_number_shows_too(rows, kernels):
    given = spec()
    q, kv, batch = problem(given, 16, [(900, rows)])
    kv.keys[batch.block_tables[0, 1], 3] = torch.nan
    assert CpuBackend(kernels)(given)(q, kv, batch, FAR, None).isnan().all()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_in_decoding_bfloat16_rounds_once(head_dim, kernels):
    q, kv, batch = in_bfloat16(head_dim, [(0, 1), (40, 1), (100, 1)])
    exact = exactly(head_dim, q, kv, batch)
    result = CpuBackend(kernels)(spec(head_dim=head_dim, dtype=q.dtype))(q, kv, batch, None, None)
    assert ((result - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("head_dim", [1, 7, 16, 64, 80, 128])
def test_of_many_queries_weights_may_be_rounded_too(head_dim, kernels):
    """And nothing else: neither scores nor the sum of weighted values."""
    q, kv, batch = in_bfloat16(head_dim, [(0, 40), (90, 33)])
    exact = exactly(head_dim, q, kv, batch)
    weighed = exactly(head_dim, q, LayerKV(kv.keys, kv.values.abs()), batch)  # weights times |v|
    result = CpuBackend(kernels)(spec(head_dim=head_dim, dtype=q.dtype))(q, kv, batch, None, None)
    assert ((result - exact).abs() <= (exact.abs() + weighed) * 2**-8 + 1e-5).all()
    assert ((result - exact).abs() / weighed).mean() < 2**-10


def in_bfloat16(head_dim, lengths):
    return problem(spec(head_dim=head_dim, dtype=torch.bfloat16), 16, lengths)


def exactly(head_dim, q, kv, batch):
    wide = LayerKV(kv.keys.float(), kv.values.float())
    return ReferenceAttention(spec(head_dim=head_dim))(q.float(), wide, batch, None, None)


@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (64, 40), (80, None)])
def test_more_requests_than_threads_reach_ahead_for(head_dim, window, kernels):
    """Whose first keys are fetched with the last ones of another, prompts among them."""
    rng = random.Random(3)
    lengths = [(rng.randrange(130), rng.choice([1, 1, 1, 2, 40])) for _ in range(50)]
    given = spec(head_dim=head_dim, window=window)
    q, kv, batch = problem(given, 16, lengths)
    exact = ReferenceAttention(given)(q, kv, batch, None, None)
    assert (CpuBackend(kernels)(given)(q, kv, batch, None, None) - exact).abs().max() < 1e-5


def test_a_long_context(kernels):
    given = spec(3, 1, 32)
    q, kv, batch = problem(given, 16, [(3000, 1), (2990, 3)])
    exact = ReferenceAttention(given)(q, kv, batch, None, None)
    assert (CpuBackend(kernels)(given)(q, kv, batch, None, None) - exact).abs().max() < 1e-5


def test_the_first_backend_without_an_objection_is_chosen(kernels):
    backends = [CpuBackend("no compiler"), SdpaAttention, ReferenceAttention]
    assert choose(backends, spec()) is SdpaAttention
    assert choose([CpuBackend(kernels), *backends], spec()).name == "cpu"


def test_a_refusal_names_every_reason(kernels):
    with pytest.raises(NoBackend) as refused:
        choose([CpuBackend("no compiler"), CpuBackend(kernels)], spec(dtype=torch.float16))
    assert str(refused.value) == (
        "No attention backend fits; "
        "cpu: it computes float32, float64 and bfloat16, not torch.float16; "
        "cpu: it computes float32, float64 and bfloat16, not torch.float16."
    )
    with pytest.raises(NoBackend, match="cpu: no compiler"):
        choose([CpuBackend("no compiler")], spec())


def test_a_bias_of_an_unknown_kind_is_refused(kernels):
    """Rather than ignored: no kernel would add it."""

    class Unknown:
        pass

    known, unknown = (replace(spec(6, 2), bias=kind) for kind in (LinearBias, Unknown))
    assert CpuBackend(kernels).why_not(known) is None
    assert "does not know a bias of the kind Unknown" in CpuBackend(kernels).why_not(unknown)
