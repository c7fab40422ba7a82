"""The kernels of CCQ's gradients of keys and log decays; `triton_kernels` has the notation."""

import triton
import triton.language as tl

from kernels.ccq_query.triton_kernels import last_start, load_origin
from kernels.triton_blocks import dot, load_tile, load_vector, store_tile


@triton.jit
def pieces_of(x, PIECES: tl.constexpr):
    """A matrix's columns in 1, 2, 4 or 8 parts, which stay in the registers they are in."""
    pieces = (x,)
    if PIECES > 1:
        pieces = halves(x)
    if PIECES > 2:
        pieces = halves(pieces[0]) + halves(pieces[1])
    if PIECES > 4:
        pieces = halves(pieces[0]) + halves(pieces[1]) + halves(pieces[2]) + halves(pieces[3])
    return pieces


@triton.jit
def halves(x):
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def keys_kernel(
    q, k, g, lam, coarse, fine, starts, to_end, count, mean_q, mean_g, means,
    hs, fs, length,
    d_k, polynomials,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BT: tl.constexpr, HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The gradients of R keys of a chunk: phi's as the chunk's end sees it, and its own tokens'.

    With decays also phi of each key, less kappa. BK: rows of F a step. BT: tokens a step.
    """
    WIDTH: tl.constexpr = max(triton.next_power_of_2(K), BK)
    PIECES: tl.constexpr = WIDTH // 64 if WIDTH > 64 else 1
    BN: tl.constexpr = WIDTH // PIECES
    even_k: tl.constexpr = K % BK == 0
    even_n: tl.constexpr = K % BN == 0
    even: tl.constexpr = K == WIDTH
    blocks: tl.constexpr = C // R
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // (chunks * blocks)).to(tl.int64)
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % chunks
    batch, head = sequence // H, sequence % H
    rows = block * R + tl.arange(0, R)
    left = length - chunk * C
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    tokens = token * stride + head * K
    q += tokens
    k += tokens
    g += tokens
    d_k += tokens
    scalar = token * H + head
    of_head = sequence * length + chunk * C
    coarse += of_head
    fine += of_head
    starts += of_head if HAS_DECAY else token
    entry = sequence * chunks + chunk
    center = means + (sequence * (chunks + 1) + chunks) * K
    hs += entry * K
    fs += entry * K * K
    dtype: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, BK)
    every = tl.arange(0, WIDTH)

    d_keys = tl.zeros([R, WIDTH], tl.float32)
    for start in range(0, K, BK):
        k_tile = load_tile(k, rows, left, stride, start + column, K, even_k)
        if CENTERED:
            away = k_tile.to(tl.float32) - load_vector(center, start + column, K)[None, :]
            k_tile = away.to(dtype)
        f = load_tile(fs, start + column, K, K, every, K, even)
        d_keys = tl.dot(k_tile, f, d_keys, input_precision="ieee")
    d_keys += load_vector(hs, every, K)[None, :]
    if HAS_DECAY:
        polynomial = tl.zeros([R], tl.float32)
        pieces = pieces_of(d_keys, PIECES)
        for piece in tl.static_range((K + BN - 1) // BN):
            columns = piece * BN + tl.arange(0, BN)
            h = load_vector(hs, columns, K)
            away = load_tile(k, rows, left, stride, columns, K, even_n).to(tl.float32)
            away -= load_origin(center, columns, K, CENTERED)[None, :]
            polynomial += tl.sum(0.5 * away * (pieces[piece] + h[None, :]), 1)
        tl.store(polynomials + scalar + rows * H, polynomial, mask=rows < left)
        coarse_j = tl.load(coarse + rows, mask=rows < left, other=0.0)
        fine_j = tl.load(fine + rows, mask=rows < left, other=0.0)
        d_keys *= tl.load(to_end + of_head + rows, mask=rows < left, other=0.0)[:, None]
    elif RESETS:
        d_keys *= (rows >= last_start(starts, 0, C, left)).to(tl.float32)[:, None]

    k_whole = load_tile(k, rows, left, stride, every, K, even)
    for begin in range(block * R // BT * BT, C, BT):
        at = begin + tl.arange(0, BT)
        live = at < left
        each = scalar + at * H
        q_tile = load_tile(q, at, left, stride, every, K, even)
        g_tile = load_tile(g, at, left, stride, every, K, even)
        # Transposed scores: key j is the row, query t the column.
        scores_q = dot(k_whole, tl.trans(q_tile))
        scores_g = dot(k_whole, tl.trans(g_tile))
        n = tl.load(count + each, mask=live, other=1.0)
        share = -tl.load(lam + each, mask=live, other=0.0).to(tl.float32) / n
        causal = (rows[:, None] <= at[None, :]) & live[None, :]
        if HAS_DECAY or RESETS:
            first = tl.load(starts + at, mask=live, other=C)
            causal = causal & (rows[:, None] >= first[None, :])
        if HAS_DECAY:
            coarse_t = tl.load(coarse + at, mask=live, other=0.0)
            fine_t = tl.load(fine + at, mask=live, other=0.0)
            gap = (coarse_t[None, :] - coarse_j[:, None]) + (fine_t[None, :] - fine_j[:, None])
            weight = tl.exp(tl.where(causal, gap, float("-inf"))) * share[None, :]
        else:
            weight = tl.where(causal, share[None, :], 0.0)
        scores_q -= tl.load(mean_q + each, mask=live, other=0.0)[None, :]
        scores_g -= tl.load(mean_g + each, mask=live, other=0.0)[None, :]
        weight_q = (weight * scores_q).to(dtype)
        weight_g = (weight * scores_g).to(dtype)
        d_keys = tl.dot(weight_q, g_tile, d_keys, input_precision="ieee")
        d_keys = tl.dot(weight_g, q_tile, d_keys, input_precision="ieee")
    store_tile(d_k, d_keys, rows, left, stride, every, K, even)


@triton.jit
def log_decay_kernel(
    q, k, g, lam, coarse, fine, starts, to_end, factors, count, p, p_g, mean_q, mean_g, past, d_lam,
    counts, polynomials, kappas, crossings, length,
    d_log_decay,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's log decays: token l's decay scales what t >= l sees of j < l.

    BT: tokens t a step. BK: columns a step. ROWS, TILES: into how many parts the walk split kappa
    and the sum of phi.
    """
    even: tl.constexpr = K % BK == 0
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    batch, head = sequence // H, sequence % H
    rows = tl.arange(0, C)
    left = length - chunk * C
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    q += token * stride + head * K
    k += token * stride + head * K
    g += token * stride + head * K
    scalar = token * H + head
    of_head = sequence * length + chunk * C
    coarse += of_head
    fine += of_head
    starts += of_head
    entry = sequence * chunks + chunk
    kappas += entry * ROWS
    crossings += entry * TILES

    coarse_j = tl.load(coarse + rows, mask=rows < left, other=0.0)
    fine_j = tl.load(fine + rows, mask=rows < left, other=0.0)
    incoming = tl.load(counts + entry + sequence)
    d_decay = tl.zeros([C], tl.float32)
    given = tl.zeros([C], tl.float32)
    for begin in range(0, C, BT):
        at = begin + tl.arange(0, BT)
        live = at < left
        each = scalar + at * H
        scores_q = tl.zeros([C, BT], tl.float32)
        scores_g = tl.zeros([C, BT], tl.float32)
        for start in range(0, K, BK):
            column = start + tl.arange(0, BK)
            k_tile = load_tile(k, rows, left, stride, column, K, even)
            q_tile = load_tile(q, at, left, stride, column, K, even)
            g_tile = load_tile(g, at, left, stride, column, K, even)
            scores_q = tl.dot(k_tile, tl.trans(q_tile), scores_q, input_precision="ieee")
            scores_g = tl.dot(k_tile, tl.trans(g_tile), scores_g, input_precision="ieee")
        scores_q -= tl.load(mean_q + each, mask=live, other=0.0)[None, :]
        scores_g -= tl.load(mean_g + each, mask=live, other=0.0)[None, :]
        n = tl.load(count + each, mask=live, other=1.0)
        share = -tl.load(lam + each, mask=live, other=0.0).to(tl.float32) / n
        first = tl.load(starts + at, mask=live, other=C)
        coarse_t = tl.load(coarse + at, mask=live, other=0.0)
        fine_t = tl.load(fine + at, mask=live, other=0.0)
        gap = (coarse_t[None, :] - coarse_j[:, None]) + (fine_t[None, :] - fine_j[:, None])
        earlier = (rows[:, None] < at[None, :]) & (rows[:, None] >= first[None, :])
        # z_tj: the gradient of e^{G_t-G_j}, times it; of the keys before the chunk in `z_past`.
        curvature = -tl.load(d_lam + each, mask=live, other=0.0)
        z = scores_q * scores_g - curvature[None, :]
        z *= tl.exp(tl.where(earlier, gap, float("-inf"))) * share[None, :]
        old = tl.where(first < 0, tl.exp(coarse_t + fine_t), 0.0) * incoming
        p_q = tl.load(p + each, mask=live, other=0.0)
        p_d = tl.load(p_g + each, mask=live, other=0.0)
        z_past = tl.load(past + each, mask=live, other=0.0) * n + old * (p_q * p_d - curvature)
        # The sum over j < l <= t of z_tj: all of t's where t >= l, less all of j's where j >= l.
        seen = tl.sum(z, 0) + z_past * share
        after = (rows[:, None] <= at[None, :]) & (rows[:, None] >= first[None, :])
        d_decay += tl.sum(tl.where(after, seen[None, :], 0.0), 1)
        given += tl.sum(z, 1)
    kappa = tl.sum(load_vector(kappas, tl.arange(0, triton.next_power_of_2(ROWS)), ROWS), 0)
    parts = load_vector(crossings, tl.arange(0, triton.next_power_of_2(TILES)), TILES)
    crossing = tl.sum(parts, 0) * incoming
    live = rows < left
    phi = kappa + tl.load(polynomials + scalar + rows * H, mask=live, other=0.0)
    later = phi * tl.load(to_end + of_head + rows, mask=live, other=0.0)
    d_decay += tl.load(factors + entry * 2) * crossing + tl.cumsum(later, 0) - later
    first = tl.load(starts + rows, mask=live, other=C)
    after = (rows[:, None] <= rows[None, :]) & (rows[:, None] >= first[None, :])
    d_decay -= tl.sum(tl.where(after, given[None, :], 0.0), 1)
    reset = first == rows
    tl.store(d_log_decay + scalar + rows * H, tl.where(reset, 0.0, d_decay), mask=live)
