"""The kernels of `kernels.ccq_query.triton` on a chunk of tokens; the gradients' are in
`triton_gradients`, those that walk a sequence in `triton_states` and `triton_adjoint`.

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

    phi(k) = kappa + h . (k - center) + (k - center)^T F (k - center) / 2,
    F = sum_t a_t (g_t q_t^T + q_t g_t^T),  h = -sum_t a_t (r_t g_t + r'_t q_t),

about a `center`, from which r = q . (mean_t - center) and r', that of g, are measured: the sequence's
last mean or, where `triton_hopper_walk` cannot know that yet, the one after its first chunk. The key's
gradient is the polynomial's, plus the terms of its own chunk.
Dimensions of states: [B, H, N + 1, K, K], entry c at the start of chunk c. The kernels for Hopper write
and read of them, and of F, the tiles of 64 x 64 on and above the diagonal.

A tile that a pipelined loop loads goes to products or to arithmetic, never to both: the buffer of
one that serves both is overwritten while the tensor cores still read it (Triton 3.7.1). Rows of
16-bit tiles have 64 elements or more: the compiler gets the addresses of narrower ones wrong.
"""

import triton
import triton.language as tl

from kernels.triton_blocks import (
    cumulative_decay,
    dot,
    load_tile,
    load_vector,
    store_tile,
    weights_to_end,
)

# A mean is the sum of so many vectors of the keys' type, which is what float32 takes.
MEAN_PARTS = tl.constexpr(3)


@triton.jit
def load_origin(means, columns, width: tl.constexpr, CENTERED: tl.constexpr):
    if CENTERED:
        return load_vector(means, columns, width)
    else:
        return tl.zeros(columns.shape, tl.float32)


@triton.jit
def load_sum(pointer, columns, width: tl.constexpr, ROWS: tl.constexpr):
    """The sum of the rows of a matrix [ROWS, width]."""
    x = load_vector(pointer, columns, width)
    for row in tl.static_range(1, ROWS):
        x += load_vector(pointer + row * width, columns, width)
    return x


