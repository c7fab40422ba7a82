"""The kernels of `kernels.gated_linear_attention.triton`. Imports nothing but Triton.

With G the running sum of log decays inside a chunk of C tokens, S the state at its start:

    A_tj = sum_k q_tk k_jk e^{G_tk - G_jk}, j <= t
    o_t = scale (sum_j A_tj v_j + (q_t e^{G_t}) S)
    S_next = e^{G_C} S + sum_j (k_j e^{G_C - G_j})^T v_j

Most decays are mild: where a chunk forgets less than e^-64 in every channel, e^{-G} is far from
overflow, and one product of q e^G and k e^{-G} makes the scores. The kernels here do such chunks,
and all those whose decays are one a head; they leave the others to `triton_levels`.

DECAY: 0 none, 1 one a head, 2 one a channel. Scores: [B, H, N, C, C], scaled. A tile that a
pipelined loop loads goes to products or to arithmetic; where it goes to both, the iteration waits
for its products: else the next copy overwrites what the tensor cores still read (Triton 3.7.1).
Rows of 16-bit tiles have 64 elements or more: the compiler gets the addresses of narrower ones
wrong.
"""

# mypy: ignore-errors
# In Triton a tuple may grow in a loop that is unrolled.

import triton
import triton.language as tl

from kernels.triton_blocks import (
    FORGET,
    cumulative_decay,
    dot,
    exp,
    load_tile,
    load_vector,
    store_tile,
)


@triton.jit
def finite(g):
    """Log decays with -inf replaced by a number that e^ of any sum with it is exactly 0 for."""
    return tl.where(g == float("-inf"), -1e4, g)


@triton.jit
def ones_where(select, dtype: tl.constexpr):
    return tl.where(select, 1.0, 0.0).to(dtype)


@triton.jit
def summed(ones, x):
    """ones @ x for a matrix of 0 and 1, to 2^-17 or float32's precision."""
    dtype: tl.constexpr = ones.dtype
    coarse = x.to(dtype)
    total = dot(ones, coarse)
    if x.dtype == tl.float32 and dtype != tl.float32:
        total += dot(ones, (x - coarse.to(tl.float32)).to(dtype))
    return total


@triton.jit
def head_decay(g, at, limit, H: tl.constexpr):
    """The chunk's log decays, one a head, and their sums up to each token and after it."""
    decay = finite(tl.load(g + at * H, mask=at < limit, other=0.0).to(tl.float32))
    after = tl.where(at[:, None] < at[None, :], decay[None, :], 0.0)
    return decay, tl.cumsum(decay, 0)[:, None], tl.sum(after, 1)[:, None]


@triton.jit
def is_mild(gain, dtype: tl.constexpr):
    """Whether e^ of minus the sums of a chunk, whose e^ over all of it is `gain`, is harmless."""
    LEAST: tl.constexpr = 6.7e-3 if dtype == tl.float16 else 1.6e-28
    return tl.min(gain, 0) > LEAST


@triton.jit
def load_state(
    pointer, v_column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, even: tl.constexpr
):
    """Columns of a state [K, V] as a tuple of tiles [BK, v_column]."""
    tiles = ()
    for start in tl.static_range(0, K, BK):
        tiles += (load_tile(pointer, start + tl.arange(0, BK), K, V, v_column, V, even),)
    return tiles


@triton.jit
def store_state(
    pointer, tiles, v_column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, even: tl.constexpr
):
    """The inverse of `load_state`."""
    for n in tl.static_range(0, len(tiles)):
        store_tile(pointer, tiles[n], n * BK + tl.arange(0, BK), K, V, v_column, V, even)


