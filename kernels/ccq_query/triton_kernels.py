"""The kernels of `kernels.ccq_query.triton`. Imports nothing but Triton.

Statistics are kept normalised and centred: the weight n of the tokens seen, their mean, and
Sigma = their covariance, which does not change when all keys move. A chunk measures its keys from
the incoming mean (`origin`), so keys with a large common component lose no digits:

    delta_j = k_j - origin;   n_t = e^{G_t} n + sum_{j<=t} e^{G_t-G_j};   w_tj = e^{G_t-G_j} / n_t
    s_tj = q_t . delta_j;     p_t = sum_j w_tj s_tj
    Sigma_t q_t = e^{G_t} (n / n_t) Sigma q_t + sum_{j<=t} w_tj (s_tj - p_t) delta_j

Without centring the origin and p are 0 and Sigma stands for C / n. Products with the keys themselves
are linear in the origin, which is taken off after them, in float32.

Backward, g = d q_clean: dq = g - lam Sigma g and dlam = -q . Sigma g come from the same read. With
a_tj = -lam_t w_tj, what later tokens ask of a key is a quadratic polynomial in it,

    phi(k) = kappa + h . (k - origin) + (k - origin)^T F (k - origin) / 2,
    F = sum_t a_t (g_t q_t^T + q_t g_t^T),  h = -sum_t a_t (p_t g_t + p'_t q_t),

where p' is p of g. The key's gradient is the polynomial's, plus the terms of its own chunk.
Dimensions of states: [B, H, N + 1, K, K], entry c at the start of chunk c.

A tile that a pipelined loop loads goes to products or to arithmetic, never to both: the buffer of
one that serves both is overwritten while the tensor cores still read it (Triton 3.7.1). Rows of 16-bit tiles have 64 elements
or more: the compiler gets the addresses of narrower ones wrong.
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
def states_kernel(
    k, log_decay, count, key_sum, key_outer, length,
    counts, means, states, final_sum, final_outer,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of Sigma over a whole sequence, S tokens a step; writes it at every chunk's start.

    The initial and final states are raw sums. No tokens have no mean: the first key stands for it.
    """
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
    dtype: tl.constexpr = k.dtype.element_ty
    # Equal weights and 16-bit keys: the raw products of a step lose nothing in float32.
    RAW: tl.constexpr = (not HAS_DECAY) and (dtype != tl.float32)

    n = tl.load(count + sequence)
    seen = n > 0
    inverse = tl.where(seen, 1.0 / tl.where(seen, n, 1.0), 0.0)
    sum_i = load_vector(key_sum + sequence * K, i, K) * inverse
    sum_j = load_vector(key_sum + sequence * K, j, K) * inverse
    mean_i = tl.where(seen, sum_i, load_vector(k, i, K))
    mean_j = tl.where(seen, sum_j, load_vector(k, j, K))
    state = load_tile(key_outer + sequence * K * K, i, K, K, j, K, even_j) * inverse
    if CENTERED:
        state -= sum_i[:, None] * sum_j[None, :]
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
        k_i = load_tile(k, at, left, stride, i, K, even_i)
        k_j = load_tile(k, at, left, stride, j, K, even_j)
        k += S * stride
        if RAW:
            old = n
            n += tl.minimum(tl.maximum(left, 0), S).to(tl.float32)
            kept = old / n
            factor = 1.0 / n
            outer = dot(tl.trans(k_i), k_j)
            sum_i = column_sums(k_i)
            if CENTERED:
                sum_j = column_sums(k_j)
                new_i = kept * mean_i + sum_i * factor
                new_j = kept * mean_j + sum_j * factor
                state = kept * (state + mean_i[:, None] * mean_j[None, :])
                state += factor * outer - new_i[:, None] * new_j[None, :]
                mean_i, mean_j = new_i, new_j
            else:
                state = kept * state + factor * outer
                mean_i = kept * mean_i + sum_i * factor
        else:
            k_i = k_i.to(tl.float32)
            k_j = k_j.to(tl.float32)
            live = at < left
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
    if CENTERED:
        state += mean_i[:, None] * mean_j[None, :]
    store_tile(final_outer + sequence * K * K, n * state, i, K, K, j, K, even_j)
    if tile_j == 0:
        tl.store(means + i, mean_i, mask=i < K)
        tl.store(final_sum + sequence * K + i, n * mean_i, mask=i < K)
        if tile_i == 0:
            tl.store(counts, n)


