"""Keys and values stored by Triton and by torch; on a GPU if there is one, else interpreted."""

from types import SimpleNamespace

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.types import KeyStorage
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import LinearBias
from ropewalk.model.encodings.common.rope_scaling import scaling_from
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.triton.launches import TritonStore
from tests.cache.shape import Shape
from tests.model.attention.triton_here import DEVICE
from tests.model.tiny import CONFIG, ENCODINGS, WIDE_ROPE, YARN, on_triton, tiny
from tests.products import pairs

pytestmark = pytest.mark.triton

CONTEXT = 50
POSITIONS = torch.tensor([0, 49, 3, 17], device=DEVICE)
BLOCK_SIZE = 5
BATCH = SimpleNamespace(
    positions=POSITIONS,
    offsets=POSITIONS % BLOCK_SIZE,
    slots=torch.tensor([14, 5, 8, 12], device=DEVICE),
)
NOTHING = SimpleNamespace(**{name: each[:0] for name, each in vars(BATCH).items()})


def rope(width, layout="half", storage=KeyStorage.ABSOLUTE, **options):
    given = {"base": 100.0, "context": CONTEXT, "device": DEVICE} | options
    return RoPE(width=width, layout=layout, storage=storage, **given)


def projected(head_dim, dtype=torch.float32, heads=9, kv_heads=3, rows=4):
    """Queries, keys and values: views with gaps between the rows, as the decoder has them."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=generator)
    return qkv.to(DEVICE, dtype).split((heads, kv_heads, kv_heads), dim=1)


def cache(k, dtype):
    """Of one layer, full of something else."""
    shape = Shape(1, *k.shape[1:])
    kv = KVCache(shape, blocks=3, block_size=BLOCK_SIZE, dtype=dtype, device=DEVICE)
    for part in kv.whole:
        part.fill_(77)
    return kv.layer(0)


def by_torch(encoding, q, k, v, batch, kv):
    if encoding is not None:
        q, k = encoding.rotate(q, k, batch.positions, batch.offsets)
    kv.write(k, v, batch.slots)
    return q


def in_triton(encoding):
    return TritonStore(encoding)


def equal(found, exact):
    assert (found.dtype, found.shape) == (exact.dtype, exact.shape)
    # The interpreter cuts bfloat16 off instead of rounding it.
    narrow = exact.dtype in (torch.bfloat16, torch.float16)
    step = torch.finfo(exact.dtype).eps if narrow else 0.0
    assert ((found.double() - exact.double()).abs() <= exact.double().abs() * step).all()


def check(encoding, q, k, v, stored=None):
    """Both store the same and nothing else, and leave what they are given."""
    before = q.clone(), k.clone(), v.clone()
    kept, used = (cache(k, stored or k.dtype) for _ in range(2))
    exact = by_torch(encoding, q, k, v, BATCH, kept)
    found = in_triton(encoding)(q, k, v, BATCH, used)
    equal(found, exact)
    for part, given in zip(used, kept, strict=True):
        equal(part, given)
    assert all(map(torch.equal, (q, k, v), before))


SIZES = [(64, 64), (10, 10), (80, 20), (12, 2)]  # of heads, and of what is rotated of them
LAYOUTS = ["half", "interleaved"]


@pairs(size=SIZES, layout=LAYOUTS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_it_stores_what_torch_does(size, layout, dtype):
    """Heads of which all turns or a part, of powers of two and of other sizes."""
    head_dim, width = size
    check(rope(width, layout), *projected(head_dim, dtype))


@pairs(size=SIZES, layout=LAYOUTS, storage=[KeyStorage.ABSOLUTE, KeyStorage.BLOCK])
def test_in_8_bits_to_the_bit(size, layout, storage):
    head_dim, width = size
    check(rope(width, layout, storage), *projected(head_dim), torch.int8)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [64, 10])
def test_without_a_rotation(head_dim, stored):
    dtype = torch.float32 if stored is torch.int8 else stored
    given = projected(head_dim, dtype)
    check(None, *given, stored)
    assert in_triton(None)(*given, BATCH, cache(given[1], stored)) is given[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (17, 9)])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_any_number_of_heads(heads, kv_heads, stored):
    check(rope(6), *projected(10, heads=heads, kv_heads=kv_heads), stored)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("storage", [KeyStorage.BLOCK, KeyStorage.RAW])
def test_storages_in_which_queries_stay(layout, storage):
    original = rope(6, layout, storage)
    given = projected(10)
    check(original, *given)
    assert in_triton(original)(*given, BATCH, cache(given[1], torch.float32)) is given[0]


@pytest.mark.parametrize("storage", [KeyStorage.ABSOLUTE, KeyStorage.BLOCK])
def test_magnitudes_of_scalings_come_in_once(storage):
    original = rope(10, storage=storage, scaling=scaling_from(YARN))
    assert original.magnitude > 1.1
    check(original, *projected(10))


@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_they_may_lie_anyhow(stored):
    """Rows, heads and coordinates at any distance from each other."""
    q, k, v = projected(10)
    q = q.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    k = k.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    v = v.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    check(rope(6), q, k, v, stored)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from NumPy
@pytest.mark.parametrize("where", [0, 9])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_gets_a_scale_that_is_not(bad, where):
    """Whether it is rotated or not."""
    q, k, v = projected(10)
    k[1, 2, where] = v[2, 0, where] = bad
    found = cache(k, torch.int8)
    in_triton(rope(6))(q, k, v, BATCH, found)
    blocks, offsets = BATCH.slots // BLOCK_SIZE, BATCH.slots % BLOCK_SIZE
    for scales, finite in (
        (found.key_scales, k.isfinite().all(-1)),
        (found.value_scales, v.isfinite().all(-1)),
    ):
        assert torch.equal(scales[blocks, offsets].isfinite(), finite)


def test_zeros_in_8_bits():
    q, k, v = (torch.zeros_like(each) for each in projected(10))
    check(rope(6), q, k, v, torch.int8)


@pytest.mark.parametrize("storage", KeyStorage)
def test_no_rows(storage):
    q, k, v = projected(10, rows=0)
    kv = cache(k, torch.float32)
    assert in_triton(rope(6, storage=storage))(q, k, v, NOTHING, kv).shape == q.shape
    assert all((part == 77).all() for part in kv)


class Counting:
    """In the place of the kernel: how often it is launched."""

    def __init__(self, store):
        self.store_itself, self.launches = store, 0
        self.store = self

    def __getitem__(self, grid):
        self.launches += 1
        return self.store_itself[grid]


@pytest.mark.parametrize("encoding", [*(rope(6, storage=storage) for storage in KeyStorage), None])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_one_launch(encoding, stored):
    storing = in_triton(encoding)
    storing.kernels = Counting(storing.kernels.store)
    q, k, v = projected(10)
    storing(q, k, v, BATCH, cache(k, stored))
    assert storing.kernels.launches == 1


# ------------------------------------------------------------------------ in its place


def stores(decoder):
    """Of each layer."""
    return decoder.executor._stores[: CONFIG.num_layers]


def test_it_rotates_where_rope_does():
    """Layers 0 and 2 alone."""
    decoder = on_triton(tiny("rope-scaled", dtype=torch.float32))
    assert [store.rope is not None for store in stores(decoder)] == [True, False, True]


class Biased(RoPE):
    """Turns as RoPE does, and adds something besides."""

    def score_bias(self):
        return LinearBias(torch.ones(CONFIG.num_heads))


def test_it_rotates_where_a_class_does_as_rope_does(monkeypatch):
    spec = EncodingSpec(f"{__name__}:Biased", ENCODINGS["rope"].options)
    monkeypatch.setitem(ENCODINGS, "biased", spec)
    decoder = on_triton(tiny("biased", dtype=torch.float32))
    assert stores(decoder) and all(store.rope is not None for store in stores(decoder))


class Unlike(RoPE):
    """Turns in a way of its own."""

    def rotate(self, q, k, positions, offsets):
        return k.new_zeros(q.shape), k


@pytest.mark.parametrize("kind", [WIDE_ROPE, f"{__name__}:Unlike"])
def test_what_turns_otherwise_is_left_alone(kind, monkeypatch):
    spec = EncodingSpec(kind, ENCODINGS["rope"].options)
    monkeypatch.setitem(ENCODINGS, "other", spec)
    assert stores(on_triton(tiny("other", dtype=torch.float32))) == []
