"""Gates that all tokens share are ALiBi's slopes; others are added up where their tokens stand."""

import math
from dataclasses import fields, replace

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncoderDecoderConfig, EncodingSpec
from ropewalk.model.encodings.alibi import slopes
from ropewalk.model.encodings.base import EncodingError, create, stored_gates
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.recipes import program, prompts
from tests.model.attention.test_cpu import alone, problem, spec
from tests.model.attention.triton_here import TritonHere
from tests.model.running import run_uncached
from tests.model.tiny import CONFIG, CPU, in_torch, program_of, tiny
from tests.products import pairs

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [(37, 1), (0, 23), (5, 1), (90, 7), (0, 1), (64, 16), (130, 1)]


def made(config=CONFIG, **options):
    return create(EncodingSpec("forgetting", options), config, 256, CPU)


def test_gates_that_are_all_alike_are_alibis_slopes():
    alibi = tiny("alibi")
    encoding = made()
    for layer in encoding.layers:
        layer.weight.zero_()
        # sigmoid(bias) = exp(-slope)
        layer.bias.copy_(-torch.expm1(slopes(CONFIG.num_heads).double()).log())
    told = program_of(alibi)
    config = replace(told.config, encoding=EncodingSpec("forgetting", {}))
    forgetting = in_torch(program(config, told.weights, encoding))
    tokens = [each * 7 % 61 for each in range(120)]
    found, wanted = (run_uncached(decoder, tokens) for decoder in (forgetting, alibi))
    assert (found - wanted).abs().max() < 1e-5  # gates are stored in float32
    assert (wanted - run_uncached(tiny("nope"), tokens)).abs().max() > 0.1


def test_first_values_keep_what_each_head_needs():
    encoding = made(replace(CONFIG, num_heads=4))
    encoding.first_values(torch.Generator().manual_seed(0))
    for layer in encoding.layers:
        assert 0 < layer.weight.std() < 0.1
        gates = layer.forget_gates().of(torch.zeros(1, CONFIG.hidden_size))[0]
        # So many tokens later 1/e is left.
        assert (-1 / gates).tolist() == pytest.approx([4, 16, 64, 256], rel=1e-4)


