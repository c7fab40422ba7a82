"""The walk over the keys' statistics; `triton_kernels` has the notation."""

import triton
import triton.language as tl

from kernels.ccq_query.triton_kernels import MEAN_PARTS, last_start
from kernels.triton_blocks import dot, load_rows, load_tile, load_vector, store_tile


@triton.jit
def column_sums(x):
    """Sums over the rows of x, on the tensor cores."""
    first = (tl.arange(0, 16)[:, None] + 0 * tl.arange(0, x.shape[0])[None, :]) == 0
    return tl.sum(dot(tl.trans(x), tl.trans(first.to(tl.float32).to(x.dtype))), 1)


@triton.jit
def triangle(tile, N: tl.constexpr):
    """Row and column of a tile of the upper triangle of N x N tiles, counted by rows."""
    row = 0
    for i in tl.static_range(1, N):
        row += (tile >= i * N - i * (i - 1) // 2).to(tl.int32)
    return row, tile - (row * N - row * (row - 1) // 2) + row


@triton.jit
def store_symmetric(pointer, x, i, j, off_diagonal, width: tl.constexpr, even: tl.constexpr):
    """A tile of a symmetric matrix and, off the diagonal, its mirror image."""
    store_tile(pointer, x, i, width, width, j, width, even)
    if off_diagonal:
        store_tile(pointer, tl.trans(x), j, width, width, i, width, even)


@triton.jit
def store_mean(means, mean_parts, mean, columns, width: tl.constexpr):
    tl.store(means + columns, mean, mask=columns < width)
    rest = mean
    for part in tl.static_range(MEAN_PARTS):
        rounded = rest.to(mean_parts.dtype.element_ty)
        tl.store(mean_parts + part * width + columns, rounded, mask=columns < width)
        rest -= rounded.to(tl.float32)


@triton.jit
def states_kernel(
    k, weighted, chunk_means, factors, starts, count, key_sum, key_outer,
    part_counts, part_means, part_states, length,
    counts, means, mean_parts, states, final_count, final_sum, final_outer,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    PARTS: tl.constexpr, FIRST_WALK: tl.constexpr, INITIAL: tl.constexpr,
    RAW: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of Sigma over a part of a sequence, a chunk a step; writes it at every chunk's start.

    The initial and final states are raw sums; INITIAL says whether there is one. No tokens have no
    mean: the first key stands for it. RAW: keys of equal weights in 16 bits, whose products lose
    nothing in float32; with RESETS `starts` [B, T] has where in its chunk each token's segment
    starts, or -1. Else the keys are those of `weigh_kernel`.

    FIRST_WALK: each of the PARTS by itself, and writes its statistics alone, with in `counts` the
    sum of its weights and what is left at its end of a weight before it. The second walk starts a
    part with the statistics of those before it.
    """
    tiles_n: tl.constexpr = (K + BT - 1) // BT
    tiles: tl.constexpr = tiles_n * (tiles_n + 1) // 2
    even: tl.constexpr = K % BT == 0
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // (tiles * PARTS)).to(tl.int64)
    part = tl.program_id(0) // tiles % PARTS
    tile_i, tile_j = triangle(tl.program_id(0) % tiles, tiles_n)
    off_diagonal = tile_i != tile_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    first = part * chunks // PARTS
    end = (part + 1) * chunks // PARTS
    at = tl.arange(0, C)
    i = tile_i * BT + tl.arange(0, BT)
    j = tile_j * BT + tl.arange(0, BT)
    left = length - first * C
    k += (batch * length + first * C) * stride + head * K
    starts += batch * length
    weighted += (batch * length + first * C) * stride + head * K
    chunk_means += (sequence * chunks + first) * K
    factors += (sequence * chunks + first) * 2
    entry = sequence * PARTS + part if FIRST_WALK else sequence * (chunks + 1) + first
    counts += entry * (2 if FIRST_WALK else 1)
    means += entry * K
    mean_parts += entry * MEAN_PARTS * K
    states += entry * K * K
    dtype: tl.constexpr = k.dtype.element_ty

    if INITIAL and not FIRST_WALK:
        n = tl.load(count + sequence)
        seen = n > 0
        inverse = tl.where(seen, 1.0 / tl.where(seen, n, 1.0), 0.0)
        sum_i = load_vector(key_sum + sequence * K, i, K) * inverse
        sum_j = load_vector(key_sum + sequence * K, j, K) * inverse
        mean_i = tl.where(seen, sum_i, load_vector(k, i, K))
        mean_j = tl.where(seen, sum_j, load_vector(k, j, K))
        state = load_tile(key_outer + sequence * K * K, i, K, K, j, K, even) * inverse
        if CENTERED:
            state -= sum_i[:, None] * sum_j[None, :]
    else:
        n = 0.0
        mean_i = load_vector(k, i, K)
        mean_j = load_vector(k, j, K)
        state = tl.zeros([BT, BT], tl.float32)
    remaining = 1.0
    if PARTS > 1 and not FIRST_WALK:
        for earlier in range(0, part):
            before = sequence * PARTS + earlier
            new = tl.load(part_counts + before * 2)
            old = n * tl.load(part_counts + before * 2 + 1)
            n = old + new
            share = new / n
            step_i = load_vector(part_means + before * K, i, K) - mean_i
            step_j = load_vector(part_means + before * K, j, K) - mean_j
            added = load_tile(part_states + before * K * K, i, K, K, j, K, even)
            if CENTERED:
                added += (old / n) * step_i[:, None] * step_j[None, :]
            state = (old / n) * state + share * added
            mean_i += share * step_i
            mean_j += share * step_j
    for chunk in range(first, end):
        if not FIRST_WALK:
            store_symmetric(states, state.to(dtype), i, j, off_diagonal, K, even)
            if not off_diagonal:
                store_mean(means, mean_parts, mean_i, i, K)
                if tile_i == 0:
                    tl.store(counts, n)
            states += K * K
            means += K
            mean_parts += MEAN_PARTS * K
            counts += 1
        live = at < left
        if RAW:
            carried = 1.0
            new = tl.minimum(left, C).to(tl.float32)
            if RESETS:
                start = last_start(starts, chunk * C, C, length)
                live = live & (at >= start)
                carried = tl.where(start < 0, 1.0, 0.0)
                new -= tl.maximum(start, 0).to(tl.float32)
            k_i = load_rows(k, at, live, stride, i, K, even)
            k_j = load_rows(k, at, live, stride, j, K, even)
            k += C * stride
        else:
            carried = tl.load(factors)
            new = tl.load(factors + 1)
            factors += 2
            k_i = load_rows(weighted, at, live, stride, i, K, even)
            k_j = load_rows(weighted, at, live, stride, j, K, even)
            weighted += C * stride
        left -= C
        old = carried * n
        n = old + new
        kept = old / n
        factor = 1.0 / n
        if FIRST_WALK:
            remaining *= carried
        outer = dot(tl.trans(k_i), k_j)
        if RAW:
            new_i = kept * mean_i + column_sums(k_i) * factor
            if CENTERED:
                new_j = kept * mean_j + column_sums(k_j) * factor
                state = kept * (state + mean_i[:, None] * mean_j[None, :])
                state += factor * outer - new_i[:, None] * new_j[None, :]
                mean_j = new_j
            else:
                state = kept * state + factor * outer
            mean_i = new_i
        else:
            share = new * factor
            step_i = load_vector(chunk_means, i, K) - mean_i
            step_j = load_vector(chunk_means, j, K) - mean_j
            chunk_means += K
            state = kept * state + factor * outer
            if CENTERED:
                state += (kept * share) * step_i[:, None] * step_j[None, :]
            mean_i += share * step_i
            mean_j += share * step_j
    if FIRST_WALK:
        store_tile(states, state, i, K, K, j, K, even)
        if not off_diagonal:
            tl.store(means + i, mean_i, mask=i < K)
            if tile_i == 0:
                tl.store(counts, n)
                tl.store(counts + 1, remaining)
    elif part == PARTS - 1:
        store_symmetric(states, state.to(dtype), i, j, off_diagonal, K, even)
        if CENTERED:
            state += mean_i[:, None] * mean_j[None, :]
        store_symmetric(final_outer + sequence * K * K, n * state, i, j, off_diagonal, K, even)
        if not off_diagonal:
            store_mean(means, mean_parts, mean_i, i, K)
            tl.store(final_sum + sequence * K + i, n * mean_i, mask=i < K)
            if tile_i == 0:
                tl.store(counts, n)
                tl.store(final_count + sequence, n)