@triton.jit
def walk_kernel(
    reads, writes, y, scores, gains, initial, length,
    states, out, final,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
    OUTPUT: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Some columns of one sequence's state, chunk by chunk, and of what the tokens read.

    Forward: y = v; reads q decayed from the chunk's start, writes k decayed to its end. REVERSE,
    the state's gradient from the last chunk to the first: y = d_o, reads k and writes q, and the
    output is d_v. OUTPUT: writes it. STATES: writes what enters each chunk. gains: e^{G_C}.
    """
    dtype = y.dtype.element_ty
    even_k: tl.constexpr = K % BK == 0
    even_v: tl.constexpr = V % BV == 0
    tiles: tl.constexpr = (V + BV - 1) // BV
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    chunks = (length + C - 1) // C
    at = tl.arange(0, C)
    v_column = tl.program_id(0) % tiles * BV + tl.arange(0, BV)
    head = (sequence // H) * length * H + sequence % H
    reads += head * K
    writes += head * K
    y += head * V
    out += head * V
    scores += sequence * chunks * (C * C)
    gains += sequence * chunks * (K if DECAY == 2 else 1)
    states += sequence * chunks * (K * V)
    square = at[:, None] * C + at[None, :]

    state = load_state(initial + sequence * (K * V), v_column, K, V, BK, even_v)
    for step in range(0, chunks):
        chunk = sequence * 0 + (chunks - 1 - step if REVERSE else step)  # 64 bits
        left = length - chunk * C
        token = chunk * (C * H)
        # What is not copied ahead is asked for long before it is used.
        gain = ()
        for n in tl.static_range(0, len(state)):
            if DECAY == 2:
                gain += (load_vector(gains + chunk * K, n * BK + tl.arange(0, BK), K)[:, None],)
            if DECAY == 1:
                gain += (tl.load(gains + chunk),)
        y_tile = load_tile(y + token * V, at, left, H * V, v_column, V, even_v)
        if OUTPUT:
            total = tl.zeros([C, BV], tl.float32)
            for n in tl.static_range(0, len(state)):
                column = n * BK + tl.arange(0, BK)
                x = load_tile(reads + token * K, at, left, H * K, column, K, even_k)
                # Rounded tile by tile, so that one buffer serves them all.
                total = tl.dot(x, state[n].to(dtype), total, input_precision="ieee")
            if scale != 1.0 and not REVERSE:
                total *= scale
            matrix = tl.load(scores + chunk * (C * C) + square)
            if REVERSE:
                matrix = tl.trans(matrix)
            total = tl.dot(matrix, y_tile, total, input_precision="ieee")
            store_tile(out + token * V, total, at, left, H * V, v_column, V, even_v)
        if STATES:
            store_state(states + chunk * (K * V), state, v_column, K, V, BK, even_v)
        last, state = state, ()
        for n in tl.static_range(0, len(last)):
            column = n * BK + tl.arange(0, BK)
            x = load_tile(writes + token * K, at, left, H * K, column, K, even_k)
            kept = last[n]
            if DECAY:
                kept *= gain[n]
            if scale != 1.0 and REVERSE:
                state += (kept + dot(tl.trans(x), y_tile) * scale,)
            else:
                state += (tl.dot(tl.trans(x), y_tile, kept, input_precision="ieee"),)
    store_state(final + sequence * (K * V), state, v_column, K, V, BK, even_v)


@triton.jit
def scores_kernel(
    q, k, g, length,
    scores, decayed_q, decayed_k, gains,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    DECAY: tl.constexpr,
):  # fmt: skip
    """One chunk's scores, scaled, and with decays scale q e^{G_t}, k e^{G_C - G_j} and e^{G_C}.

    Of a chunk with strong decays of channels, the last alone.
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
    total = tl.zeros([C, C], tl.float32)
    upto = ones_where(at[:, None] >= at[None, :], dtype)
    if DECAY == 1:
        decay, before, after = head_decay(g, at, left, H)
        to_query = exp(before) * scale
        to_end = exp(after)
        tl.store(gains + entry, exp(tl.sum(decay, 0)))
    for start in tl.range(0, K, BK, num_stages=1):
        column = start + tl.arange(0, BK)
        q_tile = load_tile(q, at, left, H * K, column, K, even)
        k_tile = load_tile(k, at, left, H * K, column, K, even)
        if DECAY == 2:
            decay = load_tile(g, at, left, H * K, column, K, even)
            gain = exp(tl.sum(decay.to(tl.float32), 0))
            tl.store(gains + entry * K + column, gain, mask=column < K)
            if is_mild(gain, dtype):
                sums = summed(upto, decay)
                x_q = q_tile.to(tl.float32) * (exp(sums) * scale)
                x_k = k_tile.to(tl.float32) * exp(-sums)
                store_tile(decayed_q + tokens, x_q, at, left, H * K, column, K, even)
                x = x_k * gain[None, :]
                store_tile(decayed_k + tokens, x, at, left, H * K, column, K, even)
                total += dot(x_q.to(dtype), tl.trans(x_k.to(dtype)))
        else:
            total += dot(q_tile, tl.trans(k_tile))
        if DECAY == 1:
            x_q = q_tile.to(tl.float32) * to_query
            store_tile(decayed_q + tokens, x_q, at, left, H * K, column, K, even)
            x_k = k_tile.to(tl.float32) * to_end
            store_tile(decayed_k + tokens, x_k, at, left, H * K, column, K, even)
    if DECAY == 2:
        total = tl.where(at[:, None] >= at[None, :], total, 0.0)
    else:
        total *= pair_decay(g, at, left, H, DECAY) * scale
    scores += entry * C * C
    tl.store(scores + at[:, None] * C + at[None, :], total.to(dtype))


@triton.jit
def pair_decay(g, at, limit, H: tl.constexpr, DECAY: tl.constexpr):
    """e^{G_t - G_j} for j <= t, else 0, of one decay a head."""
    causal = at[:, None] >= at[None, :]
    if DECAY == 1:
        coarse, fine, resets, _ = cumulative_decay(g, at, limit, H)
        gap = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        causal = causal & (resets[:, None] == resets[None, :])
        return exp(tl.where(causal, gap, float("-inf")))
    else:
        return causal.to(tl.float32)


@triton.jit
def channel_gradients_kernel(
    q, k, v, g, gains, d_o, states, d_states, length,
    d_q, d_k, d_g,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Some channels of one chunk's gradients of q, k and log decays of channels, where these are mild.

    q, k: decayed, as `scores_kernel` writes them.
    """
    even: tl.constexpr = K % BK == 0
    tiles: tl.constexpr = (K + BK - 1) // BK
    chunks = (length + C - 1) // C
    column = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    entry = (tl.program_id(0) // tiles).to(tl.int64)
    sequence, chunk = entry // chunks, entry % chunks
    at = tl.arange(0, C)
    left = length - chunk * C
    row = (sequence // H * length + chunk * C) * H + sequence % H
    tokens = row * K
    v += row * V
    d_o += row * V
    states += entry * (K * V)
    d_states += entry * (K * V)
    dtype: tl.constexpr = q.dtype.element_ty
    gain = tl.load(gains + entry * K + column, mask=column < K, other=1.0)
    if is_mild(gain, dtype):
        one = (tl.num_programs(0) > 0).to(tl.float32)  # which Triton does not know
        d_q_read = tl.zeros([C, BK], tl.float32)
        d_k_read = tl.zeros([C, BK], tl.float32)
        pair = tl.zeros([C, C], tl.float32)
        crossing = tl.zeros([BK], tl.float32)
        for start in range(0, V, BV):
            v_column = start + tl.arange(0, BV)
            o_tile = load_tile(d_o, at, left, H * V, v_column, V, V % BV == 0)
            v_tile = load_tile(v, at, left, H * V, v_column, V, V % BV == 0)
            state = load_tile(states, column, K, V, v_column, V, V % BV == 0)
            d_state = load_tile(d_states, column, K, V, v_column, V, V % BV == 0)
            pair = tl.dot(o_tile, tl.trans(v_tile), pair, input_precision="ieee")
            d_q_read = tl.dot(o_tile, tl.trans(state), d_q_read, input_precision="ieee")
            d_k_read = tl.dot(v_tile, tl.trans(d_state), d_k_read, input_precision="ieee")
            crossing += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            # Waits for the products with both states, whose buffers are the next to be filled.
            d_k_read *= one
        pair = tl.where(at[:, None] >= at[None, :], pair, 0.0).to(dtype)
        decay = load_tile(g + tokens, at, left, H * K, column, K, even)
        sums = summed(ones_where(at[:, None] >= at[None, :], dtype), decay)
        q_tile = load_tile(q + tokens, at, left, H * K, column, K, even)
        k_tile = load_tile(k + tokens, at, left, H * K, column, K, even)
        inverse = (1.0 / gain)[None, :]
        d_x = d_q_read + dot(pair, k_tile) * inverse
        from_past = q_tile.to(tl.float32) * d_x
        d_x *= exp(sums) * scale
        store_tile(d_q + tokens, d_x, at, left, H * K, column, K, even)

        # A pair adds to its query's sum what it takes from its key's: with the same rounded
        # numbers in both, pairs on one side of a token cancel.
        d_pairs = dot(tl.trans(pair), q_tile) * inverse
        d_x = d_k_read + d_pairs
        crossing = crossing * gain + tl.sum(k_tile.to(tl.float32) * d_k_read, 0)
        from_past -= k_tile.to(tl.float32) * d_x
        d_x *= exp(-sums) * gain[None, :]
        store_tile(d_k + tokens, d_x, at, left, H * K, column, K, even)
        d_decay = summed(ones_where(at[:, None] <= at[None, :], dtype), from_past)
        d_decay += crossing[None, :]
        store_tile(d_g + tokens, d_decay, at, left, H * K, column, K, even)


@triton.jit
def gradients_kernel(
    q, k, v, g, d_o, states, d_states, length,
    d_q, d_k, d_g,
    scale: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Some channels of one chunk's gradients of q and k, and with DECAY of the log decays: their
    sums over these channels, [B, T, H, tiles]; the first tile has the chunk's own pairs."""
    even_k: tl.constexpr = K % BK == 0
    tiles: tl.constexpr = (K + BK - 1) // BK
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
    g += token * H + head
    states += entry * K * V
    d_states += entry * K * V
    dtype = q.dtype.element_ty

    d_scores = score_gradients(d_o, v, at, left, H, V, BV) * scale
    q_tile = load_tile(q, at, left, H * K, column, K, even_k)
    k_tile = load_tile(k, at, left, H * K, column, K, even_k)
    past_q = read_states(d_o, states, at, left, column, H, K, V, BV) * scale
    past_k = read_states(v, d_states, at, left, column, H, K, V, BV)
    if DECAY:
        decay, before, after = head_decay(g, at, left, H)
        past_q *= exp(before)
        past_k *= exp(after)
        # What a decay lets through: into later queries from the state (past), from earlier keys
        # into the next state (future), from state to state (crossing).
        past = tl.sum(past_q * q_tile.to(tl.float32), 1)
        future = tl.sum(past_k * k_tile.to(tl.float32), 1)
        crossing = crossing_states(states, d_states, column, K, V, BV) * exp(tl.sum(decay, 0))
    d_scores *= pair_decay(g, at, left, H, DECAY)
    past_q += dot(d_scores.to(dtype), k_tile)
    past_k += dot(tl.trans(d_scores.to(dtype)), q_tile)
    store_tile(d_q, past_q, at, left, H * K, column, K, even_k)
    store_tile(d_k, past_k, at, left, H * K, column, K, even_k)
    if DECAY:
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
def score_gradients(d_o, v, at, left, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """d_o_t . v_j of a chunk, j <= t."""
    return tl.where(at[:, None] >= at[None, :], raw_scores(d_o, v, at, left, H, V, BV), 0.0)


@triton.jit
def crossing_states(states, d_states, column, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """What passes from state to state, in each channel, but for its decay."""
    total = tl.zeros([column.shape[0]], tl.float32)
    for start in range(0, V, BV):
        v_column = start + tl.arange(0, BV)
        state = load_tile(states, column, K, V, v_column, V, V % BV == 0).to(tl.float32)
        d_state = load_tile(d_states, column, K, V, v_column, V, V % BV == 0).to(tl.float32)
        total += tl.sum(state * d_state, 1)
    return total


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
