"""The kernels of `kernels.ccq_query.triton` that read; the gradients' are in `triton_gradients`.

Statistics are kept normalised and centred: the weight n of the tokens seen, their mean, and
Sigma = their covariance, which does not change when all keys move. A chunk measures its keys from
the incoming mean (`origin`), so keys with a large common component lose no digits:

    delta_j = k_j - origin;   n_t = e^{G_t} n + sum_{j<=t} e^{G_t-G_j};   w_tj = e^{G_t-G_j} / n_t
    s_tj = q_t . delta_j;     p_t = sum_j w_tj s_tj
    Sigma_t q_t = e^{G_t} (n / n_t) Sigma q_t + sum_{j<=t} w_tj (s_tj - p_t) delta_j

Without centring the origin and p are 0 and Sigma stands for C / n. Products with the keys
themselves are linear in the origin, which is taken off after them, in float32.

Backward, g = d q_clean: dq = g - lam Sigma g and dlam = -q . Sigma g come from the same read. With
a_tj = -lam_t w_tj, what later tokens ask of a key is a quadratic polynomial in it,

    phi(k) = kappa + h . (k - origin) + (k - origin)^T F (k - origin) / 2,
    F = sum_t a_t (g_t q_t^T + q_t g_t^T),  h = -sum_t a_t (p_t g_t + p'_t q_t),

where p' is p of g. The key's gradient is the polynomial's, plus the terms of its own chunk.
Dimensions of states: [B, H, N + 1, K, K], entry c at the start of chunk c.

A tile that a pipelined loop loads goes to products or to arithmetic, never to both: the buffer of
one that serves both is overwritten while the tensor cores still read it (Triton 3.7.1). Rows of
16-bit tiles have 64 elements or more: the compiler gets the addresses of narrower ones wrong.
"""

import triton
import triton.language as tl

from kernels.triton_blocks import (
    cumulative_decay,
    dot,
    load_rows,
    load_tile,
    load_vector,
    store_tile,
    weights_to_end,
)


@triton.jit
def load_origin(means, columns, width: tl.constexpr, CENTERED: tl.constexpr):
    if CENTERED:
        return load_vector(means, columns, width)
    else:
        return tl.zeros(columns.shape, tl.float32)


