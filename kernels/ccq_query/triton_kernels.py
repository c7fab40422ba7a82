"""The kernels of `kernels.ccq_query.triton`. Imports nothing but Triton.

Statistics are kept normalised and centred: the weight n of the tokens seen, their mean, and
Sigma = their covariance, which does not change when all keys move. A chunk measures its keys from
the incoming mean (`origin`), so keys with a large common component lose no digits:

    delta_j = k_j - origin;   n_t = e^{G_t} n + sum_{j<=t} e^{G_t-G_j};   w_tj = e^{G_t-G_j} / n_t
    s_tj = q_t . delta_j;     p_t = sum_j w_tj s_tj
    Sigma_t q_t = e^{G_t} (n / n_t) Sigma q_t + sum_{j<=t} w_tj (s_tj - p_t) delta_j

Without centring the origin and p are 0 and Sigma stands for C / n.

Backward, g = d q_clean: dq = g - lam Sigma g and dlam = -q . Sigma g come from the same read. With
a_tj = -lam_t w_tj, what later tokens ask of a key is a quadratic polynomial in it,

    phi(k) = kappa + h . (k - origin) + (k - origin)^T F (k - origin) / 2,
    F = sum_t a_t (g_t q_t^T + q_t g_t^T),  h = -sum_t a_t (p_t g_t + p'_t q_t),

where p' is p of g. The key's gradient is the polynomial's, plus the terms of its own chunk.
Dimensions of states: [B, H, N + 1, K, K], entry c at the start of chunk c.
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


@triton.jit
def load_origin(means, columns, width: tl.constexpr, CENTERED: tl.constexpr):
    if CENTERED:
        return load_vector(means, columns, width)
    else:
        return tl.zeros(columns.shape, tl.float32)


@triton.jit
def states_kernel(
    k, log_decay, count, mean, sigma, length,
    counts, means, states, final_sigma,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of Sigma over a whole sequence, S tokens a step; writes it at every chunk's start."""
    tiles_j: tl.constexpr = (K + BJ - 1) // BJ
    tiles: tl.constexpr = (K + BI - 1) // BI * tiles_j
    even_i: tl.constexpr = K % BI == 0
    even_j: tl.constexpr = K % BJ == 0
    steps: tl.constexpr = C // S
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile_i = tl.program_id(0) % tiles // tiles_j
    tile_j = tl.program_id(0) % tiles_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    at = tl.arange(0, S)
    i = tile_i * BI + tl.arange(0, BI)
    j = tile_j * BJ + tl.arange(0, BJ)
    k += batch * length * stride + head * K
    log_decay += batch * length * H + head
    counts += sequence * (chunks + 1)
    means += sequence * (chunks + 1) * K
    states += sequence * (chunks + 1) * K * K
    dtype = k.dtype.element_ty

    n = tl.load(count + sequence)
    mean_i = load_vector(mean + sequence * K, i, K)
    mean_j = load_vector(mean + sequence * K, j, K)
    state = load_tile(sigma + sequence * K * K, i, K, K, j, K, even_j)
    for step in range(0, chunks * steps):
        if step % steps == 0:
            store_tile(states, state, i, K, K, j, K, even_j)
            if tile_j == 0:
                tl.store(means + i, mean_i, mask=i < K)
                if tile_i == 0:
                    tl.store(counts, n)
            states += K * K
            means += K
            counts += 1
        left = length - step * S
        live = at < left
        k_i = load_tile(k, at, left, stride, i, K, even_i).to(tl.float32)
        k_j = load_tile(k, at, left, stride, j, K, even_j).to(tl.float32)
        k += S * stride
        if HAS_DECAY:
            coarse, fine, resets, _ = cumulative_decay(log_decay, at, left, H)
            weight, carried = weights_to_end(coarse, fine, resets, at == S - 1)
            weight = tl.where(live, weight, 0.0)
            log_decay += S * H
        else:
            weight = live.to(tl.float32)
            carried = 1.0
        old = carried * n
        n = old + tl.sum(weight, 0)
        weight = weight / n
        kept = old / n
        if CENTERED:
            # From the new mean, so that nothing cancels, and the old mean's distance to it.
            step_i = tl.sum((k_i - mean_i[None, :]) * weight[:, None], 0)
            step_j = tl.sum((k_j - mean_j[None, :]) * weight[:, None], 0)
            mean_i += step_i
            mean_j += step_j
            k_i = k_i - mean_i[None, :]
            k_j = k_j - mean_j[None, :]
            state += step_i[:, None] * step_j[None, :]
        else:
            mean_i = kept * mean_i + tl.sum(k_i * weight[:, None], 0)
        k_i = k_i * weight[:, None]
        state = state * kept + dot(tl.trans(k_i.to(dtype)), k_j.to(dtype))
    store_tile(states, state, i, K, K, j, K, even_j)
    store_tile(final_sigma + sequence * K * K, state, i, K, K, j, K, even_j)
    if tile_j == 0:
        tl.store(means + i, mean_i, mask=i < K)
        if tile_i == 0:
            tl.store(counts, n)


