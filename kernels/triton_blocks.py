"""What Triton kernels of several operators are made of. Imports nothing but Triton."""

import triton
import triton.language as tl

# exp of anything below is zero in float32, so that such a decay is a reset.
FORGET = tl.constexpr(-104.0)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """e^x, 0 where it would be below 1.2e-38: one instruction, where Triton's own takes four."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def load_rows(pointer, rows, live, stride, columns, width: tl.constexpr, even: tl.constexpr):
    """Elements [rows, columns] of a matrix that starts at `pointer`; zeros where not `live`."""
    at = pointer + (rows[:, None] * stride + columns[None, :])
    mask = live[:, None]
    if not even:
        mask = mask & (columns < width)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def load_tile(pointer, rows, limit, stride, columns, width: tl.constexpr, even: tl.constexpr):
    """As `load_rows`, with zeros from row `limit` on."""
    return load_rows(pointer, rows, rows < limit, stride, columns, width, even)


@triton.jit
def store_tile(pointer, x, rows, limit, stride, columns, width: tl.constexpr, even: tl.constexpr):
    at = pointer + (rows[:, None] * stride + columns[None, :])
    mask = (rows < limit)[:, None]
    if not even:
        mask = mask & (columns < width)[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(pointer, columns, width: tl.constexpr):
    return tl.load(pointer + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def cumulative_decay(pointer, rows, limit, H: tl.constexpr):
    """The chunk's running sums of log decays, in two parts, and the number of resets so far.

    Multiples of 2^-10 add up exactly, so that a difference of two sums keeps its digits however
    much has decayed before. Resets are counted, because -inf would make the differences NaN.
    """
    g = tl.load(pointer + rows * H, mask=rows < limit, other=0.0).to(tl.float32)
    reset = g == float("-inf")
    g = tl.where(reset, 0.0, g)
    coarse = tl.floor(g * 1024.0) / 1024.0
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0), tl.cumsum(reset.to(tl.int32), 0), reset


@triton.jit
def last(x, at_end):
    """The element of a vector where `at_end` holds."""
    return tl.sum(tl.where(at_end, x, 0), 0)


@triton.jit
def weights_to_end(coarse, fine, resets, at_end):
    """e^{G_C - G_j}, 0 across a reset, and the incoming state's factor e^{G_C}."""
    end_coarse, end_fine, end = last(coarse, at_end), last(fine, at_end), last(resets, at_end)
    gap = (end_coarse - coarse) + (end_fine - fine)
    to_end = tl.exp(tl.where(resets == end, gap, float("-inf")))
    carried = tl.where(end == 0, tl.exp(end_coarse + end_fine), 0.0)
    return to_end, carried