@triton.jit
def times_vector(x, vector):
    """x @ vector to float32's precision on the tensor cores: the vector is a sum of x's dtype."""
    row = tl.arange(0, 16)[:, None]
    dtype: tl.constexpr = x.dtype
    rest = vector
    parts = tl.zeros([16, vector.shape[0]], tl.float32)
    for part in tl.static_range(3):
        rounded = rest.to(dtype).to(tl.float32)
        parts += tl.where(row == part, rounded[None, :], 0.0)
        rest -= rounded
    return tl.sum(dot(x, tl.trans(parts.to(dtype))), 1)


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
def last_start(starts, first, C: tl.constexpr, length):
    """Where in the chunk that begins at token `first` its last token's segment starts, or -1."""
    return tl.load(starts + tl.minimum(first + C, length) - 1)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def weigh_kernel(
    k, log_decay, length,
    weighted, means, coarse, fine, starts, to_end, factors,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The keys of a chunk by themselves, as its end sees them.

    Their mean [B, H, N, K], and their distances from it, or with CENTERED off they themselves, times
    the root of their weights, as k. `factors` [B, H, N, 2]: what is left of a weight from before the
    chunk, and the sum of the chunk's.

    HAS_DECAY, for the other kernels, all [B, H, T]: the sums of log decays in the chunk up to a token,
    in two parts; where in the chunk its last reset was, -1 if before it; and its key's weight.
    """
    even: tl.constexpr = K % BK == 0
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    batch, head = sequence // H, sequence % H
    at = tl.arange(0, C)
    left = length - chunk * C
    live = at < left
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    k += token * stride + head * K
    weighted += token * stride + head * K
    entry = sequence * chunks + chunk
    means += entry * K
    weight = live.to(tl.float32)
    carried = 1.0
    if HAS_DECAY:
        here = sequence * length + chunk * C + at
        sums = cumulative_decay(log_decay + token * H + head, at, left, H)
        weight, carried = weights_to_end(sums[0], sums[1], sums[2], at == C - 1)
        weight = tl.where(live, weight, 0.0)
        last_reset = tl.associative_scan(tl.where(sums[3], at, -1), 0, larger)
        tl.store(coarse + here, sums[0], mask=live)
        tl.store(fine + here, sums[1], mask=live)
        tl.store(starts + here, last_reset, mask=live)
        tl.store(to_end + here, weight, mask=live)
    total = tl.sum(weight, 0)
    tl.store(factors + entry * 2, carried)
    tl.store(factors + entry * 2 + 1, total)
    share = weight / total
    root = tl.sqrt(weight)
    for first in range(0, K, BK):
        column = first + tl.arange(0, BK)
        x = load_tile(k, at, left, stride, column, K, even).to(tl.float32)
        origin = load_vector(k, column, K)
        mean = origin + tl.sum((x - origin[None, :]) * share[:, None], 0)
        tl.store(means + column, mean, mask=column < K)
        if CENTERED:
            x = x - mean[None, :]
        store_tile(weighted, x * root[:, None], at, left, stride, column, K, even)


@triton.jit
def states_kernel(
    k, weighted, chunk_means, factors, starts, count, key_sum, key_outer,
    part_counts, part_means, part_states, length,
    counts, means, states, final_sum, final_outer,
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
                tl.store(means + i, mean_i, mask=i < K)
                if tile_i == 0:
                    tl.store(counts, n)
            states += K * K
            means += K
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
            tl.store(means + i, mean_i, mask=i < K)
            tl.store(final_sum + sequence * K + i, n * mean_i, mask=i < K)
            if tile_i == 0:
                tl.store(counts, n)


@triton.jit
def read_kernel(
    q, k, lam, coarse, fine, starts, other, other_p, counts, means, states, length,
    out, p, mean_q, count, d_lam, past, shares, h_terms, kappa_terms,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """R tokens of a chunk: q - lam Sigma q, with p, q . mean and n.

    BACKWARD: of g, with d_lam = -other . Sigma g, where `other` is q and `other_p` its p, instead
    of n. Also, with a_t as of the chunk's start: a_t q_t, these tokens' terms of h and kappa and,
    with decays, the part of other . Sigma g that is the incoming state's.
    """
    even_k: tl.constexpr = K % BK == 0
    even_n: tl.constexpr = K % BN == 0
    WHOLE: tl.constexpr = BK >= K  # q stays in shared memory
    blocks: tl.constexpr = C // R
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // (chunks * blocks)).to(tl.int64)
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % chunks
    batch, head = sequence // H, sequence % H
    at = tl.arange(0, C)
    rows = block * R + tl.arange(0, R)
    left = length - chunk * C
    live = rows < left
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    tokens = token * stride + head * K
    q += tokens
    k += tokens
    out += tokens
    scalar = token * H + head + rows * H
    of_head = sequence * length + chunk * C
    starts += of_head if HAS_DECAY else token
    entry = sequence * (chunks + 1) + chunk
    means += entry * K
    states += entry * K * K
    dtype: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, BK)

    shift = tl.zeros([R], tl.float32)
    if WHOLE:
        q_whole = load_tile(q, rows, left, stride, column, K, even_k)
        k_whole = load_tile(k, at, left, stride, column, K, even_k)
        scores = dot(q_whole, tl.trans(k_whole))
        if CENTERED:
            shift = times_vector(q_whole, load_vector(means, column, K))
    else:
        scores = tl.zeros([R, C], tl.float32)
        for start in range(0, K, BK):
            q_tile = load_tile(q, rows, left, stride, start + column, K, even_k)
            k_tile = load_tile(k, at, left, stride, start + column, K, even_k)
            scores += dot(q_tile, tl.trans(k_tile))
            if CENTERED:
                shift += times_vector(q_tile, load_vector(means, start + column, K))
    causal = (rows[:, None] >= at[None, :]) & live[:, None]
    incoming = tl.load(counts + entry)
    since = tl.full([R], 1.0, tl.float32)
    if HAS_DECAY or RESETS:
        start = tl.load(starts + rows, mask=live, other=0)
        causal = causal & (at[None, :] >= start[:, None])
        since = (start < 0).to(tl.float32)
    if HAS_DECAY:
        coarse_t = tl.load(coarse + of_head + rows, mask=live, other=0.0)
        fine_t = tl.load(fine + of_head + rows, mask=live, other=0.0)
        coarse_j = tl.load(coarse + of_head + at, mask=at < left, other=0.0)
        fine_j = tl.load(fine + of_head + at, mask=at < left, other=0.0)
        since *= tl.exp(coarse_t + fine_t)
        gap = (coarse_t[:, None] - coarse_j[None, :]) + (fine_t[:, None] - fine_j[None, :])
        weight = tl.exp(tl.where(causal, gap, float("-inf")))
        new = tl.where(live, tl.sum(weight, 1), 1.0)
    elif RESETS:
        new = (rows + 1 - tl.maximum(start, 0)).to(tl.float32)
    else:
        new = (rows + 1).to(tl.float32)
    old = since * incoming
    n = old + new
    kept = old / n
    inverse = 1.0 / n
    if CENTERED:
        scores = scores - shift[:, None]
        summed = weight * scores if HAS_DECAY else tl.where(causal, scores, 0.0)
        average = tl.sum(summed, 1) * inverse
        scores = scores - average[:, None]
    else:
        average = tl.zeros([R], tl.float32)
    scores = scores * inverse[:, None]
    weights = (weight * scores if HAS_DECAY else tl.where(causal, scores, 0.0)).to(dtype)
    total = tl.sum(weights.to(tl.float32), 1)
    strength = tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32)
    if BACKWARD:
        share = -strength * since / n
        p_other = tl.load(other_p + scalar, mask=live, other=0.0)

    projected = tl.zeros([R], tl.float32)
    projected_past = tl.zeros([R], tl.float32)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        if WHOLE:
            state = load_tile(states, column, K, K, n_column, K, even_n)
            read = dot(q_whole, state)
        else:
            read = tl.zeros([R, BN], tl.float32)
            for start in range(0, K, BK):
                q_tile = load_tile(q, rows, left, stride, start + column, K, even_k)
                state = load_tile(states, start + column, K, K, n_column, K, even_n)
                read += dot(q_tile, state)
        read = read * kept[:, None]
        if BACKWARD:
            x = load_tile(other + tokens, rows, left, stride, n_column, K, even_n).to(tl.float32)
            if HAS_DECAY:
                projected_past += tl.sum(x * read, 1)
        k_tile = load_tile(k, at, left, stride, n_column, K, even_n)
        read += dot(weights, k_tile)
        if CENTERED:
            origin = load_vector(means, n_column, K)
            read -= total[:, None] * origin[None, :]
        q_tile = load_tile(q, rows, left, stride, n_column, K, even_n).to(tl.float32)
        clean = q_tile - strength[:, None] * read
        store_tile(out, clean, rows, left, stride, n_column, K, even_n)
        if BACKWARD:
            projected += tl.sum(x * read, 1)
            x = x * share[:, None]
            store_tile(shares + tokens, x, rows, left, stride, n_column, K, even_n)
            if CENTERED:
                terms = x * average[:, None] + q_tile * (share * p_other)[:, None]
                h_term = -tl.sum(terms, 0)
            else:
                h_term = tl.zeros([BN], tl.float32)
            term = ((sequence * chunks + chunk) * blocks + block) * K + n_column
            tl.store(h_terms + term, h_term, mask=n_column < K)
    tl.store(p + scalar, average, mask=live)
    tl.store(mean_q + scalar, average + shift, mask=live)
    if BACKWARD:
        tl.store(d_lam + scalar, -projected, mask=live)
        kappa = tl.sum(share * (average * p_other - projected), 0)
        tl.store(kappa_terms + (sequence * chunks + chunk) * blocks + block, kappa)
        if HAS_DECAY:
            tl.store(past + scalar, projected_past, mask=live)
    else:
        tl.store(count + scalar, n, mask=live)