@triton.jit
def read_kernel(
    q, k, lam, log_decay, other, counts, means, states, length,
    out, projection, count, d_lam, past,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One chunk's q - lam Sigma q, with p and n. BACKWARD: of g, with -other . Sigma g instead of n
    and, with decays, the part of other . Sigma g that is the incoming state's."""
    even_k: tl.constexpr = K % BK == 0
    even_n: tl.constexpr = K % BN == 0
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    batch, head = sequence // H, sequence % H
    at = tl.arange(0, C)
    left = length - chunk * C
    live = at < left
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    tokens = token * stride + head * K
    q += tokens
    k += tokens
    out += tokens
    scalar = token * H + head + at * H
    entry = sequence * (chunks + 1) + chunk
    means += entry * K
    states += entry * K * K
    dtype = q.dtype.element_ty
    column = tl.arange(0, BK)

    scores = tl.zeros([C, C], tl.float32)
    shift = tl.zeros([C], tl.float32)
    for start in range(0, K, BK):
        q_tile = load_tile(q, at, left, stride, start + column, K, even_k)
        k_tile = load_tile(k, at, left, stride, start + column, K, even_k)
        scores += dot(q_tile, tl.trans(k_tile))
        if CENTERED:
            origin = load_vector(means, start + column, K)
            shift += tl.sum(q_tile.to(tl.float32) * origin[None, :], 1)
    causal = (at[:, None] >= at[None, :]) & live[None, :]
    incoming = tl.load(counts + entry)
    if HAS_DECAY:
        coarse, fine, resets, _ = cumulative_decay(log_decay + token * H + head, at, left, H)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        causal = causal & (resets[:, None] == resets[None, :])
        weight = tl.exp(tl.where(causal, gap, float("-inf")))
        old = tl.where(resets == 0, tl.exp(coarse + fine), 0.0) * incoming
        n = old + tl.sum(weight, 1)
        n = tl.where(live, n, 1.0)
        weight = weight / n[:, None]
    else:
        old = incoming + tl.zeros([C], tl.float32)
        n = incoming + 1.0 + at.to(tl.float32)
        weight = tl.where(causal, 1.0, 0.0) / n[:, None]
    kept = old / n
    scores = scores - shift[:, None]
    if CENTERED:
        p = tl.sum(weight * scores, 1)
    else:
        p = tl.zeros([C], tl.float32)
    weights = (weight * (scores - p[:, None])).to(dtype)
    total = tl.sum(weights.to(tl.float32), 1)
    strength = tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32)

    projected = tl.zeros([C], tl.float32)
    projected_past = tl.zeros([C], tl.float32)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        read = tl.zeros([C, BN], tl.float32)
        for start in range(0, K, BK):
            q_tile = load_tile(q, at, left, stride, start + column, K, even_k)
            state = load_tile(states, start + column, K, K, n_column, K, even_n)
            read += dot(q_tile, state)
        read = read * kept[:, None]
        if BACKWARD and HAS_DECAY:
            x = load_tile(other + tokens, at, left, stride, n_column, K, even_n).to(tl.float32)
            projected_past += tl.sum(x * read, 1)
        k_tile = load_tile(k, at, left, stride, n_column, K, even_n)
        read += dot(weights, k_tile)
        if CENTERED:
            origin = load_vector(means, n_column, K)
            read -= total[:, None] * origin[None, :]
        q_tile = load_tile(q, at, left, stride, n_column, K, even_n).to(tl.float32)
        clean = q_tile - strength[:, None] * read
        store_tile(out, clean, at, left, stride, n_column, K, even_n)
        if BACKWARD:
            x = load_tile(other + tokens, at, left, stride, n_column, K, even_n).to(tl.float32)
            projected += tl.sum(x * read, 1)
    tl.store(projection + scalar, p, mask=live)
    if BACKWARD:
        tl.store(d_lam + scalar, -projected, mask=live)
        if HAS_DECAY:
            tl.store(past + scalar, projected_past, mask=live)
    else:
        tl.store(count + scalar, n, mask=live)


