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
def expert(
    x,  # [rows, INPUTS], contiguous
    picked,  # [pairs] experts; pair p is of row p // PAIRS
    weights,  # [experts] addresses of [OUTPUTS, INPUTS]; if GATED [2 · OUTPUTS, INPUTS]: gate, up
    scales,  # [experts] addresses of one for each row of the weight, float32, if SCALED
    out,  # [pairs, OUTPUTS], contiguous
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    STORED: tl.constexpr,  # the type of weights
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
):
    """Programs: (tiles of outputs, pairs). A layer of the expert of each pair."""
    pair = tl.program_id(1)
    number = tl.load(picked + pair)
    weight = tl.load(weights + number).to(tl.pointer_type(STORED))
    scale = tl.load(scales + number).to(tl.pointer_type(tl.float32))
    output = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    there = output < OUTPUTS
    first = weight + output.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros([TILE_OUT], tl.float32)
    up = tl.zeros([TILE_OUT], tl.float32)
    for start in range(0, INPUTS, TILE_IN):
        column = start + tl.arange(0, TILE_IN)
        inside = column < INPUTS
        given = x + (pair // PAIRS).to(tl.int64) * INPUTS + column
        part = tl.load(given, mask=inside, other=0.0).to(tl.float32)[None, :]
        read = there[:, None] & inside[None, :]
        factors = tl.load(first + column[None, :], mask=read, other=0).to(tl.float32)
        total += tl.sum(factors * part, axis=1)
        if GATED:
            beyond = first + OUTPUTS * INPUTS + column[None, :]
            up += tl.sum(tl.load(beyond, mask=read, other=0).to(tl.float32) * part, axis=1)
    if SCALED:
        total *= tl.load(scale + output, mask=there, other=0.0)
    if ACTIVATION != "none":
        total = active(total, ACTIVATION)
    if GATED:
        if SCALED:
            up *= tl.load(scale + OUTPUTS + output, mask=there, other=0.0)
        total *= up
    place = pair.to(tl.int64) * OUTPUTS + output
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _finished(total, scale, bias, there, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """Sums [ROWS, TILE_OUT] with their outputs' scales and biases, at addresses [TILE_OUT]."""
    if SCALED:
        total *= tl.load(scale, mask=there, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias, mask=there, other=0.0).to(tl.float32)[None, :]
    return total
