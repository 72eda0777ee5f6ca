"""A linear layer for few rows, in Triton: reading its weights is what takes the time.

A program computes a few outputs of all rows, and reads their weights once, in the order in which
they lie. What stands before and after such a layer is computed on the way, without launches of its
own: RMSNorm, an activation, a gate, the residual.
"""

import triton
import triton.language as tl

from ropewalk.model.kernels.triton.layer_kernels import active


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,  # [rows, INPUTS], contiguous
    weight,  # [OUTPUTS, INPUTS], contiguous; if GATED [2 · OUTPUTS, INPUTS]: gate, up
    scales,  # one for each row of the weight, float32, if SCALED
    bias,  # one for each row of the weight, if BIASED
    norm,  # [INPUTS] if NORMED
    eps,
    added,  # [rows, OUTPUTS], contiguous, if ADDS
    out,  # [rows, OUTPUTS], contiguous
    rows,  # at most ROWS
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,  # take RMSNorm of x
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # none, silu, gelu, gelu_tanh or relu
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    WIDE: tl.constexpr,  # multiply as float32, as the interpreter's bfloat16 products are wrong
):
    """Programs: (tiles of outputs). Sums and all that follows are float32, rounded once."""
    narrow = x.dtype.element_ty
    FACTOR: tl.constexpr = tl.float32 if WIDE else narrow
    row = tl.arange(0, ROWS)
    live = row < rows
    output = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    there = output < OUTPUTS
    first = weight + output.to(tl.int64)[None, :] * INPUTS
    total = tl.zeros([ROWS, TILE_OUT], tl.float32)
    up = tl.zeros([ROWS, TILE_OUT], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, INPUTS, TILE_IN):
        column = start + tl.arange(0, TILE_IN)
        inside = column < INPUTS
        given = x + row[:, None] * INPUTS + column[None, :]
        part = tl.load(given, mask=live[:, None] & inside[None, :], other=0.0)
        if NORMED:
            # A row's norm is a factor of its sums, so it may be found while these are summed.
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            weights = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
            part = (wide * weights[None, :]).to(narrow)
        read = there[None, :] & inside[:, None]
        factors = tl.load(first + column[:, None], mask=read, other=0)
        total = tl.dot(part.to(FACTOR), factors.to(FACTOR), total, input_precision="ieee")
        if GATED:
            factors = tl.load(first + OUTPUTS * INPUTS + column[:, None], mask=read, other=0)
            up = tl.dot(part.to(FACTOR), factors.to(FACTOR), up, input_precision="ieee")
    if NORMED:
        by = tl.rsqrt(squares / INPUTS + eps)[:, None]
        total *= by
        up *= by
    total = _finished(total, scales + output, bias + output, there, SCALED, BIASED)
    if ACTIVATION != "none":
        total = active(total, ACTIVATION)
    if GATED:
        beyond = OUTPUTS + output
        total *= _finished(up, scales + beyond, bias + beyond, there, SCALED, BIASED)
    place = row[:, None] * OUTPUTS + output[None, :]
    inside = live[:, None] & there[None, :]
    if ADDS:
        total += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(narrow), mask=inside)


@triton.jit
def _finished(total, scale, bias, there, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """Sums [ROWS, TILE_OUT] with their outputs' scales and biases, at addresses [TILE_OUT]."""
    if SCALED:
        total *= tl.load(scale, mask=there, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias, mask=there, other=0.0).to(tl.float32)[None, :]
    return total