@triton.jit
def adjoint_kernel(
    q, g, lam, log_decay, count, p, p_g, d_lam, counts, means, states, kappa_end, h_end, f_end, length,
    kappas, hs, fs, crossings,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of F from the last token to the first, S a step; writes phi as every chunk's end sees it.

    kappa and h are sums over tiles: each tile writes the part that its F and its share made. With
    decays also the sum of phi over all keys before the chunk, from the state at its start.
    """
    tiles_j: tl.constexpr = (K + BJ - 1) // BJ
    tiles: tl.constexpr = (K + BI - 1) // BI * tiles_j
    even_i: tl.constexpr = K % BI == 0
    even_j: tl.constexpr = K % BJ == 0
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    tile_i = tile // tiles_j
    tile_j = tile % tiles_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    steps: tl.constexpr = C // S
    stride: tl.constexpr = H * K
    at = tl.arange(0, S)
    i = tile_i * BI + tl.arange(0, BI)
    j = tile_j * BJ + tl.arange(0, BJ)
    q += batch * length * stride + head * K
    g += batch * length * stride + head * K
    scalars = batch * length * H + head
    counts += sequence * (chunks + 1)
    means += sequence * (chunks + 1) * K
    states += sequence * (chunks + 1) * K * K
    kappas += sequence * chunks * tiles + tile
    crossings += sequence * chunks * tiles + tile
    hs += sequence * chunks * tiles_j * K + tile_j * K
    fs += sequence * chunks * K * K
    dtype = q.dtype.element_ty

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
            if CENTERED:
                new_i = load_vector(means + chunk * K, i, K)
                new_j = load_vector(means + chunk * K, j, K)
                moved = tl.sum(f * (new_j - origin_j)[None, :], 1)
                kappa += tl.sum((new_i - origin_i) * (h + 0.5 * moved), 0)
                h += moved
                origin_i, origin_j = new_i, new_j
            store_tile(fs + chunk * K * K, f, i, K, K, j, K, even_j)
            tl.store(hs + chunk * tiles_j * K + i, h, mask=i < K)
            tl.store(kappas + chunk * tiles, kappa)
            if HAS_DECAY:
                sigma = load_tile(states + chunk * K * K, i, K, K, j, K, even_j).to(tl.float32)
                crossing = kappa + 0.5 * tl.sum(tl.sum(f * sigma, 1), 0)
                if not CENTERED:
                    crossing += tl.sum(h * load_vector(means + chunk * K, i, K), 0)
                tl.store(crossings + chunk * tiles, crossing * tl.load(counts + chunk))
        left = length - step * S
        live = at < left
        token = (step * S).to(tl.int64)
        scalar = scalars + token * H + at * H
        n = tl.load(count + scalar, mask=live, other=1.0)
        share = -tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32) / n
        if HAS_DECAY:
            coarse, fine, resets, _ = cumulative_decay(log_decay + scalars + token * H, at, left, H)
            _, carried = weights_to_end(coarse, fine, resets, at == S - 1)
            share = share * tl.where(resets == 0, tl.exp(coarse + fine), 0.0)
        else:
            carried = 1.0
        q_i = load_tile(q + token * stride, at, left, stride, i, K, even_i)
        g_i = load_tile(g + token * stride, at, left, stride, i, K, even_i)
        q_j = load_tile(q + token * stride, at, left, stride, j, K, even_j)
        g_j = load_tile(g + token * stride, at, left, stride, j, K, even_j)
        q_i = (q_i.to(tl.float32) * share[:, None]).to(dtype)
        g_i = (g_i.to(tl.float32) * share[:, None]).to(dtype)
        f = f * carried
        f = tl.dot(tl.trans(g_i), q_j, f, input_precision="ieee")
        f = tl.dot(tl.trans(q_i), g_j, f, input_precision="ieee")
        p_q = tl.load(p + scalar, mask=live, other=0.0)
        p_d = tl.load(p_g + scalar, mask=live, other=0.0)
        if CENTERED:
            gradient = p_q[:, None] * g_i.to(tl.float32) + p_d[:, None] * q_i.to(tl.float32)
            h = h * carried - first_j * tl.sum(gradient, 0)
        else:
            h = h * carried
        curvature = -tl.load(d_lam + scalar, mask=live, other=0.0)
        kappa = kappa * carried + first * tl.sum(share * (p_q * p_d - curvature), 0)


@triton.jit
def keys_kernel(
    q, k, g, lam, log_decay, count, p, p_g, past, counts, means, kappas, hs, fs, crossings, length,
    d_k, d_log_decay,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One chunk's gradients of the keys and, with decays, of the log decays.

    TILES, PARTS: into how many parts the sequence's pass split kappa, and h.
    """
    even_k: tl.constexpr = K % BK == 0
    even_n: tl.constexpr = K % BN == 0
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    batch, head = sequence // H, sequence % H
    at = tl.arange(0, C)
    left = length - chunk * C
    live = at < left
    stride: tl.constexpr = H * K
    token = batch * length + chunk * C
    tokens = token * stride + head * K
    q += tokens
    k += tokens
    g += tokens
    d_k += tokens
    scalar = token * H + head + at * H
    entry = sequence * chunks + chunk
    means += (entry + sequence) * K
    hs += entry * PARTS * K
    fs += entry * K * K
    dtype = q.dtype.element_ty
    column = tl.arange(0, BK)

    # Transposed scores: key j is the row, query t the column.
    scores_q = tl.zeros([C, C], tl.float32)
    scores_g = tl.zeros([C, C], tl.float32)
    shift_q = tl.zeros([C], tl.float32)
    shift_g = tl.zeros([C], tl.float32)
    for start in range(0, K, BK):
        k_tile = load_tile(k, at, left, stride, start + column, K, even_k)
        q_tile = load_tile(q, at, left, stride, start + column, K, even_k)
        g_tile = load_tile(g, at, left, stride, start + column, K, even_k)
        origin = load_origin(means, start + column, K, CENTERED)
        scores_q += dot(k_tile, tl.trans(q_tile))
        scores_g += dot(k_tile, tl.trans(g_tile))
        shift_q += tl.sum(q_tile.to(tl.float32) * origin[None, :], 1)
        shift_g += tl.sum(g_tile.to(tl.float32) * origin[None, :], 1)
    p_q = tl.load(p + scalar, mask=live, other=0.0)
    p_d = tl.load(p_g + scalar, mask=live, other=0.0)
    scores_q = scores_q - (shift_q + p_q)[None, :]
    scores_g = scores_g - (shift_g + p_d)[None, :]
    n = tl.load(count + scalar, mask=live, other=1.0)
    share = -tl.load(lam + scalar, mask=live, other=0.0).to(tl.float32)
    causal = (at[:, None] <= at[None, :]) & live[None, :]
    if HAS_DECAY:
        coarse, fine, resets, reset = cumulative_decay(log_decay + token * H + head, at, left, H)
        gap = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
        causal = causal & (resets[:, None] == resets[None, :])
        weight = tl.exp(tl.where(causal, gap, float("-inf"))) / n[None, :]
        to_end, carried = weights_to_end(coarse, fine, resets, at == C - 1)
    else:
        weight = tl.where(causal, 1.0 / n[None, :], 0.0)
    if HAS_DECAY:
        # z_tj: the gradient of e^{G_t-G_j}, times it. Token l's decay scales all j < l <= t.
        products = weight * scores_q * scores_g
        g_past = tl.load(past + scalar, mask=live, other=0.0)
        kept = tl.where(resets == 0, tl.exp(coarse + fine), 0.0) * tl.load(counts + entry + sequence) / n
        g_past += kept * p_q * p_d
        curvature = g_past + tl.sum(products, 0)
        z = (products - weight * curvature[None, :]) * share[None, :]
        z_past = (g_past - kept * curvature) * share
        before = dot((at[:, None] > at[None, :]).to(tl.float32).to(dtype), z.to(dtype)) + z_past[None, :]
        d_decay = tl.sum(tl.where(at[:, None] <= at[None, :], before, 0.0), 1)
    weight = weight * share[None, :]
    weight_q = (weight * scores_q).to(dtype)
    weight_g = (weight * scores_g).to(dtype)

    polynomial = tl.zeros([C], tl.float32)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        d_tile = tl.zeros([C, BN], tl.float32)
        for start in range(0, K, BK):
            k_tile = load_tile(k, at, left, stride, start + column, K, even_k)
            origin = load_origin(means, start + column, K, CENTERED)
            delta = (k_tile.to(tl.float32) - origin[None, :]).to(dtype)
            f = load_tile(fs, start + column, K, K, n_column, K, even_n)
            d_tile += dot(delta, f)
        h = load_vector(hs, n_column, K)
        for part in tl.static_range(1, PARTS):
            h += load_vector(hs + part * K, n_column, K)
        if HAS_DECAY:
            k_tile = load_tile(k, at, left, stride, n_column, K, even_n).to(tl.float32)
            delta_n = k_tile - load_origin(means, n_column, K, CENTERED)[None, :]
            polynomial += tl.sum(delta_n * (0.5 * d_tile + h[None, :]), 1)
            d_tile = (d_tile + h[None, :]) * to_end[:, None]
        else:
            d_tile = d_tile + h[None, :]
        g_tile = load_tile(g, at, left, stride, n_column, K, even_n)
        d_tile += dot(weight_q, g_tile)
        q_tile = load_tile(q, at, left, stride, n_column, K, even_n)
        d_tile += dot(weight_g, q_tile)
        store_tile(d_k, d_tile, at, left, stride, n_column, K, even_n)

    if HAS_DECAY:
        kappa = 0.0
        crossing = 0.0
        for tile in tl.static_range(0, TILES):
            kappa += tl.load(kappas + entry * TILES + tile)
            crossing += tl.load(crossings + entry * TILES + tile)
        later = tl.where(live, (kappa + polynomial) * to_end, 0.0)
        d_decay += carried * crossing + tl.cumsum(later, 0) - later
        tl.store(d_log_decay + scalar, tl.where(reset, 0.0, d_decay), mask=live)
