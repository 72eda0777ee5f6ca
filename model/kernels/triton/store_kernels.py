"""Keys and values into the cache, in Triton: `store` rotates on the way, and writes in 8 bits.

A program takes one token's coordinates in a few heads, of queries, or of keys and values. It looks
up the token's angles and its slot itself, so that nothing has to be gathered first.
"""

import triton
import triton.language as tl


# The alignment of `at` and `slots` varies between steps; specialising on it would compile while
# serving.
@triton.jit(do_not_specialize_on_alignment=["at", "slots"])
def store(
    q,  # [T, HEADS, HEAD_DIM], of any strides
    k,  # [T, KV_HEADS, HEAD_DIM], of any strides; likewise v
    v,
    rotated_q,  # like q, contiguous
    keys,  # [blocks, block_size, KV_HEADS, HEAD_DIM], contiguous; likewise values
    values,
    key_scales,  # [blocks, block_size, KV_HEADS] float32 if SCALED; likewise for values
    value_scales,
    slots,  # [T]: where in the cache
    at,  # [T]: rows of the tables
    cosines,  # [positions, PAIRS] float32; likewise sines
    sines,
    q_row,  # strides in elements
    q_head,
    q_dim,
    k_row,
    k_head,
    k_dim,
    v_row,
    v_head,
    v_dim,
    HEADS: tl.constexpr,  # 0 if queries stay as they are
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # of coordinates that are rotated, in queries and keys; 0: in none
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,  # write 8 bits, each head of a token with a scale
    TILE: tl.constexpr,  # heads per program
    ROTATED: tl.constexpr,  # pairs, unrotated coordinates and HEAD_DIM: each padded to a power of 2
    REST: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Programs: (T, tiles of query heads and after them tiles of key heads)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles_of_q: tl.constexpr = (HEADS + TILE - 1) // TILE
    cos, sin = 1.0, 0.0
    if PAIRS:
        angles = tl.load(at + row).to(tl.int64) * PAIRS
        pair = tl.arange(0, ROTATED)
        cos = tl.load(cosines + angles + pair, mask=pair < PAIRS, other=0.0)[None, :]
        sin = tl.load(sines + angles + pair, mask=pair < PAIRS, other=0.0)[None, :]
    if tile < tiles_of_q:
        head = tile * TILE + tl.arange(0, TILE)
        _put(
            q + row * q_row + (head * q_head)[:, None],
            q_dim,
            rotated_q + (row * HEADS + head)[:, None] * HEAD_DIM,
            rotated_q + head[:, None],  # no scales are written
            (head < HEADS)[:, None],
            cos,
            sin,
            HEAD_DIM,
            PAIRS,
            INTERLEAVED,
            False,
            ROTATED,
            REST,
        )
    else:
        head = (tile - tiles_of_q) * TILE + tl.arange(0, TILE)
        there = (head < KV_HEADS)[:, None]
        entry = (tl.load(slots + row).to(tl.int64) * KV_HEADS + head)[:, None]
        _put(
            k + row * k_row + (head * k_head)[:, None],
            k_dim,
            keys + entry * HEAD_DIM,
            key_scales + entry,
            there,
            cos,
            sin,
            HEAD_DIM,
            PAIRS,
            INTERLEAVED,
            SCALED,
            ROTATED,
            REST,
        )
        _put(
            v + row * v_row + (head * v_head)[:, None],
            v_dim,
            values + entry * HEAD_DIM,
            value_scales + entry,
            there,
            1.0,
            0.0,
            HEAD_DIM,
            0,
            False,
            SCALED,
            1,
            DIMS,
        )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def forget(
    x,  # [T, WIDTH], contiguous
    weight,  # [HEADS, WIDTH] float32
    bias,  # [HEADS] float32
    gates,  # [blocks, HEADS, BLOCK_SIZE] float32, contiguous
    slots,  # [T]: where in the cache
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # heads per program
    COLUMNS: tl.constexpr,  # per iteration
):
    """The logarithm of sigmoid(weight · x + bias). Programs: (T, tiles of heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = head < HEADS
    total = tl.load(bias + head, mask=there, other=0.0)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        some = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(
            weight + head[:, None] * WIDTH + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(weights * some[None, :], axis=1)
    # No exponential is of a number above 0.
    logarithm = tl.minimum(total, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(total)))
    slot = tl.load(slots + row).to(tl.int64)
    place = (slot // BLOCK_SIZE * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(gates + place, logarithm, mask=there)


@triton.jit
def _put(
    source,  # [TILE, 1]: addresses of heads
    dim,  # elements between a head's coordinates
    place,  # [TILE, 1]: addresses of the contiguous heads to write
    scale_at,  # [TILE, 1]: addresses of their scales if SCALED
    there,  # [TILE, 1]: which heads exist
    cos,  # [1, ROTATED]
    sin,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATED: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate heads in float32, rounding once; coordinates that are not rotated are copied.

    In 8 bits the same numbers and scales as by cache/kv.py, to the bit.
    """
    narrow = source.dtype.element_ty
    largest = tl.full([source.shape[0], 1], 1e-30, tl.float32)  # as cache/kv.py's LEAST
    if PAIRS:
        pair = tl.arange(0, ROTATED)[None, :]
        left = pair * 2 if INTERLEAVED else pair
        right = left + (1 if INTERLEAVED else PAIRS)
        inside = there & (pair < PAIRS)
        a = tl.load(source + left * dim, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + right * dim, mask=inside, other=0.0).to(tl.float32)
        rotated_a, rotated_b = (a * cos - b * sin).to(narrow), (b * cos + a * sin).to(narrow)
        if SCALED:
            largest = tl.maximum(largest, tl.maximum(_largest(rotated_a), _largest(rotated_b)))
    if 2 * PAIRS < HEAD_DIM:
        beyond = 2 * PAIRS + tl.arange(0, REST)[None, :]
        rest_inside = there & (beyond < HEAD_DIM)
        rest = tl.load(source + beyond * dim, mask=rest_inside, other=0.0)
        if SCALED:
            largest = tl.maximum(largest, _largest(rest))
    steps = tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), largest)
    if SCALED:
        tl.store(scale_at, largest * (1 / 127), mask=there)
    if PAIRS:
        tl.store(place + left, _written(rotated_a, steps, SCALED), mask=inside)
        tl.store(place + right, _written(rotated_b, steps, SCALED), mask=inside)
    if 2 * PAIRS < HEAD_DIM:
        tl.store(place + beyond, _written(rest, steps, SCALED), mask=rest_inside)


@triton.jit
def _largest(x):
    """The largest magnitude in each row [TILE, 1], infinite where one is not a number."""
    wide = x.to(tl.float32)
    magnitude = tl.where(wide == wide, tl.abs(wide), float("inf"))
    return tl.max(magnitude, axis=1, keep_dims=True)


@triton.jit
def _written(x, steps, SCALED: tl.constexpr):
    """What is stored of x [TILE, coordinates]: x, or the nearest number of steps, even at a tie."""
    if SCALED:
        # Beyond 1.5 · 2^23 float32 holds whole numbers alone, so the sum rounds.
        return ((x.to(tl.float32) * steps + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return x
