"""The kernels of `kernels.gated_linear_attention.triton`. Imports nothing but Triton.

With G the running sum of log decays inside a chunk of C tokens, S the state at its start:

    A_tj = sum_k q_tk k_jk e^{G_tk - G_jk}, j <= t
    o_t = scale (sum_j A_tj v_j + (q_t e^{G_t}) S)
    S_next = e^{G_C} S + sum_j (k_j e^{G_C - G_j})^T v_j

The scores split into levels: halve the chunk, then its halves. A query in a right half and a key in
the left half of the same block meet at the block's middle m,

    e^{G_t - G_j} = e^{sum of g over (m, t]} e^{sum of g over (j, m]},

two factors at most 1 whatever the decay. On each level a token is only a query or only a key, so
one scaled matrix x serves as both sides of the product, and sums come from products with 0/1
matrices: nothing is subtracted, so nothing is lost to strong decays.

Most decays are mild: where half a chunk forgets less than e^-MILD, the chunk's own middle serves
all pairs, with one factor above 1 and one below, far from overflow, and one product makes the
scores.

DECAY: 0 none, 1 one a head, 2 one a channel. Scores: [B, H, N, C, C], scaled. A tile that a
pipelined loop loads goes to products or to arithmetic, never to both: the buffer of one that serves
both is overwritten while the tensor cores still read it (Triton 3.7.1). Rows of 16-bit tiles have
64 elements or more: the compiler gets the addresses of narrower ones wrong.
"""

import triton
import triton.language as tl

from kernels.triton_blocks import FORGET, cumulative_decay, dot, load_tile, load_vector, store_tile


@triton.jit
def finite(g):
    """Log decays with -inf replaced by a number that e^ of any sum with it is exactly 0 for."""
    return tl.where(g == float("-inf"), -1e4, g)


@triton.jit
def summed(select, x, dtype: tl.constexpr):
    """select @ x for a 0/1 matrix `select`, to 2^-17 or float32's precision."""
    if dtype == tl.float32:
        return dot(select.to(tl.float32), x.to(tl.float32))
    ones = select.to(tl.float32).to(dtype)
    coarse = x.to(dtype)
    total = dot(ones, coarse)
    if x.dtype == tl.float32:
        total += dot(ones, (x - coarse.to(tl.float32)).to(dtype))
    return total


@triton.jit
def load_decay(
    g, at, limit, columns, H: tl.constexpr, K: tl.constexpr, DECAY: tl.constexpr, even: tl.constexpr
):
    """The decays [C, columns] of a chunk, or [C, 1]."""
    if DECAY == 2:
        return finite(load_tile(g, at, limit, H * K, columns, K, even))
    else:
        return finite(tl.load(g + at * H, mask=at < limit, other=0.0).to(tl.float32))[:, None]


@triton.jit
def prefix_sums(g, at, dtype: tl.constexpr, DECAY: tl.constexpr):
    """Sums over the tokens up to each one."""
    if DECAY == 2:
        return summed(at[:, None] >= at[None, :], g, dtype)
    else:
        return tl.cumsum(g, 0)


@triton.jit
def suffix_sums(g, at, dtype: tl.constexpr, DECAY: tl.constexpr):
    """Sums over the tokens after each one."""
    if DECAY == 2:
        return summed(at[:, None] < at[None, :], g, dtype)
    else:
        after = tl.where(at[:, None] < at[None, :], tl.trans(g), 0.0)
        return tl.sum(after, 1)[:, None]


@triton.jit
def level_masks(at, half_log):
    """Blocks of two halves: which tokens are queries, what they sum, and which pairs meet here."""
    block = at >> (half_log + 1)
    query = (at >> half_log) % 2 == 1
    same = block[:, None] == block[None, :]
    upto = query[None, :] & (at[None, :] <= at[:, None])
    after = (at[None, :] > at[:, None]) & ~query[None, :]
    pairs = same & (query[:, None] != query[None, :])
    return query, same & tl.where(query[:, None], upto, after), pairs


