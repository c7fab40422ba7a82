"""The kernels of CCQ's gradients of keys and log decays; `triton_kernels` has the notation."""

import triton
import triton.language as tl

from kernels.ccq_query.triton_kernels import last_start, load_origin
from kernels.triton_blocks import (
    cumulative_decay,
    dot,
    load_tile,
    load_vector,
    store_tile,
    weights_to_end,
)


@triton.jit
def adjoint_kernel(
    shares, g, log_decay, starts, h_terms, kappa_terms, counts, means, states,
    kappa_end, h_end, f_end, length,
    kappas, hs, slopes, fs, crossings,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of F from the last token to the first, S a step; writes phi as chunk ends see it.

    `shares` is a_t q_t as of the chunk's start. kappa and h are sums over tiles: each tile writes
    the part that its F and its share made. `slopes` is h - F origin, the gradient at a key of 0.
    With decays also the sum of phi over all keys before the chunk, from the state at its start.
    BLOCKS: in how many parts a chunk's terms come.
    """
    tiles_j: tl.constexpr = (K + BJ - 1) // BJ
    tiles: tl.constexpr = (K + BI - 1) // BI * tiles_j
    even_i: tl.constexpr = K % BI == 0
    even_j: tl.constexpr = K % BJ == 0
    steps: tl.constexpr = C // S
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    tile_i = tile // tiles_j
    tile_j = tile % tiles_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    at = tl.arange(0, S)
    i = tile_i * BI + tl.arange(0, BI)
    j = tile_j * BJ + tl.arange(0, BJ)
    shares += batch * length * stride + head * K
    g += batch * length * stride + head * K
    log_decay += batch * length * H + head
    starts += batch * length
    h_terms += sequence * chunks * BLOCKS * K
    kappa_terms += sequence * chunks * BLOCKS
    counts += sequence * (chunks + 1)
    means += sequence * (chunks + 1) * K
    states += sequence * (chunks + 1) * K * K
    kappas += sequence * chunks * tiles + tile
    crossings += sequence * chunks * tiles + tile
    hs += sequence * chunks * tiles_j * K + tile_j * K
    slopes += sequence * chunks * tiles_j * K + tile_j * K
    fs += sequence * chunks * K * K

    f = load_tile(f_end + sequence * K * K, i, K, K, j, K, even_j)
    first_j = (tile_j == 0).to(tl.float32)
    first = first_j * (tile_i == 0).to(tl.float32)
    h = load_vector(h_end + sequence * K, i, K) * first_j
    kappa = tl.load(kappa_end + sequence) * first
    origin_i = load_origin(means + chunks * K, i, K, CENTERED)
    origin_j = load_origin(means + chunks * K, j, K, CENTERED)
    for back in range(0, chunks * steps):
        step = chunks * steps - 1 - back
        if back % steps == 0:
            chunk = (step // steps).to(tl.int64)
            part = chunk * tiles_j * K + i
            rounded = f.to(fs.dtype.element_ty)
            if CENTERED:
                new_i = load_vector(means + chunk * K, i, K)
                new_j = load_vector(means + chunk * K, j, K)
                moved = tl.sum(f * (new_j - origin_j)[None, :], 1)
                kappa += tl.sum((new_i - origin_i) * (h + 0.5 * moved), 0)
                h += moved
                origin_i, origin_j = new_i, new_j
                slope = h - tl.sum(rounded.to(tl.float32) * new_j[None, :], 1)
            else:
                slope = h
            store_tile(fs + chunk * K * K, rounded, i, K, K, j, K, even_j)
            tl.store(hs + part, h, mask=i < K)
            tl.store(slopes + part, slope, mask=i < K)
            tl.store(kappas + chunk * tiles, kappa)
            if HAS_DECAY:
                sigma = load_tile(states + chunk * K * K, i, K, K, j, K, even_j).to(tl.float32)
                crossing = kappa + 0.5 * tl.sum(tl.sum(f * sigma, 1), 0)
                if not CENTERED:
                    crossing += tl.sum(h * load_vector(means + chunk * K, i, K), 0)
                tl.store(crossings + chunk * tiles, crossing * tl.load(counts + chunk))
                in_chunk = tl.arange(0, C)
                decays = tl.load(
                    log_decay + chunk * (C * H) + in_chunk * H,
                    mask=in_chunk < length - chunk * C,
                    other=0.0,
                )
                carried = tl.exp(tl.sum(decays.to(tl.float32), 0))
            elif RESETS:
                start = last_start(starts, chunk * C, C, length)
                carried = tl.where(start < 0, 1.0, 0.0)
            if HAS_DECAY or RESETS:
                f *= carried
                h *= carried
                kappa *= carried
            for block in tl.static_range(BLOCKS):
                term = chunk * BLOCKS + block
                h += first_j * load_vector(h_terms + term * K, i, K)
                kappa += first * tl.load(kappa_terms + term)
        left = length - step * S
        token = (step * S).to(tl.int64) * stride
        g_i = load_tile(g + token, at, left, stride, i, K, even_i)
        q_j = load_tile(shares + token, at, left, stride, j, K, even_j)
        f = tl.dot(tl.trans(g_i), q_j, f, input_precision="ieee")
        q_i = load_tile(shares + token, at, left, stride, i, K, even_i)
        g_j = load_tile(g + token, at, left, stride, j, K, even_j)
        f = tl.dot(tl.trans(q_i), g_j, f, input_precision="ieee")


@triton.jit
def keys_kernel(
    q, k, g, lam, log_decay, starts, count, p, p_g, mean_q, mean_g, past, counts, means,
    kappas, hs, slopes, fs, crossings, length,
    d_k, d_log_decay,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
    HAS_DECAY: tl.constexpr, RESETS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The gradients of R keys of a chunk and, with HAS_DECAY, where R is C, of the log decays.

    TILES, PARTS: into how many parts the sequence's pass split kappa, and h.
    """
    even_k: tl.constexpr = K % BK == 0
    WHOLE: tl.constexpr = BK >= K  # the keys stay in shared memory
    BS: tl.constexpr = BK if BK < 64 else 64
    even_s: tl.constexpr = K % BS == 0
    even_n: tl.constexpr = K % BN == 0
    blocks: tl.constexpr = C // R
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // (chunks * blocks)).to(tl.int64)
    block = tl.program_id(0) % blocks
    chunk = tl.program_id(0) // blocks % chunks
    batch, head = sequence // H, sequence % H
    at = tl.arange(0, C)
    rows = block * R + tl.arange(0, R)
    left = length - chunk * C
    live = at < left
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    tokens = token * stride + head * K
    q += tokens
    k += tokens
    g += tokens
    d_k += tokens
    starts += token
    scalar = token * H + head + at * H
    entry = sequence * chunks + chunk
    means += (entry + sequence) * K
    hs += entry * PARTS * K
    slopes += entry * PARTS * K
    fs += entry * K * K
    dtype: tl.constexpr = q.dtype.element_ty
    column = tl.arange(0, BK)

    # Transposed scores: key j is the row, query t the column.
    scores_q = tl.zeros([R, C], tl.float32)
    scores_g = tl.zeros([R, C], tl.float32)
    for start in range(0, K, BS):
        k_tile = load_tile(k, rows, left, stride, start + tl.arange(0, BS), K, even_s)
        q_tile = load_tile(q, at, left, stride, start + tl.arange(0, BS), K, even_s)
        g_tile = load_tile(g, at, left, stride, start + tl.arange(0, BS), K, even_s)
        scores_q += dot(k_tile, tl.trans(q_tile))
        scores_g += dot(k_tile, tl.trans(g_tile))
    scores_q = scores_q - tl.load(mean_q + scalar, mask=live, other=0.0)[None, :]
    scores_g = scores_g - tl.load(mean_g + scalar, mask=live, other=0.0)[None, :]
    n = tl.load(count + scalar, mask=live, other=1.0)
    share = -tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32)
    causal = (rows[:, None] <= at[None, :]) & live[None, :]
    if HAS_DECAY:
        coarse, fine, resets, reset = cumulative_decay(log_decay + token * H + head, at, left, H)
        gap = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
        causal = causal & (resets[:, None] == resets[None, :])
        weight = tl.exp(tl.where(causal, gap, float("-inf"))) / n[None, :]
        to_end, carried = weights_to_end(coarse, fine, resets, at == C - 1)
        # z_tj: the gradient of e^{G_t-G_j}, times it. Token l's decay scales all j < l <= t.
        products = weight * scores_q * scores_g
        incoming = tl.load(counts + entry + sequence)
        kept = tl.where(resets == 0, tl.exp(coarse + fine), 0.0) * incoming / n
        p_q = tl.load(p + scalar, mask=live, other=0.0)
        p_d = tl.load(p_g + scalar, mask=live, other=0.0)
        g_past = tl.load(past + scalar, mask=live, other=0.0) + kept * p_q * p_d
        curvature = g_past + tl.sum(products, 0)
        z = (products - weight * curvature[None, :]) * share[None, :]
        z_past = (g_past - kept * curvature) * share
        earlier = (at[:, None] > at[None, :]).to(tl.float32).to(dtype)
        before = dot(earlier, z.to(dtype)) + z_past[None, :]
        d_decay = tl.sum(tl.where(at[:, None] <= at[None, :], before, 0.0), 1)
        weight = weight * share[None, :]
    else:
        if RESETS:
            causal = causal & (rows[:, None] >= tl.load(starts + at, mask=live, other=C)[None, :])
            to_end = (rows >= last_start(starts, 0, C, left)).to(tl.float32)
        weight = tl.where(causal, (share / n)[None, :], 0.0)
    weight_q = (weight * scores_q).to(dtype)
    weight_g = (weight * scores_g).to(dtype)

    polynomial = tl.zeros([R], tl.float32)
    if WHOLE:
        k_whole = load_tile(k, rows, left, stride, column, K, even_k)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        if WHOLE:
            f = load_tile(fs, column, K, K, n_column, K, even_n)
            d_tile = dot(k_whole, f)
        else:
            d_tile = tl.zeros([R, BN], tl.float32)
            for start in range(0, K, BK):
                k_tile = load_tile(k, rows, left, stride, start + column, K, even_k)
                f = load_tile(fs, start + column, K, K, n_column, K, even_n)
                d_tile += dot(k_tile, f)
        slope = load_vector(slopes, n_column, K)
        for part in tl.static_range(1, PARTS):
            slope += load_vector(slopes + part * K, n_column, K)
        d_tile += slope[None, :]
        if HAS_DECAY:
            h = load_vector(hs, n_column, K)
            for part in tl.static_range(1, PARTS):
                h += load_vector(hs + part * K, n_column, K)
            delta = load_tile(k, rows, left, stride, n_column, K, even_n).to(tl.float32)
            delta -= load_origin(means, n_column, K, CENTERED)[None, :]
            polynomial += tl.sum(0.5 * delta * (d_tile + h[None, :]), 1)
        if HAS_DECAY or RESETS:
            d_tile *= to_end[:, None]
        g_tile = load_tile(g, at, left, stride, n_column, K, even_n)
        d_tile += dot(weight_q, g_tile)
        q_tile = load_tile(q, at, left, stride, n_column, K, even_n)
        d_tile += dot(weight_g, q_tile)
        store_tile(d_k, d_tile, rows, left, stride, n_column, K, even_n)

    if HAS_DECAY:
        kappa = 0.0
        crossing = 0.0
        for tile in tl.static_range(0, TILES):
            kappa += tl.load(kappas + entry * TILES + tile)
            crossing += tl.load(crossings + entry * TILES + tile)
        later = tl.where(live, (kappa + polynomial) * to_end, 0.0)
        d_decay += carried * crossing + tl.cumsum(later, 0) - later
        tl.store(d_log_decay + scalar, tl.where(reset, 0.0, d_decay), mask=live)