@triton.jit
def read_kernel(
    q, k, lam, log_decay, other, other_p, counts, means, states, length,
    out, p, mean_q, count, d_lam, past, shares, h_terms, kappa_terms,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """R tokens of a chunk: q - lam Sigma q, with p, q . mean and n. With decays R is C.

    BACKWARD: of g, with d_lam = -other . Sigma g, where `other` is q and `other_p` its p, instead of
    n. Also, with a_t as of the chunk's start: a_t q_t, these tokens' terms of h and kappa and, with
    decays, the part of other . Sigma g that is the incoming state's.
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
    causal = (rows[:, None] >= at[None, :]) & (at < left)[None, :]
    incoming = tl.load(counts + entry)
    since = tl.full([R], 1.0, tl.float32)
    if HAS_DECAY:
        coarse, fine, resets, _ = cumulative_decay(log_decay + token * H + head, at, left, H)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        causal = causal & (resets[:, None] == resets[None, :])
        weight = tl.exp(tl.where(causal, gap, float("-inf")))
        since = tl.where(resets == 0, tl.exp(coarse + fine), 0.0)
        old = since * incoming
        n = old + tl.sum(weight, 1)
        n = tl.where(live, n, 1.0)
        weight = weight / n[:, None]
    else:
        old = incoming + tl.zeros([R], tl.float32)
        n = incoming + 1.0 + rows.to(tl.float32)
        weight = tl.where(causal, (1.0 / n)[:, None], 0.0)
    kept = old / n
    if CENTERED:
        scores = scores - shift[:, None]
        average = tl.sum(weight * scores, 1)
        scores = scores - average[:, None]
    else:
        average = tl.zeros([R], tl.float32)
    weights = (weight * scores).to(dtype)
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


@triton.jit
def adjoint_kernel(
    shares, g, log_decay, h_terms, kappa_terms, counts, means, states, kappa_end, h_end, f_end, length,
    kappas, hs, slopes, fs, crossings,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One tile of F from the last token to the first, S a step; writes phi as every chunk's end sees it.

    `shares` is a_t q_t as of the chunk's start. kappa and h are sums over tiles: each tile writes the
    part that its F and its share made. `slopes` is h - F origin, the gradient at a key of 0. With
    decays also the sum of phi over all keys before the chunk, from the state at its start. BLOCKS: in
    how many parts a chunk's terms come.
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
    q, k, g, lam, log_decay, count, p, p_g, mean_q, mean_g, past, counts, means,
    kappas, hs, slopes, fs, crossings, length,
    d_k, d_log_decay,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    HAS_DECAY: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The gradients of R keys of a chunk and, with decays, where R is C, of the log decays.

    TILES, PARTS: into how many parts the sequence's pass split kappa, and h. WHOLE: K rounded up to a
    power of two if the keys stay in shared memory, else 0.
    """
    even_k: tl.constexpr = K % BK == 0
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
    for start in range(0, K, BK):
        k_tile = load_tile(k, rows, left, stride, start + column, K, even_k)
        q_tile = load_tile(q, at, left, stride, start + column, K, even_k)
        g_tile = load_tile(g, at, left, stride, start + column, K, even_k)
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
        weight = tl.where(causal, (share / n)[None, :], 0.0)
    weight_q = (weight * scores_q).to(dtype)
    weight_g = (weight * scores_g).to(dtype)

    polynomial = tl.zeros([R], tl.float32)
    if WHOLE > 0:
        k_whole = load_tile(k, rows, left, stride, tl.arange(0, WHOLE), K, K == WHOLE)
    for first in range(0, K, BN):
        n_column = first + tl.arange(0, BN)
        if WHOLE > 0:
            f = load_tile(fs, tl.arange(0, WHOLE), K, K, n_column, K, even_n)
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
