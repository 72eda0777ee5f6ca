"""RoPE in Triton against RoPE in torch; on a GPU if there is one, else in the interpreter."""

import pytest
import torch

from cache.terms import KeyFrame
from model.attention.reference import ReferenceAttention
from model.attention.triton import TritonAttention
from model.config import EncodingSpec
from model.encodings.base import LinearBias
from model.encodings.rope import RoPE
from model.kernels.modules import TritonRotate
from model.kernels.substitutes import substitute_on_gpu
from model.rope_scaling import scaling_from
from tests.model.attention.triton_here import DEVICE
from tests.model.tiny import CONFIG, ENCODINGS, WIDE_ROPE, YARN, tiny
from tests.products import thirds

pytestmark = pytest.mark.triton

CONTEXT = 50
POSITIONS = torch.tensor([0, 49, 3, 17], device=DEVICE)
OFFSETS = POSITIONS % 16


@pytest.fixture(autouse=True)
def triton():
    pytest.importorskip("triton", reason="Triton is not installed")


def rope(width, layout="half", frame=KeyFrame.ABSOLUTE, **options):
    given = {"base": 100.0, "context": CONTEXT, "device": DEVICE} | options
    return RoPE(width=width, layout=layout, frame=frame, **given)


def queries_and_keys(head_dim, dtype=torch.float32, heads=9, kv_heads=3, rows=4):
    """Views with gaps between the rows, as the decoder has them; a row for each of POSITIONS."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, _ = qkv.to(DEVICE, dtype).split((heads, kv_heads, kv_heads), dim=1)
    return q, k


def check(original, q, k):
    """Both turn alike, and leave what they are given."""
    before = q.clone(), k.clone()
    expected = original.rotate(q, k, POSITIONS, OFFSETS)
    found = TritonRotate(original)(q, k, POSITIONS, OFFSETS)
    for turned, exact in zip(found, expected, strict=True):
        assert turned.dtype is exact.dtype
        assert turned.shape == exact.shape
        # The interpreter cuts bfloat16 off instead of rounding it.
        step = 0.0 if exact.dtype is torch.float32 else torch.finfo(exact.dtype).eps
        assert ((turned - exact).abs() <= exact.abs() * step).all()
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize(
    ("size", "layout", "dtype"),
    thirds(
        [(64, 64), (10, 10), (80, 20), (12, 2)],
        ["half", "interleaved"],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_it_turns_as_torch_does(size, layout, dtype):
    """Heads of which all turns or a part, of powers of two and of other sizes."""
    head_dim, width = size
    check(rope(width, layout), *queries_and_keys(head_dim, dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (17, 9)])
def test_any_number_of_heads(heads, kv_heads):
    check(rope(6), *queries_and_keys(10, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_block_frame_turns_keys_by_their_offsets(layout):
    original = rope(6, layout, KeyFrame.BLOCK)
    q, k = queries_and_keys(10)
    check(original, q, k)
    assert TritonRotate(original)(q, k, POSITIONS, OFFSETS)[0] is q


@pytest.mark.parametrize("frame", [KeyFrame.ABSOLUTE, KeyFrame.BLOCK])
def test_magnitudes_of_scalings_come_in_once(frame):
    original = rope(10, frame=frame, scaling=scaling_from(YARN))
    assert original.magnitude > 1.1
    check(original, *queries_and_keys(10))


def test_queries_and_keys_may_lie_anyhow():
    """Rows, heads and coordinates at any distance from each other."""
    q, k = queries_and_keys(10)
    q = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    k = k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    check(rope(6), q, k)


@pytest.mark.parametrize("frame", KeyFrame)
def test_no_rows(frame):
    q, k = queries_and_keys(10, rows=0)
    found = TritonRotate(rope(6, frame=frame))(q, k, POSITIONS[:0], OFFSETS[:0])
    assert [each.shape for each in found] == [q.shape, k.shape]


class Counting:
    """In the place of the kernel: how often it is launched."""

    def __init__(self, turn):
        self.turn_itself, self.launches = turn, 0
        self.turn = self

    def __getitem__(self, grid):
        self.launches += 1
        return self.turn_itself[grid]


@pytest.mark.parametrize(
    ("frame", "launches"), [(KeyFrame.ABSOLUTE, 1), (KeyFrame.BLOCK, 1), (KeyFrame.RAW, 0)]
)
def test_one_launch_for_queries_and_keys(frame, launches):
    turning = TritonRotate(rope(6, frame=frame))
    turning.kernels = Counting(turning.kernels.turn)
    q, k = queries_and_keys(10)
    found = turning(q, k, POSITIONS, OFFSETS)
    assert turning.kernels.launches == launches
    assert (found[0] is q, found[1] is k) == (frame is not KeyFrame.ABSOLUTE, launches == 0)


# ------------------------------------------------------------------------ in its place


def in_triton(decoder):
    """Of each layer."""
    return [isinstance(layer.attention.kernel_rotate, TritonRotate) for layer in decoder.layers]


def test_it_is_put_where_rope_turns():
    """Layers 0 and 2 alone."""
    decoder = tiny("rope-scaled", TritonAttention, torch.float32)
    substitute_on_gpu(decoder)
    assert in_triton(decoder) == [True, False, True]


def test_other_attention_keeps_rope_in_torch():
    decoder = tiny("rope", ReferenceAttention, torch.float32)
    substitute_on_gpu(decoder)
    assert not any(in_triton(decoder))


class Biased(RoPE):
    """Turns as RoPE does, and adds something besides."""

    def score_bias(self):
        return LinearBias(torch.ones(CONFIG.heads))


def test_it_is_put_where_a_class_turns_as_rope_does(monkeypatch):
    spec = EncodingSpec(f"{__name__}:Biased", ENCODINGS["rope"].options)
    monkeypatch.setitem(ENCODINGS, "biased", spec)
    decoder = tiny("biased", TritonAttention, torch.float32)
    substitute_on_gpu(decoder)
    assert all(in_triton(decoder))


class Unlike(RoPE):
    """Turns in a way of its own."""

    def rotate(self, q, k, positions, offsets):
        return k.new_zeros(q.shape), k


@pytest.mark.parametrize("kind", [WIDE_ROPE, f"{__name__}:Unlike"])
def test_what_turns_otherwise_is_left_alone(kind, monkeypatch):
    spec = EncodingSpec(kind, ENCODINGS["rope"].options)
    monkeypatch.setitem(ENCODINGS, "other", spec)
    decoder = tiny("other", TritonAttention, torch.float32)
    substitute_on_gpu(decoder)
    assert not any(in_triton(decoder))
