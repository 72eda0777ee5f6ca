"""What a layer computes between its products, in Triton: one launch each.

On a GPU a small model waits for launches, and these would take torch two or three.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x,  # [T, WIDTH], contiguous; likewise added
    added,  # to be added to x first, if ADDS
    total,  # like x: their sum, if ADDS
    out,  # like x: the norm of the sum
    weight,  # [WIDTH]
    bias,  # [WIDTH] if BIASED
    eps,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,  # subtract the mean: LayerNorm instead of RMSNorm
    BIASED: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH padded to a power of 2
):
    """Programs: (T). The sum is rounded once, as a residual is, and normed in float32."""
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    narrow = x.dtype.element_ty
    row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        row += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + place, row.to(narrow), mask=inside)
        row = row.to(narrow).to(tl.float32)
    if CENTRED:
        row = tl.where(inside, row - tl.sum(row, axis=0) / WIDTH, 0.0)
    row *= tl.rsqrt(tl.sum(row * row, axis=0) / WIDTH + eps)
    row *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        row += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, row.to(narrow), mask=inside)


@triton.jit
def gate(
    x,  # [T, 2 · WIDTH], contiguous: gate, up
    out,  # [T, WIDTH], contiguous
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,  # silu, gelu, gelu_tanh or relu
    COLUMNS: tl.constexpr,  # per program
):
    """activation(gate) · up in float32, rounded once. Programs: (T, tiles of COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    place = x + row * (2 * WIDTH) + column
    gated = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * WIDTH + column,
        (active(gated, ACTIVATION) * up).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def active(x, ACTIVATION: tl.constexpr):
    """The activation of x in float32. What is not a number stays so."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z (arXiv 1606.08415).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return tl.where(x < 0, 0.0, x)
