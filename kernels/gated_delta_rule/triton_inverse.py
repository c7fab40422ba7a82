"""The inverse of a unit lower triangular matrix in Triton, by blocks.

No intermediate is larger than the result, also where keys are nearly parallel: a product of powers
of the matrix would need far more digits than float32 has.
"""

# mypy: ignore-errors
# In Triton a tuple may grow in a loop that is unrolled.

import triton
import triton.language as tl


@triton.jit
def invert_blocks(a, scratch, C: tl.constexpr):
    """(I + d)^-1 of the C / 16 diagonal blocks d of a strictly lower triangular `a`, row by row.

    Every thread has a column of a block in its registers. What it needs of `a` it reads from memory,
    `scratch` [C, 16] in float32, whose cache serves a word to all threads at once.
    """
    N: tl.constexpr = C // 16
    i = tl.arange(0, C)
    column = i[None, :] % 16
    same = i[:, None] // 16 == i[None, :] // 16
    tl.store(scratch + i[:, None] * 16 + column, a, mask=same)
    tl.debug_barrier()
    block = scratch + tl.arange(0, N)[:, None] * 256
    row = block + tl.arange(0, 16)[None, :]
    word = block + tl.zeros((1, 16), tl.int32)
    x = ()
    for r in tl.static_range(0, 16):
        this = tl.load(row + r * 16)
        for j in tl.static_range(0, r):
            this += tl.load(word + (r * 16 + j)) * x[j]
        x += (-this,)
    tl.debug_barrier()
    for r in tl.static_range(0, 16):
        tl.store(row + r * 16, x[r])
    tl.debug_barrier()
    n, r, c = tl.arange(0, N)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, 16)
    x = tl.load(scratch + n * 256 + r * 16 + c[None, None, :])
    return x + tl.where(r == c[None, None, :], 1.0, 0.0)


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
def invert_unit_lower(a, scratch, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular [C, C]: diagonal blocks, then pairs of blocks."""
    x = invert_blocks(a, scratch, C)
    if C >= 32:
        x = merge_blocks(x, a, C // 32, 16, PRECISION)
    if C >= 64:
        x = merge_blocks(x, a, C // 64, 32, PRECISION)
    return tl.reshape(x, (C, C))
