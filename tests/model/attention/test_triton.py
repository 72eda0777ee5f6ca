"""The Triton kernels against the reference; on a GPU if there is one, else in the interpreter."""

import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropewalk.cache.kv import LayerKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import DenseBias, choose
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.encodings.base import LinearBias, TableBias
from ropewalk.model.encodings.common.rope_scaling import scaling_from
from ropewalk.model.kernels.backends import all_backends
from ropewalk.model.kernels.triton import attention
from ropewalk.model.kernels.triton.attention import SPLIT, SPLITS_AT_ONCE, TritonAttention
from tests.model.attention.test_cpu import biases, problem, spec
from tests.model.attention.test_rotation import TOLERANCE, expected, in_order, made, placed, stored
from tests.model.attention.triton_here import DEVICE, TritonHere, moved
from tests.model.tiny import YARN

pytestmark = pytest.mark.triton

ROUNDING = 1e-5
# (keys in the cache, new rows): of one row and of several, and in the first of no block's length.
LENGTHS = [(30, 1), (17, 2), (0, 9)]
LONG = [(2 * SPLIT + 9, 1), (SPLIT - 1, 1), (SPLIT, 1)]  # splits full and of one key too
SHAPES = {  # heads, key heads, head_dim, window, causal, cap, block size
    "grouped": (6, 2, 64, None, True, None, 16),
    "odd": (3, 1, 10, 7, True, 0.7, 5),
    "many": (20, 1, 80, None, False, None, 16),
    "both-ways": (2, 2, 16, 7, False, 0.4, 1),
}


def error(given, bias, lengths, block_size, changed=lambda given, bias: (given, bias)):
    """The largest difference between the kernel, told what is `changed`, and the reference.

    bias: which of `biases`.
    """
    q, kv, batch = problem(given, block_size, lengths)
    bias = biases(given.num_heads, batch)[bias]
    exact = ReferenceAttention(given)(q, kv, batch, bias, None)
    other, bias = changed(given, bias)
    return (TritonHere(other)(q, kv, batch, bias, None) - exact).abs().max()


