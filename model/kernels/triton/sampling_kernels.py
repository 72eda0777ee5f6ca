"""Draws from what top_p and min_p keep of a row, in Triton: nothing is sorted, nobody waits.

For rows whose most likely tokens, which torch finds sooner, do not hold all that is kept.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight; weights rise with their bits


@triton.jit
def draw_kept(
    rows,  # [S, VOCAB] float32, contiguous
    rules,  # [S, 4] float64, contiguous: temperature, top_p, min_p, uniform
    enough,  # [S] bool: whether the token is known already
    tokens,  # [S] int64: set where it is not
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Programs: (S). A row's weights are exp((logit - largest) / temperature), in float32.

    In order of their weights, tokens are kept while the sum before them is below top_p of all, and
    while they have at least min_p of the largest weight; the first one always.
    """
    at = tl.program_id(0).to(tl.int64)
    if tl.load(enough + at) == 0:
        row, rule = rows + at * VOCAB, rules + at * 4
        temperature, top_p = tl.load(rule).to(tl.float32), tl.load(rule + 1)
        min_p, uniform = tl.load(rule + 2), tl.load(rule + 3)
        most = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, VOCAB, TILE):
            token = start + tl.arange(0, TILE)
            most = tl.maximum(most, tl.load(row + token, token < VOCAB, float("-inf")))
        largest = tl.max(most, axis=0)

        kept = _sum_above(row, largest, temperature, -1, VOCAB, TILE)
        least = 0
        if top_p < 1:
            wanted = top_p * kept
            least = _reach(row, largest, temperature, wanted, VOCAB, TILE)
            before = _sum_above(row, largest, temperature, least, VOCAB, TILE)
            weight = least.to(tl.float32, bitcast=True).to(tl.float64)
            equal = tl.maximum(tl.ceil((wanted - before) / weight), 1)  # so many weights, if least
            kept = before + equal * weight
        floor = min_p.to(tl.float32).to(tl.int32, bitcast=True)
        if floor > least:
            kept = _sum_above(row, largest, temperature, floor - 1, VOCAB, TILE)
            least = floor

        wanted = uniform * kept
        chosen = tl.maximum(_reach(row, largest, temperature, wanted, VOCAB, TILE), least)
        weight = chosen.to(tl.float32, bitcast=True).to(tl.float64)
        before = _sum_above(row, largest, temperature, chosen, VOCAB, TILE)
        place = ((wanted - before) / weight).to(tl.int32)  # among equal weights, by token
        seen, found = 0, -1
        for start in range(0, VOCAB, TILE):
            token = start + tl.arange(0, TILE)
            same = _bits(row, token, largest, temperature, VOCAB) == chosen
            rank = seen + tl.cumsum(same.to(tl.int32), axis=0) - 1
            # Rounding may lead past the last of them.
            found = tl.maximum(found, tl.max(tl.where(same & (rank <= place), token, -1), axis=0))
            seen = tl.max(rank, axis=0) + 1
        tl.store(tokens + at, tl.maximum(found, 0).to(tl.int64))


@triton.jit
def _bits(row, token, largest, temperature, VOCAB: tl.constexpr):
    """Of the tokens' weights, as integers of the same order; 0 for no token."""
    logit = tl.load(row + token, token < VOCAB, float("-inf"))
    return tl.exp((logit - largest) / temperature).to(tl.int32, bitcast=True)


@triton.jit
def _sum_above(row, largest, temperature, limit, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Of the weights whose bits are above `limit`, in float64."""
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, VOCAB, TILE):
        bits = _bits(row, start + tl.arange(0, TILE), largest, temperature, VOCAB)
        total += tl.where(bits > limit, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _reach(row, largest, temperature, wanted, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The weight, as bits, at which the sum of those from the largest on exceeds `wanted`."""
    below, found = -1, ONE
    for _ in range(31):
        middle = (below + found) >> 1
        more = _sum_above(row, largest, temperature, middle, VOCAB, TILE) > wanted
        below, found = tl.where(more, middle, below), tl.where(more, found, middle)
    return found
