"""RoPE in Triton: `turn` rotates the queries and keys of a layer in one launch.

A program rotates one token's coordinates in a few heads, of queries or of keys, and looks up the
token's angles itself, so that nothing has to be gathered first.
"""

import triton
import triton.language as tl


# The alignment of `at` varies between steps; specialising on it would compile while serving.
@triton.jit(do_not_specialize_on_alignment=["at"])
def turn(
    q,  # [T, HEADS, HEAD_DIM], of any strides
    k,  # [T, KV_HEADS, HEAD_DIM], of any strides
    turned_q,  # like q, contiguous
    turned_k,  # like k, contiguous
    at,  # [T]: rows of the tables
    cosines,  # [positions, PAIRS] float32; likewise sines
    sines,
    q_row,  # strides in elements
    q_head,
    q_dim,
    k_row,
    k_head,
    k_dim,
    HEADS: tl.constexpr,  # may be 0
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # of coordinates that are rotated
    INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,  # heads per program
    TURNED: tl.constexpr,  # pairs, and unrotated coordinates: each padded to a power of 2
    REST: tl.constexpr,
):
    """Programs: (T, tiles of query heads and after them tiles of key heads)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles_of_q: tl.constexpr = (HEADS + TILE - 1) // TILE
    angles = tl.load(at + row).to(tl.int64) * PAIRS
    pair = tl.arange(0, TURNED)
    cos = tl.load(cosines + angles + pair, mask=pair < PAIRS, other=0.0)[None, :]
    sin = tl.load(sines + angles + pair, mask=pair < PAIRS, other=0.0)[None, :]
    if tile < tiles_of_q:
        head = tile * TILE + tl.arange(0, TILE)
        there = (head < HEADS)[:, None]
        source = q + row * q_row + (head * q_head)[:, None]
        place = turned_q + row * (HEADS * HEAD_DIM) + (head * HEAD_DIM)[:, None]
        _turn(source, q_dim, place, there, cos, sin, HEAD_DIM, PAIRS, INTERLEAVED, TURNED, REST)
    else:
        head = (tile - tiles_of_q) * TILE + tl.arange(0, TILE)
        there = (head < KV_HEADS)[:, None]
        source = k + row * k_row + (head * k_head)[:, None]
        place = turned_k + row * (KV_HEADS * HEAD_DIM) + (head * HEAD_DIM)[:, None]
        _turn(source, k_dim, place, there, cos, sin, HEAD_DIM, PAIRS, INTERLEAVED, TURNED, REST)


@triton.jit
def _turn(
    source,  # [TILE, 1]: addresses of heads
    dim,  # elements between a head's coordinates
    place,  # [TILE, 1]: addresses of the contiguous heads to write
    there,  # [TILE, 1]: which heads exist
    cos,  # [1, TURNED]
    sin,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TURNED: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate heads in float32, rounding once; coordinates that are not rotated are copied."""
    pair = tl.arange(0, TURNED)[None, :]
    left = pair * 2 if INTERLEAVED else pair
    right = left + (1 if INTERLEAVED else PAIRS)
    inside = there & (pair < PAIRS)
    a = tl.load(source + left * dim, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + right * dim, mask=inside, other=0.0).to(tl.float32)
    narrow = place.dtype.element_ty
    tl.store(place + left, (a * cos - b * sin).to(narrow), mask=inside)
    tl.store(place + right, (b * cos + a * sin).to(narrow), mask=inside)
    if 2 * PAIRS < HEAD_DIM:
        beyond = 2 * PAIRS + tl.arange(0, REST)[None, :]
        inside = there & (beyond < HEAD_DIM)
        tl.store(place + beyond, tl.load(source + beyond * dim, mask=inside), mask=inside)