@pytest.mark.parametrize("bias", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_single_rows_in_one_batch(shape, bias):
    *shape, window, causal, cap, block_size = SHAPES[shape]
    given = spec(*shape, window=window, causal=causal, cap=cap)
    assert error(given, bias, LENGTHS, block_size) < ROUNDING


@pytest.mark.parametrize(("window", "cap"), [(None, None), (SPLIT + 3, 0.7)])
def test_a_long_request_of_one_row_is_split_and_merged(window, cap):
    given = spec(2, 1, 16, window=window, cap=cap)
    # Of keys, so that those far back count as much as the last.
    assert error(given, 3, LONG, 16) < ROUNDING


def test_programs_share_the_splits_of_a_request(monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS", 12)  # of two key heads and three requests
    assert error(spec(6, 2, 16), 3, LONG, 16) < ROUNDING


def test_keys_that_are_not_seen_may_fill_splits(monkeypatch):
    """As many as `merge` combines at a time."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    given, unseen = spec(2, 1, 16), 32 * (SPLITS_AT_ONCE + 1)
    q, kv, batch = problem(given, 16, [(unseen + 9, 1)])
    bias = DenseBias(torch.zeros(2, 1, batch.max_context))
    bias.values[..., :unseen] = -torch.inf
    exact = ReferenceAttention(given)(q, kv, batch, bias, None)
    torch.testing.assert_close(TritonHere(given)(q, kv, batch, bias, None), exact)


@pytest.mark.parametrize(("heads", "full"), [((2, 1), 16), ((6, 2), 32), ((20, 1), 8)])
def test_tiles_of_rows_find_their_requests(heads, full):
    """full: how many rows fill tiles of 32, each with all heads that share a key head."""
    news = [full - 1, 0, 2 * full, 1, full + 1, 0, 2, 1, 3 * full - 1, 1]
    lengths = list(zip([3, 8, 0, 5, 2, 9, 1, 0, 4, 7], news, strict=True))
    given = spec(*heads, 16)
    assert error(given, 3, [(0, 2 * full + 6)], 16) < ROUNDING
    assert error(given, 3, lengths, 16) < ROUNDING
    assert error(given, 3, lengths[::-1], 16) < ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("storage", "options"),
    [
        (KeyStorage.RAW, {"layout": "interleaved", "width": 24}),
        (KeyStorage.BLOCK, {"scaling": scaling_from(YARN), "width": 40}),
        (KeyStorage.BLOCK, {"width": 6, "layout": "interleaved"}),
    ],
)
def test_keys_that_still_turn(storage, options, dtype):
    """At bases with gaps, where half a head turns, all of it, or three pairs."""
    given = spec(6, 2, 40, dtype)
    q, kv, batch = problem(given, 5, LENGTHS)
    batch = placed(batch, in_order(batch, 5), 5)
    rope = made(storage, dtype, **options)
    bias = TableBias(torch.randn(6, 9, generator=torch.Generator().manual_seed(2)), zero=2)
    exact = expected(given, q, kv, batch, bias, rope, 5)
    kv = stored(kv, batch, 5, rope)
    q, _ = rope.rotate(q, q, batch.positions, batch.offsets)
    found = TritonHere(given)(q, kv, batch, bias, rope.rotation())
    assert (found - exact).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_numbers_are_rounded_at_the_end(dtype):
    given = spec(dtype=dtype)
    q, kv, batch = problem(given, 16, LENGTHS)
    wide = LayerKV(kv.keys.float(), kv.values.float())
    exact = ReferenceAttention(spec())(q.float(), wide, batch, None, None)
    found = TritonHere(given)(q, kv, batch, None, None)
    assert found.dtype is dtype
    # On a GPU the weights are rounded too, before they meet the values.
    allowed = exact.abs() * torch.finfo(dtype).eps + (0 if DEVICE.type == "cpu" else 0.01)
    assert ((found - exact).abs() <= allowed + 1e-5).all()


def test_queries_may_lie_anyhow():
    """Rows, heads and coordinates at any distance from each other."""
    given = spec()
    q, kv, batch = problem(given, 16, LENGTHS)
    attend = TritonHere(given)
    inside_out = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(attend(inside_out, kv, batch, None, None), attend(q, kv, batch, None, None))


def test_batch_mates_change_no_bit():
    given = spec(2, 1, 16)
    q, kv, batch = problem(given, 16, [(40, 1), (9, 3), (SPLIT + 5, 1)])
    together = TritonHere(given)(q, kv, batch, None, None)
    alone = replace(
        batch,
        positions=batch.positions[:1],
        query_starts=batch.query_starts[:2],
        context_lens=batch.context_lens[:1],
        block_tables=batch.block_tables[:1],
        block_bases=batch.block_bases[:1],
        max_query=1,
        max_context=41,
    )
    assert torch.equal(TritonHere(given)(q[:1], kv, alone, None, None), together[:1])


def test_a_request_without_keys_gets_zeros():
    given = spec()
    q, kv, batch = problem(given, 16, [(3, 1), (8, 1)])
    batch = replace(batch, context_lens=torch.tensor([0, 9]))
    found = TritonHere(given)(q, kv, batch, None, None)
    assert (found[0] == 0).all()
    assert not found[1].isnan().any()


def test_a_key_that_is_not_a_number_shows():
    given = spec()
    q, kv, batch = problem(given, 16, [(40, 1), (0, 3)])
    kv.keys[batch.block_tables[0, 1], 3] = torch.nan
    found = TritonHere(given)(q, kv, batch, None, None)
    assert found[0].isnan().all()
    assert not found[1:].isnan().any()


# ------------------------------------------------------------------------ planted mistakes


def wider(by):
    return lambda given, bias: (replace(given, window=given.window + by), bias)


def moved_table(given, bias):
    return given, replace(bias, zero=bias.zero + 1)


def steeper(given, bias):
    return given, LinearBias(bias.slopes * 1.01)


@pytest.mark.parametrize(
    ("mistake", "bias"), [(wider(1), 0), (wider(-1), 0), (moved_table, 2), (steeper, 1)]
)
def test_a_planted_mistake_shows(mistake, bias):
    given = spec(3, 1, 10, window=7)
    assert error(given, bias, LENGTHS, 5, mistake) > 100 * ROUNDING


@pytest.mark.parametrize("lost", [-1, 1])
def test_a_split_that_is_not_merged_shows(lost, monkeypatch):
    """Told of a context a split shorter, or of a window that ends a split sooner."""
    kernels = TritonHere(spec()).attend.kernels
    merge = kernels.merge

    class Merge:
        def __getitem__(self, grid):
            def launch(*tensors, **sizes):
                tensors = list(tensors)
                if lost < 0:
                    tensors[5] = tensors[5] - SPLIT
                else:
                    sizes["WINDOW"] = SPLIT
                merge[grid](*tensors, **sizes)

            return launch

    monkeypatch.setattr(kernels, "merge", Merge())
    given = spec(2, 1, 16)
    assert error(given, 0, LONG, 16) > 100 * ROUNDING


# ------------------------------------------------------------------------- what it refuses


def on_cuda(head_dim=64, dtype=torch.bfloat16):
    return replace(spec(head_dim=head_dim, dtype=dtype), device=torch.device("cuda"))


@pytest.fixture
def complete(monkeypatch):
    """A machine that has all that Triton needs."""
    monkeypatch.setattr("ropewalk.model.kernels.triton.attention.find_spec", lambda name: object())
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(Path, "exists", lambda path: True)


def test_it_comes_first_on_a_gpu_and_never_elsewhere(complete, monkeypatch, caplog):
    backends = all_backends("the device is cuda")
    assert choose(backends, on_cuda()).name == "triton" and not caplog.text
    assert choose(backends, on_cuda(dtype=torch.float64)) is SdpaAttention
    assert choose(backends, on_cuda(head_dim=512)) is SdpaAttention
    assert choose(backends, spec()) is SdpaAttention
    monkeypatch.setattr("ropewalk.model.kernels.triton.attention.find_spec", lambda name: None)
    assert choose(backends, on_cuda()) is SdpaAttention
    assert "Attention on a GPU by sdpa; triton: Triton is not installed" in caplog.text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (spec(), "the device is cpu"),
        (on_cuda(dtype=torch.float64), "it computes bfloat16, float16 and float32, not torch.f"),
        (on_cuda(head_dim=512), "heads have 512 coordinates, and it takes 256 at most"),
    ],
)
def test_what_it_does_not_serve(given, reason, complete):
    assert TritonAttention.why_not(on_cuda()) is None
    assert TritonAttention.why_not(given).startswith(reason)


def test_headers_are_looked_for_where_triton_does(complete, monkeypatch):
    """Not where they were when a Python was built that has been moved since."""
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/build/include")
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(Path, "exists", lambda path: path == there)
    there = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    assert TritonAttention.why_not(on_cuda()) is None


def test_what_a_machine_lacks(complete, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "install python3-dev" in TritonAttention.why_not(on_cuda())
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "install gcc or set CC" in TritonAttention.why_not(on_cuda())
    monkeypatch.setattr("ropewalk.model.kernels.triton.attention.find_spec", lambda name: None)
    assert "Triton is not installed" in TritonAttention.why_not(on_cuda())


# ------------------------------------------------------------------- all on one device


def error_on_one_device(given, lengths, bias):
    """As in a server, where nothing is moved to the backend and back. Beyond a rounding of what is
    right: both are rounded to the same type."""
    given = replace(given, device=DEVICE)
    q, kv, batch = problem(given, 16, lengths)
    some = biases(given.num_heads, batch)[bias]
    there = [moved(each, DEVICE) for each in (q, kv, batch, some)]
    exact = ReferenceAttention(given)(*there, None)
    difference = (TritonAttention(given)(*there, None) - exact).abs()
    return (difference - exact.abs() * torch.finfo(given.dtype).eps).max()


def test_on_one_device():
    pytest.importorskip("triton", reason="Triton is not installed")
    assert error_on_one_device(spec(), LENGTHS, 4) < ROUNDING


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", range(6))
def test_long_contexts_on_a_gpu(bias, dtype, head_dim):
    given = spec(32, 8, head_dim, dtype)
    assert TritonAttention.why_not(replace(given, device=DEVICE)) is None
    allowed = {torch.float32: 1e-4}.get(dtype, 0.02)
    assert error_on_one_device(given, [(1500, 1), (700, 300), (4000, 1), (0, 70)], bias) < allowed
