"""Experts in one call give what torch makes of them, whoever else is in the batch."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from ropewalk.model.config import Experts
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.triton.executor import TritonExecutor
from ropewalk.model.layers.executor import routed
from ropewalk.model.program import MixExperts, linears_of, quantized
from tests.model.attention.triton_here import DEVICE
from tests.model.few_bits import round_weights
from tests.model.kernels.test_cpu_executor import DTYPES, LENGTHS, MANY, both, close, equal, found
from tests.model.running import Running, full_of_nan, make_batch, new_cache
from tests.model.tiny import in_torch, on_kernels, program_of, tiny
from tests.products import pairs

# All of them, one, and some.
KINDS = {
    "all": Experts(5, 5, normalized=False),
    "one": Experts(7, 1, normalized=True),
    "some": Experts(9, 3, normalized=False),
    "some normalized": Experts(9, 3, normalized=True),
}


def with_experts(kind, dtype=torch.float32, **changes):
    return tiny("rope", dtype=dtype, experts=KINDS[kind], intermediate_size=20, **changes)


# Where kernels round otherwise than torch, other experts may be picked, unless all are.
@pytest.mark.parametrize("lengths", [LENGTHS, MANY])
@pytest.mark.parametrize(
    ("kind", "dtype", "bits"),
    [
        *((kind, torch.float32, 16) for kind in KINDS),
        *(("all", *rounded) for rounded in ((torch.bfloat16, 16), *product(DTYPES, (8, 4)))),
    ],
)
def test_one_call_is_torch(kind, dtype, bits, lengths, kernels):
    program = program_of(with_experts(kind, dtype, activation="gelu_tanh"))
    exact = in_torch(round_weights(program, bits, kernels))
    tolerance = torch.bfloat16 if bits < 16 else dtype
    assert close(on_kernels(exact, kernels), exact, tolerance, lengths=lengths)


@pairs(kind=KINDS, dtype=DTYPES, count=[1, 2, 3])
def test_threads_and_other_ops_change_nothing(kind, dtype, count, threads, kernels):
    """Bit by bit: one call, op by op, and whichever rows are wanted."""
    threads(count)
    changes = {"experts": KINDS[kind], "intermediate_size": 20}
    decoders = both("rope", kernels, dtype, qk_norm=True, **changes)
    for rows in (None, [41, 5, 3], [190]):
        assert equal(decoders, rows, lengths=MANY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_by_itself_is_the_same(dtype, kernels):
    decoder = on_kernels(with_experts("some", dtype), kernels)
    together = found(decoder, lengths=LENGTHS)[0]
    first = 0
    for length, count in LENGTHS:
        if length == count:  # the others read what was not written
            alone = found(decoder, lengths=((length, count),))[0]
            assert torch.equal(alone, together[first : first + count])
        first += count


def test_a_row_of_nan_is_only_its_own(kernels):
    decoder = on_kernels(with_experts("some normalized"), kernels)
    clean = with_experts("some normalized")
    embedding = program_of(clean).full("embed.weight")
    embedding[7] = torch.nan
    broken = on_kernels(clean, kernels)
    requests = [(Running([t] * 3, [block]), 3) for t, block in ((3, 1), (7, 2), (9, 3))]
    logits, wanted = (
        each(make_batch(requests, 16), full_of_nan(new_cache(each, 5, 16)))
        for each in (broken, decoder)
    )
    assert logits[3:6].isnan().all()
    assert torch.equal(logits[:3], wanted[:3]) and torch.equal(logits[6:], wanted[6:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_score_shows(kind, broken, kernels):
    """Though its expert is not picked, or the others' weights are made to sum to 1."""
    decoder = with_experts(kind)
    program_of(decoder).full("layers.1.mlp.experts.router.weight")[2] = broken
    assert found(decoder)[0].isnan().all()
    assert found(on_kernels(decoder, kernels))[0].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_largest_scores(kind):
    """Written as a loop; of equal scores either may be picked."""
    experts = KINDS[kind]
    scores = torch.randn(40, experts.count, generator=torch.Generator().manual_seed(2))
    shares, picked = routed(experts, scores)
    for row in range(40):
        largest = sorted(range(experts.count), key=lambda each: -scores[row, each])
        assert picked[row].tolist() == largest[: experts.used]
        powers = scores[row].exp()
        total = powers[picked[row]].sum() if experts.normalized else powers.sum()
        torch.testing.assert_close(shares[row], powers[picked[row]] / total)


def test_routers_are_never_rounded():
    program = program_of(with_experts("some"))
    rounded = quantized(program)
    kept = {name for name, weight in rounded.weights.items() if isinstance(weight, torch.Tensor)}
    assert "layers.0.mlp.experts.router.weight" in kept
    assert not kept & {f"{each.name}.weight" for each in linears_of(program.ops)}


@pytest.mark.triton
@pytest.mark.parametrize(
    ("kind", "bits", "dtype", "fresh"),
    [
        ("some", 16, torch.float32, False),
        ("some", 16, torch.float32, True),
        ("all", 16, torch.bfloat16, True),
        ("all", 8, torch.float32, True),
    ],
)
def test_on_triton(kind, bits, dtype, fresh):
    """Prompts, whose experts the host looks at; and steps of single tokens, where it does not."""
    changes = {"num_layers": 1, "windows": (None,), "device": DEVICE}
    program = program_of(with_experts(kind, dtype, **changes))
    program = program if bits == 16 else quantized(program)
    plain, made = in_torch(program), Decoder(program, TritonExecutor(program))
    assert made.executor.recordable
    tokens = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    answers = []
    for each in (plain, made):
        kv = full_of_nan(new_cache(each, 5, 16))
        running = [Running([*prompt, 7], [i + 1]) for i, prompt in enumerate(tokens)]
        logits = each(make_batch([(one, len(one.tokens) - 1) for one in running], 16), kv)
        if fresh:
            ahead = [replace(one, computed=len(one.tokens) - 1) for one in running]
            logits = each(make_batch([(one, 1) for one in ahead], 16), kv)
        answers.append(logits.double())
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    assert (answers[0] - answers[1]).abs().max() <= tolerance * answers[0].abs().max()


@pytest.mark.triton
def test_weights_in_4_bits_are_torchs(kernels):
    program = round_weights(program_of(with_experts("all")), 4, kernels)
    assert not TritonExecutor(program).recordable


def test_what_an_expert_computes():
    op = next(op for op in program_of(with_experts("one")).ops if isinstance(op, MixExperts))
    up, down = replace(op, reads="a", writes="b").linears(3)
    assert (up.reads, up.writes, up.name) == ("a", "gate up", "layers.0.mlp.experts.3.gate_up")
    assert (down.reads, down.writes, down.inputs) == ("h", "b", 20)