@triton.jit
def middle_factors(g, at, dtype: tl.constexpr):
    """Sums between each token and the chunk's middle, and whether e^ of minus them is harmless.

    With them the e^ of what the first half forgets, and the second.
    """
    HALF: tl.constexpr = at.shape[0] // 2
    MILD: tl.constexpr = 5.0 if dtype == tl.float16 else 40.0
    later = (at >= HALF)[:, None]
    upto = (at[None, :] >= HALF) & (at[None, :] <= at[:, None])
    after = (at[None, :] < HALF) & (at[None, :] > at[:, None])
    sums = summed(tl.where(later, upto, after), g, dtype)
    g = g.to(tl.float32)
    first = tl.sum(tl.where(later, 0.0, g), 0)
    second = tl.sum(tl.where(later, g, 0.0), 0)
    mild = tl.min(tl.minimum(first, second), 0) > -MILD
    return tl.where(later, sums, -sums), mild, tl.exp(first)[None, :], tl.exp(second)[None, :]


@triton.jit
def carry_kernel(
    x, y, gains, initial, length,
    states, final,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One tile of the state over a sequence; writes what each chunk starts from.

    Forward: x = k decayed to the chunk's end and y = v. REVERSE, the state's gradient from the last
    chunk to the first: x = q decayed from the chunk's start and y = d_o. gains: e^{G_C}.
    """
    tiles_j: tl.constexpr = (V + BJ - 1) // BJ
    tiles: tl.constexpr = (K + BI - 1) // BI * tiles_j
    even_i: tl.constexpr = K % BI == 0
    even_j: tl.constexpr = V % BJ == 0
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    tile_i = tl.program_id(0) % tiles // tiles_j
    tile_j = tl.program_id(0) % tiles_j
    batch, head = sequence // H, sequence % H
    chunks = (length + C - 1) // C
    at = tl.arange(0, C)
    i = tile_i * BI + tl.arange(0, BI)
    j = tile_j * BJ + tl.arange(0, BJ)
    x += (batch * length * H + head) * K
    y += (batch * length * H + head) * V
    gains += sequence * chunks * (K if DECAY == 2 else 1)
    states += sequence * chunks * K * V

    state = load_tile(initial + sequence * K * V, i, K, V, j, V, even_j)
    for step in range(0, chunks):
        chunk = sequence * 0 + (chunks - 1 - step if REVERSE else step)  # 64 bits
        left = length - chunk * C
        store_tile(states + chunk * K * V, state, i, K, V, j, V, even_j)
        x_tile = load_tile(x + chunk * (C * H * K), at, left, H * K, i, K, even_i)
        y_tile = load_tile(y + chunk * (C * H * V), at, left, H * V, j, V, even_j)
        if DECAY == 1:
            state *= tl.load(gains + chunk)
        if DECAY == 2:
            state *= load_vector(gains + chunk * K, i, K)[:, None]
        state += dot(tl.trans(x_tile), y_tile) * scale
    store_tile(final + sequence * K * V, state, i, K, V, j, V, even_j)


@triton.jit
def scores_kernel(
    q, k, g, length,
    scores, decayed_q, decayed_k, gains,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One chunk's scores, scaled, and with decays q e^{G_t}, k e^{G_C - G_j} and e^{G_C}.

    C = 2 ** LEVELS.
    """
    even: tl.constexpr = K % BK == 0
    g_stride: tl.constexpr = H * K if DECAY == 2 else H
    chunks = (length + C - 1) // C
    sequence = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    entry = sequence * chunks + chunk
    at = tl.arange(0, C)
    left = length - chunk * C
    token = sequence // H * length + chunk * C
    head = sequence % H
    tokens = (token * H + head) * K
    q += tokens
    k += tokens
    g += token * g_stride + head * (g_stride // H)
    dtype: tl.constexpr = q.dtype.element_ty
    causal = at[:, None] >= at[None, :]
    total = tl.zeros([C, C], tl.float32)
    if DECAY == 1:
        decay = load_decay(g, at, left, at, H, K, DECAY, True)
        to_query = tl.exp(prefix_sums(decay, at, dtype, DECAY))
        to_end = tl.exp(suffix_sums(decay, at, dtype, DECAY))
        tl.store(gains + entry, tl.exp(tl.sum(tl.sum(decay, 1), 0)))
    for start in tl.range(0, K, BK, num_stages=1):
        column = start + tl.arange(0, BK)
        q_tile = load_tile(q, at, left, H * K, column, K, even)
        k_tile = load_tile(k, at, left, H * K, column, K, even)
        if DECAY == 2:
            decay = load_decay(g, at, left, column, H, K, DECAY, even)
            middle, mild, first, second = middle_factors(decay, at, dtype)
            tl.store(gains + entry * K + column[None, :], first * second, mask=column[None, :] < K)
            if mild:
                x_q = q_tile.to(tl.float32) * tl.exp(middle)
                x_k = k_tile.to(tl.float32) * tl.exp(-middle)
                store_tile(decayed_q + tokens, x_q * first, at, left, H * K, column, K, even)
                store_tile(decayed_k + tokens, x_k * second, at, left, H * K, column, K, even)
                total += tl.where(causal, dot(x_q.to(dtype), tl.trans(x_k.to(dtype))), 0.0)
            else:
                x_q = q_tile.to(tl.float32) * tl.exp(prefix_sums(decay, at, dtype, DECAY))
                store_tile(decayed_q + tokens, x_q, at, left, H * K, column, K, even)
                x_k = k_tile.to(tl.float32) * tl.exp(suffix_sums(decay, at, dtype, DECAY))
                store_tile(decayed_k + tokens, x_k, at, left, H * K, column, K, even)
                diagonal = tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), 1)
                total += tl.where(at[:, None] == at[None, :], diagonal[:, None], 0.0)
                for level in tl.range(0, LEVELS, num_stages=1):  # unrolled, it would spill
                    query, select, pairs = level_masks(at, level)
                    factor = tl.exp(summed(select, decay, dtype))
                    x = (tl.where(query[:, None], q_tile, k_tile).to(tl.float32) * factor).to(dtype)
                    total += tl.where(pairs & causal, dot(x, tl.trans(x)), 0.0)
        else:
            total += dot(q_tile, tl.trans(k_tile))
        if DECAY == 1:
            x_q = q_tile.to(tl.float32) * to_query
            store_tile(decayed_q + tokens, x_q, at, left, H * K, column, K, even)
            x_k = k_tile.to(tl.float32) * to_end
            store_tile(decayed_k + tokens, x_k, at, left, H * K, column, K, even)
    if DECAY < 2:
        total *= pair_decay(g, at, left, H, DECAY)
    scores += entry * C * C
    tl.store(scores + at[:, None] * C + at[None, :], (total * scale).to(dtype))