@triton.jit
def times_means(x, parts, center_parts, columns, width: tl.constexpr, even: tl.constexpr):
    """x @ mean and x @ center to float32's precision on the tensor cores; see MEAN_PARTS."""
    row = tl.arange(0, 16)
    start = tl.where(row < MEAN_PARTS, parts, center_parts - MEAN_PARTS * width)
    at = (start + row * width)[:, None] + columns[None, :]
    mask = (row < 2 * MEAN_PARTS)[:, None]
    if not even:
        mask = mask & (columns < width)[None, :]
    products = dot(x, tl.trans(tl.load(at, mask=mask, other=0.0)))
    of_mean = (row < MEAN_PARTS)[None, :]
    return tl.sum(tl.where(of_mean, products, 0.0), 1), tl.sum(tl.where(of_mean, 0.0, products), 1)


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
def read_kernel(
    q, k, lam, coarse, fine, starts, other, other_r, counts, means, mean_parts, states, length,
    out, p, r, mean_q, count, d_lam, past, shares, h_terms, kappa_terms,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """R tokens of a chunk: q - lam Sigma q, with r, q . mean and n, and with decays p.

    BACKWARD: of g, with d_lam = -other . Sigma g, where `other` is q and `other_r` its r, instead
    of n. Also, with a_t as of the chunk's start: a_t q_t, these tokens' terms of h and kappa and,
    with decays, the part of other . Sigma g that is the incoming state's.
    """
    even_k: tl.constexpr = K % BK == 0
    even_n: tl.constexpr = K % BN == 0
    WHOLE: tl.constexpr = BK >= K  # q stays in shared memory
    # Tiles for arithmetic come while products run, where there are registers for them.
    EARLY: tl.constexpr = BACKWARD or not HAS_DECAY
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
    center_parts = mean_parts + (sequence * (chunks + 1) + chunks) * MEAN_PARTS * K
    mean_parts += entry * MEAN_PARTS * K
    means += entry * K
    states += entry * K * K
    dtype: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, BK)

    shift = tl.zeros([R], tl.float32)
    center_q = tl.zeros([R], tl.float32)
    if WHOLE:
        q_whole = load_tile(q, rows, left, stride, column, K, even_k)
        k_whole = load_tile(k, at, left, stride, column, K, even_k)
        scores = dot(q_whole, tl.trans(k_whole))
        if CENTERED:
            shift, center_q = times_means(q_whole, mean_parts, center_parts, column, K, even_k)
    else:
        scores = tl.zeros([R, C], tl.float32)
        for start in range(0, K, BK):
            q_tile = load_tile(q, rows, left, stride, start + column, K, even_k)
            k_tile = load_tile(k, at, left, stride, start + column, K, even_k)
            scores += dot(q_tile, tl.trans(k_tile))
            if CENTERED:
                more = times_means(q_tile, mean_parts, center_parts, start + column, K, even_k)
                shift += more[0]
                center_q += more[1]
    causal = (rows[:, None] >= at[None, :]) & live[:, None]
    incoming = tl.load(counts + entry)
    strength = tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32)
    if HAS_DECAY or RESETS:
        first_key = tl.load(starts + rows, mask=live, other=0)
    if BACKWARD:
        r_other = tl.load(other_r + scalar, mask=live, other=0.0)
    since = tl.full([R], 1.0, tl.float32)
    if HAS_DECAY or RESETS:
        causal = causal & (at[None, :] >= first_key[:, None])
        since = (first_key < 0).to(tl.float32)
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
        new = (rows + 1 - tl.maximum(first_key, 0)).to(tl.float32)
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
    mean_of = average + shift
    distance = mean_of - center_q
    if BACKWARD:
        share = -strength * since / n

    projected = tl.zeros([R], tl.float32)
    projected_past = tl.zeros([R], tl.float32)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        if EARLY:
            origin = load_origin(means, n_column, K, CENTERED)
            q_tile = load_tile(q, rows, left, stride, n_column, K, even_n)
        if BACKWARD:
            x_tile = load_tile(other + tokens, rows, left, stride, n_column, K, even_n)
        if WHOLE:
            state = load_tile(states, column, K, K, n_column, K, even_n)
            read = dot(q_whole, state)
        else:
            read = tl.zeros([R, BN], tl.float32)
            for start in range(0, K, BK):
                part = load_tile(q, rows, left, stride, start + column, K, even_k)
                state = load_tile(states, start + column, K, K, n_column, K, even_n)
                read += dot(part, state)
        read = read * kept[:, None]
        if BACKWARD and HAS_DECAY:
            projected_past += tl.sum(x_tile.to(tl.float32) * read, 1)
        k_tile = load_tile(k, at, left, stride, n_column, K, even_n)
        read += dot(weights, k_tile)
        if not EARLY:
            origin = load_origin(means, n_column, K, CENTERED)
            q_tile = load_tile(q, rows, left, stride, n_column, K, even_n)
        if CENTERED:
            read -= total[:, None] * origin[None, :]
        queries = q_tile.to(tl.float32)
        clean = queries - strength[:, None] * read
        store_tile(out, clean, rows, left, stride, n_column, K, even_n)
        if BACKWARD:
            x = x_tile.to(tl.float32)
            projected += tl.sum(x * read, 1)
            x = x * share[:, None]
            store_tile(shares + tokens, x, rows, left, stride, n_column, K, even_n)
            if CENTERED:
                terms = x * distance[:, None] + queries * (share * r_other)[:, None]
                h_term = -tl.sum(terms, 0)
            else:
                h_term = tl.zeros([BN], tl.float32)
            term = ((sequence * chunks + chunk) * blocks + block) * K + n_column
            tl.store(h_terms + term, h_term, mask=n_column < K)
    tl.store(mean_q + scalar, mean_of, mask=live)
    if HAS_DECAY:
        tl.store(p + scalar, average, mask=live)
    if BACKWARD:
        tl.store(d_lam + scalar, -projected, mask=live)
        if HAS_DECAY:
            tl.store(past + scalar, projected_past, mask=live)
            kappa = tl.sum(share * (distance * r_other - projected), 0)
            tl.store(kappa_terms + (sequence * chunks + chunk) * blocks + block, kappa)
    else:
        tl.store(r + scalar, distance, mask=live)
        tl.store(count + scalar, n, mask=live)
