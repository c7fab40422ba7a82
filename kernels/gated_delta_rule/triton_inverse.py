"""The inverse of a unit lower triangular matrix in Triton, by blocks.

No intermediate is larger than the result, also where keys are nearly parallel: a product of powers
of the matrix would need far more digits than float32 has.
"""

import triton
import triton.language as tl


@triton.jit
def invert_blocks(a, N: tl.constexpr):
    """(I + a)^-1 of N strictly lower triangular blocks [N, 16, 16], row by row."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    x = -a
    for i in range(2, 16):
        this = tl.sum(tl.where(row == i, x, 0.0), axis=1)
        this += tl.sum(this[:, :, None] * x, axis=1)
        x = tl.where(row == i, this[:, None, :], x)
    return x + tl.where(row == column, 1.0, 0.0)


@triton.jit
def merge_blocks(x, a, P: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses [P, 2S, 2S] from those [2P, S, S] of the diagonal blocks of `a` [2PS, 2PS]."""
    first = tl.arange(0, P)
    same = first[:, None, None, None, None, None] == first[None, None, None, :, None, None]
    blocks = tl.sum(tl.where(same, tl.reshape(a, (P, 2, S, P, 2, S)), 0.0), axis=3)
    left, _ = tl.split(tl.permute(blocks, (0, 2, 4, 1, 3)))
    _, below = tl.split(left)
    x11, x22 = tl.split(tl.permute(tl.reshape(x, (P, 2, S, S)), (0, 2, 3, 1)))
    if P == 1:
        x11 = tl.reshape(x11, (S, S))
        x22 = tl.reshape(x22, (S, S))
        below = tl.reshape(below, (S, S))
    x21 = -tl.dot(x22, tl.dot(below, x11, input_precision=PRECISION), input_precision=PRECISION)
    rows = tl.join(tl.join(x11, tl.zeros_like(x11)), tl.join(x21, x22))
    rows = tl.reshape(rows, (P, S, S, 2, 2))
    return tl.reshape(tl.permute(rows, (0, 4, 1, 3, 2)), (P, 2 * S, 2 * S))


@triton.jit
def invert_unit_lower(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular [C, C]: diagonal blocks, then pairs of blocks."""
    N: tl.constexpr = C // 16
    block = tl.arange(0, N)
    same = block[:, None, None, None] == block[None, None, :, None]
    x = invert_blocks(tl.sum(tl.where(same, tl.reshape(a, (N, 16, N, 16)), 0.0), axis=2), N)
    if C >= 32:
        x = merge_blocks(x, a, C // 32, 16, PRECISION)
    if C >= 64:
        x = merge_blocks(x, a, C // 64, 32, PRECISION)
    return tl.reshape(x, (C, C))