@triton.jit
def pair_decay(g, at, limit, H: tl.constexpr, DECAY: tl.constexpr):
    """e^{G_t - G_j} for j <= t, else 0, of one decay a head."""
    causal = at[:, None] >= at[None, :]
    if DECAY == 1:
        coarse, fine, resets, _ = cumulative_decay(g, at, limit, H)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        causal = causal & (resets[:, None] == resets[None, :])
        return tl.exp(tl.where(causal, gap, float("-inf")))
    else:
        return causal.to(tl.float32)


@triton.jit
def mix_kernel(
    x, y, scores, states, length,
    out,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Some columns of one chunk's output, from decayed q and y = v.

    REVERSE: of d_v, from decayed k and y = d_o.
    """
    even_k: tl.constexpr = K % BK == 0
    even_v: tl.constexpr = V % BV == 0
    tiles: tl.constexpr = (V + BV - 1) // BV
    chunks = (length + C - 1) // C
    v_column = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
    entry = (tl.program_id(0) // tiles).to(tl.int64)
    sequence, chunk = entry // chunks, entry % chunks
    at = tl.arange(0, C)
    left = length - chunk * C
    token = sequence // H * length + chunk * C
    head = sequence % H
    x += (token * H + head) * K
    y += (token * H + head) * V
    out += (token * H + head) * V
    scores += entry * C * C
    states += entry * K * V
    total = tl.zeros([C, BV], tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        x_tile = load_tile(x, at, left, H * K, column, K, even_k)
        state = load_tile(states, column, K, V, v_column, V, even_v)
        total += dot(x_tile, state)
    total *= scale
    y_tile = load_tile(y, at, left, H * V, v_column, V, even_v)
    matrix = tl.load(scores + at[:, None] * C + at[None, :])
    if REVERSE:
        matrix = tl.trans(matrix)
    total += dot(matrix, y_tile)
    store_tile(out, total, at, left, H * V, v_column, V, even_v)


@triton.jit
def gradients_kernel(
    q, k, v, g, d_o, states, d_states, length,
    d_q, d_k, d_g,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Some channels of one chunk's gradients of q, k and the log decays. One decay a head gets the
    sums over these channels, [B, T, H, tiles]; the first has the chunk's own pairs."""
    even_k: tl.constexpr = K % BK == 0
    even_v: tl.constexpr = V % BV == 0
    tiles: tl.constexpr = (K + BK - 1) // BK
    g_stride: tl.constexpr = H * K if DECAY == 2 else H
    chunks = (length + C - 1) // C
    tile = tl.program_id(0) % tiles
    column = tile * BK + tl.arange(0, BK)
    entry = (tl.program_id(0) // tiles).to(tl.int64)
    sequence, chunk = entry // chunks, entry % chunks
    at = tl.arange(0, C)
    left = length - chunk * C
    live = at < left
    token = sequence // H * length + chunk * C
    head = sequence % H
    q += (token * H + head) * K
    k += (token * H + head) * K
    d_q += (token * H + head) * K
    d_k += (token * H + head) * K
    v += (token * H + head) * V
    d_o += (token * H + head) * V
    g += token * g_stride + head * (g_stride // H)
    states += entry * K * V
    d_states += entry * K * V
    dtype = q.dtype.element_ty

    d_scores = tl.zeros([C, C], tl.float32)
    for start in range(0, V, BV):
        v_column = start + tl.arange(0, BV)
        v_tile = load_tile(v, at, left, H * V, v_column, V, even_v)
        o_tile = load_tile(d_o, at, left, H * V, v_column, V, even_v)
        d_scores += dot(o_tile, tl.trans(v_tile))
    d_scores = tl.where(at[:, None] >= at[None, :], d_scores * scale, 0.0)
    # What a decay lets through: into later queries from the state (from_past), from earlier keys
    # into the next state (to_future), from state to state (crossing).
    crossing = tl.zeros([BK], tl.float32)
    if DECAY:
        for start in range(0, V, BV):
            v_column = start + tl.arange(0, BV)
            state = load_tile(states, column, K, V, v_column, V, even_v).to(tl.float32)
            d_state = load_tile(d_states, column, K, V, v_column, V, even_v).to(tl.float32)
            crossing += tl.sum(state * d_state, 1)

    if DECAY == 2:
        decay = load_decay(g, at, left, column, H, K, DECAY, even_k)
        middle, mild, first, second = middle_factors(decay, at, dtype)
        d_decay = tl.zeros([C, BK], tl.float32) + crossing[None, :] * (first * second)
        later = at[:, None] > at[None, :]
        if mild:
            # First all of the queries, then all of the keys: less to hold at a time.
            pair = d_scores.to(dtype)
            inverse = tl.exp(-middle)
            x_k = load_tile(k, at, left, H * K, column, K, even_k).to(tl.float32) * inverse
            x_k = x_k.to(dtype)
            d_x = read_states(d_o, states, at, left, column, H, K, V, BV) * (scale * first)
            d_x += dot(pair, x_k)
            x_q = load_tile(q, at, left, H * K, column, K, even_k).to(tl.float32) * tl.exp(middle)
            x_q = x_q.to(dtype)
            from_past = x_q.to(tl.float32) * d_x
            store_tile(d_q, tl.exp(middle) * d_x, at, left, H * K, column, K, even_k)

            d_x = read_states(v, d_states, at, left, column, H, K, V, BV) * second
            d_decay += summed(later, x_k.to(tl.float32) * d_x, dtype)
            # A pair adds to its query's sum what it takes from its key's: with the same rounded
            # numbers in both, pairs on one side of a token cancel.
            d_pairs = dot(tl.trans(pair), x_q)
            from_past -= x_k.to(tl.float32) * d_pairs
            store_tile(d_k, inverse * (d_x + d_pairs), at, left, H * K, column, K, even_k)
            d_decay += summed(at[:, None] <= at[None, :], from_past, dtype)
        else:
            q_tile = load_tile(q, at, left, H * K, column, K, even_k)
            k_tile = load_tile(k, at, left, H * K, column, K, even_k)
            past_q = read_states(d_o, states, at, left, column, H, K, V, BV) * scale
            past_k = read_states(v, d_states, at, left, column, H, K, V, BV)
            past_q *= tl.exp(prefix_sums(decay, at, dtype, DECAY))
            past_k *= tl.exp(suffix_sums(decay, at, dtype, DECAY))
            from_past = past_q * q_tile.to(tl.float32)
            d_decay += summed(later, past_k * k_tile.to(tl.float32), dtype)
            diagonal = tl.sum(tl.where(at[:, None] == at[None, :], d_scores, 0.0), 1)[:, None]
            past_q += diagonal * k_tile.to(tl.float32)
            past_k += diagonal * q_tile.to(tl.float32)
            # Entry (t, j) belongs to the two tokens, whichever is the query.
            pair = tl.where(later, d_scores, tl.trans(d_scores)).to(dtype)
            for level in tl.range(0, LEVELS, num_stages=1):  # unrolled, it would spill
                query, select, pairs = level_masks(at, level)
                factor = tl.exp(summed(select, decay, dtype))
                x = (tl.where(query[:, None], q_tile, k_tile).to(tl.float32) * factor).to(dtype)
                d_x = dot(tl.where(pairs, pair, 0.0), x)
                flow = x.to(tl.float32) * d_x
                from_past += tl.where(query[:, None], flow, -flow)
                d_x *= factor
                past_q += tl.where(query[:, None], d_x, 0.0)
                past_k += tl.where(query[:, None], 0.0, d_x)
            store_tile(d_q, past_q, at, left, H * K, column, K, even_k)
            store_tile(d_k, past_k, at, left, H * K, column, K, even_k)
            d_decay += summed(at[:, None] <= at[None, :], from_past, dtype)
        raw = load_tile(g, at, left, H * K, column, K, even_k)
        d_decay = tl.where(raw < FORGET, 0.0, d_decay)
        d_g += (token * H + head) * K
        store_tile(d_g, d_decay, at, left, H * K, column, K, even_k)
    else:
        q_tile = load_tile(q, at, left, H * K, column, K, even_k)
        k_tile = load_tile(k, at, left, H * K, column, K, even_k)
        past_q = read_states(d_o, states, at, left, column, H, K, V, BV) * scale
        past_k = read_states(v, d_states, at, left, column, H, K, V, BV)
        if DECAY == 1:
            decay = load_decay(g, at, left, column, H, K, DECAY, even_k)
            past_q *= tl.exp(prefix_sums(decay, at, dtype, DECAY))
            past_k *= tl.exp(suffix_sums(decay, at, dtype, DECAY))
            from_past = past_q * q_tile.to(tl.float32)
            to_future = past_k * k_tile.to(tl.float32)
            crossing *= tl.exp(tl.sum(decay, 0))
        d_scores *= pair_decay(g, at, left, H, DECAY)
        past_q += dot(d_scores.to(dtype), k_tile)
        past_k += dot(tl.trans(d_scores.to(dtype)), q_tile)
        store_tile(d_q, past_q, at, left, H * K, column, K, even_k)
        store_tile(d_k, past_k, at, left, H * K, column, K, even_k)

    if DECAY == 1:
        past = tl.sum(from_past, 1)
        future = tl.sum(to_future, 1)
        if tile == 0:
            # The chunk's own pairs, which have all channels in their scores.
            flow = d_scores * raw_scores(q, k, at, left, H, K, BK)
            past += tl.sum(flow, 1) - tl.sum(tl.trans(flow), 1)
        d_decay = tl.sum(tl.where(at[:, None] <= at[None, :], past[None, :], 0.0), 1)
        d_decay += tl.sum(tl.where(at[:, None] > at[None, :], future[None, :], 0.0), 1)
        d_decay += tl.sum(crossing, 0)
        raw = tl.load(g + at * H, mask=live, other=0.0)
        d_decay = tl.where(raw < FORGET, 0.0, d_decay)
        d_g += (token * H + head) * tiles + tile
        tl.store(d_g + at * (H * tiles), d_decay, mask=live)


@triton.jit
def read_states(
    x, states, at, left, column, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    """x @ states^T, [C, BK], for x [C, V]."""
    total = tl.zeros([at.shape[0], column.shape[0]], tl.float32)
    for start in range(0, V, BV):
        v_column = start + tl.arange(0, BV)
        x_tile = load_tile(x, at, left, H * V, v_column, V, V % BV == 0)
        state = load_tile(states, column, K, V, v_column, V, V % BV == 0)
        total += dot(x_tile, tl.trans(state))
    return total


@triton.jit
def raw_scores(q, k, at, left, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """q_t . k_j of a chunk."""
    total = tl.zeros([at.shape[0], at.shape[0]], tl.float32)
    for start in range(0, K, BK):
        column = start + tl.arange(0, BK)
        q_tile = load_tile(q, at, left, H * K, column, K, K % BK == 0)
        k_tile = load_tile(k, at, left, H * K, column, K, K % BK == 0)
        total += dot(q_tile, tl.trans(k_tile))
    return total