def test_a_gate_is_computed_in_float32():
    gates = tiny("forgetting").encoding.for_layer(1).forget_gates()
    x = torch.randn(50, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = gates.of(x.double())
    assert gates.of(x).dtype is torch.float32
    assert exact.dtype is torch.float64 and exact.max() < 0
    assert (gates.of(x) - exact).abs().max() < 1e-5
    extreme = replace(gates, bias=gates.bias + 1000)
    assert extreme.of(x).abs().max() == 0  # an open gate forgets nothing
    assert replace(gates, bias=gates.bias - 1000).of(x).isfinite().all()


def test_options_and_encoders_are_refused():
    with pytest.raises(EncodingError, match=r"takes no options, but got \['base'\]"):
        made(base=2)
    shape = {each.name: getattr(CONFIG, each.name) for each in fields(CONFIG)}
    told = EncoderDecoderConfig(**shape, encoder=CONFIG, start_token=0, end_token=1)
    gated, plain = (create(EncodingSpec(n, {}), told, 8, CPU) for n in ("forgetting", "nope"))
    with pytest.raises(EncodingError, match="needs a decoder: here tokens see all"):
        list(prompts(told, gated, plain))


def test_gates_are_stored_only_where_there_are_any():
    assert stored_gates(made(), CONFIG) == CONFIG.num_heads
    assert stored_gates(tiny("alibi").encoding, CONFIG) == 0


# ----------------------------------------------------------------------------------- kernels


def gated(given, kv, per_token, seed=2):
    """The spec and the cache with gates by which e^-per_token is left after a token, on average."""
    size = (kv.keys.shape[0], given.num_heads, kv.keys.shape[1])
    generator = torch.Generator().manual_seed(seed)
    gates = -2 * per_token * torch.rand(size, generator=generator)
    used = kv.keys[..., 0, 0].isfinite()  # NaN where nothing was written
    gates = gates.masked_fill(~used[:, None], math.nan)
    return replace(given, gated=True), replace(kv, gates=gates)


def error(backend, given, q, kv, batch):
    wide = replace(given, dtype=torch.float64)
    kv64 = replace(kv, keys=kv.keys.double(), values=kv.values.double())
    exact = ReferenceAttention(wide)(q.double(), kv64, batch, None, None)
    return float((backend(given)(q, kv, batch, None, None) - exact).abs().max())


@pairs(
    name=["cpu", "sdpa", "triton"],
    heads=[(6, 2), (4, 4), (3, 1)],
    size=[1, 4, 16],
    window=[None, 21],
    per_token=[0.01, 3.0],
)
def test_kernels_add_up_the_gates_between(name, heads, size, window, per_token, backends):
    given = spec(*heads, window=window)
    lengths = LENGTHS[:3] if name == "triton" else LENGTHS  # which may be interpreted
    q, kv, batch = problem(given, size, lengths)
    given, kv = gated(given, kv, per_token)
    assert error(backends[name], given, q, kv, batch) < 1e-5
    ungated = ReferenceAttention(replace(given, gated=False))(q, kv, batch, None, None)
    assert (ReferenceAttention(given)(q, kv, batch, None, None) - ungated).abs().max() > 0.01


@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_near_keys_are_exact_in_a_long_context(rows, kernels):
    """From the beginning on, a sum of 9,000 would be rounded to thousandths."""
    given = spec(3, 1, 32)
    q, kv, batch = problem(given, 16, [(3000 - rows, rows)])
    given, kv = gated(given, kv, 3.0)
    for backend in (CpuBackend(kernels), SdpaAttention):
        assert error(backend, given, q, kv, batch) < 2e-6


def test_two_threads_share_a_requests_gates(kernels):
    torch.set_num_threads(2)
    given = spec(6, 2, 64)
    q, kv, batch = problem(given, 16, [(700, 1), (300, 1)])
    given, kv = gated(given, kv, 0.005)
    assert error(CpuBackend(kernels), given, q, kv, batch) < 1e-5


def test_a_prompts_numbers_do_not_depend_on_those_beside_it(kernels, threads):
    """Nor on the tokens after a row: it is in one task with some, which others may not be."""
    given = spec(6, 2, 64)
    lengths = [(0, 129), (63, 1), (0, 64), (70, 97), (64, 2), (700, 1)]
    q, kv, batch = problem(given, 16, lengths)
    given, kv = gated(given, kv, 1.0)
    attend = CpuBackend(kernels)(given)
    threads(1)
    together = attend(q, kv, batch, None, None)
    threads(3)
    assert torch.equal(attend(q, kv, batch, None, None), together)
    for request in range(len(lengths)):
        rows, own = alone(batch, request)
        assert torch.equal(attend(q[rows], kv, own, None, None), together[rows])


@pytest.mark.parametrize("name", ["cpu", "sdpa", "reference", "triton"])
def test_what_later_tokens_forget_rounds_nothing_away(name, backends):
    """Gates that all but close, behind some of a prompt's queries and before others."""
    given = spec(6, 2)
    q, kv, batch = problem(given, 16, [(0, 90), (40, 50), (70, 1)])
    given, kv = gated(given, kv, 0.05)
    closed = torch.rand(kv.gates.shape, generator=torch.Generator().manual_seed(4)) < 0.1
    kv = replace(kv, gates=kv.gates.masked_fill(closed & kv.gates.isfinite(), -1e5))
    assert error(backends[name], given, q, kv, batch) < 1e-5


def test_a_closed_gate_leaves_those_after_it_exact():
    """Of a step's last token, on a GPU: a key's own gate is not part of its sum."""
    given = spec(6, 2)
    q, kv, batch = problem(given, 16, [(200, 1)])
    given, kv = gated(given, kv, 0.05)
    block, offset = batch.block_tables[0, 12], 0  # nine tokens before
    kv.gates[block, :, offset] = -1e6
    assert error(TritonHere, given, q, kv, batch) < 1e-5


def test_training_in_half_precision_computes_gates_as_serving_does():
    gates = tiny("forgetting").encoding.for_layer(1).forget_gates()
    x = torch.randn(50, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = gates.of(x)
    assert torch.equal(found, gates.of(x))
