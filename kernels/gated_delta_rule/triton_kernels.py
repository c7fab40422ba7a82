"""Triton kernels of the chunked gated delta rule. Imports nothing else but Triton.

Within a chunk of C tokens, with G_i the sum of log decays up to token i, D_ij = exp(G_i - G_j), and
S the state [K, V] that enters:

    w = v - exp(G) (k S)              what each token finds missing from the state before the chunk
    u = w - N w                       and before itself: u_i = w_i - sum_j D_ij k_i.k_j beta_j u_j
    o = scale exp(G) (q S) + P u      P_ij = scale D_ij q_i.k_j beta_j  (i >= j)
    S' = exp(G_C) S + sum_j exp(G_C - G_j) beta_j k_j u_j^T

and backwards, with dS' the gradient of S' and every product of rows again a matmul:

    d = P^T do + exp(G_C - G) beta (k dS')                  dv = d - N^T d
    dS = exp(G_C) dS' + scale (exp(G) q)^T do - (exp(G) k)^T dv

N is I - (I + A)^-1 with A_ij = D_ij k_i.k_j beta_j for i > j: strictly lower triangular, and only
as large as keys are alike.

States are kept transposed, [V, K], so that a chunk's products chain in registers: every matmul of
the two kernels that walk the sequence has the state, or a result of the matmul before, on its left
and a tile as loaded on its right.

No difference of cumulative sums crosses a reset (a token that forgets everything): `gates` holds,
for each token of a chunk, five rows: the sums of log decays without resets, coarse and fine part,
the number of resets so far, the factor that reaches from the chunk's start to the token, and the
one from the token to the chunk's end, times beta.
"""

# mypy: ignore-errors
# In Triton a tuple may grow in a loop that is unrolled.

import triton
import triton.language as tl

from kernels.gated_delta_rule.triton_inverse import invert_unit_lower
from kernels.triton_blocks import FORGET, exp

# Sums of multiples of 1/1024 are exact in float32 over a chunk; what is left over is small.
COARSE = tl.constexpr(1024.0)
# A write strength of exactly zero would leave its own gradient as zero over zero.
SMALLEST_BETA = tl.constexpr(1e-12)
COARSE_ROW, FINE_ROW, RESETS_ROW, START_ROW, END_ROW = (tl.constexpr(i) for i in range(5))
GATE_ROWS = tl.constexpr(5)


@triton.jit
def load_beta(pointer, HV: tl.constexpr, i, live):
    beta = tl.load(pointer + i * HV, mask=live, other=0.0).to(tl.float32)
    return tl.where(tl.abs(beta) < SMALLEST_BETA, SMALLEST_BETA, beta)


@triton.jit
def decay_between(coarse_i, coarse_j, fine_i, fine_j, resets_i, resets_j, mask):
    """exp(G_i - G_j) where `mask` and no reset lies between, else 0, as a matrix [i, j]."""
    exponent = (coarse_i[:, None] - coarse_j[None, :]) + (fine_i[:, None] - fine_j[None, :])
    reaches = mask & (resets_i[:, None] == resets_j[None, :])
    return exp(tl.where(reaches, exponent, float("-inf")))


@triton.jit
def row_products(
    x, y, i, live, stride, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):
    """x y^T of two chunks' rows."""
    total = tl.zeros((i.shape[0], i.shape[0]), tl.float32)
    for first in range(0, K, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)[None, :]
        mask = live[:, None] & (column < K)
        x_tile = tl.load(x + i[:, None] * stride + column, mask=mask, other=0.0)
        y_tile = tl.load(y + i[:, None] * stride + column, mask=mask, other=0.0)
        total = tl.dot(x_tile, tl.trans(y_tile), total, input_precision=PRECISION)
    return total


@triton.jit
def prepare_kernel(
    q, k, log_decay, beta, gates, corrections, scores, scratch, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens do to each other: gates, N and P of one chunk and head."""
    chunks = tl.cdiv(T, C)
    chunk = tl.program_id(0) % chunks
    head = tl.program_id(0) // chunks
    tile = tl.program_id(0).to(tl.int64)
    hv = head % HV
    row = (head // HV).to(tl.int64) * T + chunk * C
    i = tl.arange(0, C)
    live = i < T - chunk * C
    g = tl.load(log_decay + row * HV + hv + i * HV, mask=live, other=0.0).to(tl.float32)
    strength = load_beta(beta + row * HV + hv, HV, i, live)
    reset = g < FORGET
    g = tl.where(reset, 0.0, g)
    coarse = tl.floor(g * COARSE) / COARSE
    fine = g - coarse
    resets = tl.cumsum(tl.where(reset, 1.0, 0.0), axis=0)
    coarse_sum = tl.cumsum(coarse, axis=0)
    fine_sum = tl.cumsum(fine, axis=0)
    start = exp(tl.where(resets == 0.0, coarse_sum + fine_sum, float("-inf")))
    to_end = (tl.sum(coarse, axis=0) - coarse_sum) + (tl.sum(fine, axis=0) - fine_sum)
    end = strength * exp(tl.where(resets == tl.max(resets, axis=0), to_end, float("-inf")))
    gates += tile * (GATE_ROWS * C) + i
    tl.store(gates + COARSE_ROW * C, coarse_sum)
    tl.store(gates + FINE_ROW * C, fine_sum)
    tl.store(gates + RESETS_ROW * C, resets)
    tl.store(gates + START_ROW * C, start)
    tl.store(gates + END_ROW * C, end)

    q += row * (H * K) + (hv // (HV // H)) * K
    k += row * (H * K) + (hv // (HV // H)) * K
    lower = i[:, None] >= i[None, :]
    decay = decay_between(coarse_sum, coarse_sum, fine_sum, fine_sum, resets, resets, lower)
    decay *= strength[None, :]
    square = tile * (C * C) + i[:, None] * C + i[None, :]
    # One product after the other: less to hold at a time.
    p = row_products(q, k, i, live, H * K, K, BLOCK_K, PRECISION) * decay * scale
    tl.store(scores + square, p.to(scores.dtype.element_ty))
    a = row_products(k, k, i, live, H * K, K, BLOCK_K, PRECISION) * decay
    a = tl.where(i[:, None] > i[None, :], a, 0.0)
    inverse = -invert_unit_lower(a, scratch + tile * (C * 16), C, INVERSE_PRECISION)
    n = tl.where(i[:, None] > i[None, :], inverse, 0.0)
    tl.store(corrections + square, n.to(corrections.dtype.element_ty))


@triton.jit
def load_state(pointer, vc, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns `vc` of a state [K, V], transposed, as a tuple of tiles [vc, BLOCK_K]."""
    tiles = ()
    for first in tl.static_range(0, K, BLOCK_K):
        kc = first + tl.arange(0, BLOCK_K)
        mask = (kc[None, :] < K) & (vc[:, None] < V)
        tiles += (tl.load(pointer + kc[None, :] * V + vc[:, None], mask=mask, other=0.0),)
    return tiles


@triton.jit
def store_state(pointer, tiles, vc, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """The inverse of `load_state`."""
    for n in tl.static_range(0, len(tiles)):
        kc = n * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (kc[None, :] < K) & (vc[:, None] < V)
        tl.store(pointer + kc[None, :] * V + vc[:, None], tiles[n], mask=mask)


@triton.jit
def store_tile(pointer, tile, n, vc, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Writes tile n of a state into a transposed state [V, K]."""
    kc = n * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (kc[None, :] < K) & (vc[:, None] < V)
    tl.store(pointer + vc[:, None] * K + kc[None, :], tile, mask=mask)


@triton.jit
def load_keys(pointer, stride: tl.constexpr, i, live, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A chunk's queries or keys as a tuple of tiles [C, BLOCK_K]."""
    tiles = ()
    for first in tl.static_range(0, K, BLOCK_K):
        kc = first + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (kc[None, :] < K)
        entry = i[:, None] * stride + kc[None, :]
        tiles += (tl.load(pointer + entry, mask=mask, other=0.0),)
    return tiles


@triton.jit
def scale_state(state, factor):
    scaled = ()
    for n in tl.static_range(0, len(state)):
        scaled += (state[n] * factor,)
    return scaled


@triton.jit
def add_outer(state, left, keys, PRECISION: tl.constexpr):
    """state^T + left keys, for left [vc, C]."""
    added = ()
    for n in tl.static_range(0, len(state)):
        added += (tl.dot(left, keys[n], state[n], input_precision=PRECISION),)
    return added


@triton.jit
def forward_kernel(
    q, k, v, beta, gates, corrections, scores, initial_state, o, u, states, last, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    VALUES: tl.constexpr, OUTPUT: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Walks the chunks of one head with BLOCK_V of the state's columns, to the final state `last`.

    VALUES: False takes v as zero. OUTPUT: writes o. STATES: writes, for the backward, each chunk's
    beta u [B, HV, chunks, V, C] and the state that enters it, [.., V, K].

    Where keys are alike, N w and P u nearly cancel. Float16 for N and P keeps three more bits than
    bfloat16; the rows on their left are scaled to its range.
    """
    dtype = k.dtype.element_ty
    fine: tl.constexpr = k.dtype.element_ty if STATES else corrections.dtype.element_ty
    chunks = tl.cdiv(T, C)
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    batch = head // HV
    hv = head % HV
    vc = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    in_v = vc[:, None] < V
    key_head = (hv // (HV // H)) * K
    values = i[None, :] * (HV * V) + vc[:, None]
    square = i[:, None] * C + i[None, :]
    state = load_state(initial_state + head * (K * V), vc, K, V, BLOCK_K)
    rest = tl.zeros((BLOCK_V, C), dtype)
    for chunk in range(chunks):
        tile = head * chunks + chunk
        row = batch * T + chunk * C
        live = i < T - chunk * C
        mask = live[None, :] & in_v
        gate = gates + tile * (GATE_ROWS * C)
        k_tile = load_keys(k + row * (H * K) + key_head, H * K, i, live, K, BLOCK_K)
        n = tl.load(corrections + tile * (C * C) + square).to(fine)
        start = tl.load(gate + START_ROW * C + i)
        end = tl.load(gate + END_ROW * C + i)
        carried = tl.load(gate + START_ROW * C + C - 1)
        if VALUES and OUTPUT:
            v_tile = tl.load(v + row * (HV * V) + hv * V + values, mask=mask, other=0.0)
        if OUTPUT:
            q_tile = load_keys(q + row * (H * K) + key_head, H * K, i, live, K, BLOCK_K)
            p = tl.load(scores + tile * (C * C) + square)

        read = tl.zeros((BLOCK_V, C), tl.float32)
        out = tl.zeros((BLOCK_V, C), tl.float32)
        # A tile's rounded copy lives no longer than its products: registers are scarce here.
        for part in tl.static_range(0, len(state)):
            rounded = state[part].to(dtype)
            read = tl.dot(rounded, tl.trans(k_tile[part]), read, input_precision=PRECISION)
            if OUTPUT:
                out = tl.dot(rounded, tl.trans(q_tile[part]), out, input_precision=PRECISION)
            if STATES:
                store_tile(states + tile * (V * K), rounded, part, vc, K, V, BLOCK_K)
        w = -start[None, :] * read
        if VALUES:
            if not OUTPUT:
                v_tile = tl.load(v + row * (HV * V) + hv * V + values, mask=mask, other=0.0)
            w += v_tile
        if fine == tl.float16:
            largest = tl.maximum(tl.max(tl.abs(w), axis=1), 1e-20)[:, None]
            w *= 1.0 / largest
        writes = tl.dot((-w).to(fine), tl.trans(n), w, input_precision=PRECISION)
        if OUTPUT:
            out *= (scale * start)[None, :]
            if fine == tl.float16:
                out *= 1.0 / largest
            out = tl.dot(writes.to(fine), tl.trans(p), out, input_precision=PRECISION)
            if fine == tl.float16:
                out *= largest
            at = row * (HV * V) + hv * V + values
            tl.store(o + at, out.to(o.dtype.element_ty), mask=mask)
        if fine == tl.float16:
            writes *= largest
        if STATES:
            strength = load_beta(beta + row * HV + hv, HV, i, live)
            at = tile * (V * C) + vc[:, None] * C + i[None, :]
            tl.store(u + at, (strength[None, :] * writes).to(dtype), mask=in_v)
        state = scale_state(state, carried)
        writes *= end[None, :]
        state = add_outer(state, writes.to(dtype), k_tile, PRECISION)
        rest = (writes - writes.to(dtype).to(tl.float32)).to(dtype)
    # Where keys are alike, what a chunk writes nearly cancels, and its rounding errors do not: the
    # next chunk would read and correct them, but nothing follows the last.
    row = batch * T + (chunks - 1) * C
    live = i < T - (chunks - 1) * C
    k_tile = load_keys(k + row * (H * K) + key_head, H * K, i, live, K, BLOCK_K)
    state = add_outer(state, rest, k_tile, PRECISION)
    store_state(last + head * (K * V), state, vc, K, V, BLOCK_K)


@triton.jit
def reverse_kernel(
    q, k, gates, corrections, scores, d_out, d_last, d_v, d_states, d_initial, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Walks the chunks of one head backwards with the gradient of BLOCK_V of the state's columns.

    Writes the gradient of the initial state and, with STATES, dv and the gradient of the state that
    leaves each chunk [B, HV, chunks, V, K].
    """
    dtype = k.dtype.element_ty
    chunks = tl.cdiv(T, C)
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // blocks).to(tl.int64)
    batch = head // HV
    hv = head % HV
    vc = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    in_v = vc[:, None] < V
    key_head = (hv // (HV // H)) * K
    values = i[None, :] * (HV * V) + vc[:, None]
    square = i[:, None] * C + i[None, :]
    d_state = load_state(d_last + head * (K * V), vc, K, V, BLOCK_K)
    for step in range(chunks):
        chunk = chunks - 1 - step
        tile = head * chunks + chunk
        row = batch * T + chunk * C
        live = i < T - chunk * C
        mask = live[None, :] & in_v
        gate = gates + tile * (GATE_ROWS * C)
        k_tile = load_keys(k + row * (H * K) + key_head, H * K, i, live, K, BLOCK_K)
        q_tile = load_keys(q + row * (H * K) + key_head, H * K, i, live, K, BLOCK_K)
        do = tl.load(d_out + row * (HV * V) + hv * V + values, mask=mask, other=0.0)
        n = tl.load(corrections + tile * (C * C) + square).to(dtype)
        p = tl.load(scores + tile * (C * C) + square).to(dtype)
        start = tl.load(gate + START_ROW * C + i)
        end = tl.load(gate + END_ROW * C + i)
        carried = tl.load(gate + START_ROW * C + C - 1)

        du = tl.zeros((BLOCK_V, C), tl.float32)
        for part in tl.static_range(0, len(d_state)):
            rounded = d_state[part].to(dtype)
            du = tl.dot(rounded, tl.trans(k_tile[part]), du, input_precision=PRECISION)
            if STATES:
                store_tile(d_states + tile * (V * K), rounded, part, vc, K, V, BLOCK_K)
        du = tl.dot(do, p, end[None, :] * du, input_precision=PRECISION)
        dv = tl.dot((-du).to(dtype), n, du, input_precision=PRECISION)
        if STATES:
            at = row * (HV * V) + hv * V + values
            tl.store(d_v + at, dv.to(d_v.dtype.element_ty), mask=mask)
        d_state = scale_state(d_state, carried)
        do = ((scale * start)[None, :] * do.to(tl.float32)).to(dtype)
        d_state = add_outer(d_state, do, q_tile, PRECISION)
        d_state = add_outer(d_state, (-start[None, :] * dv).to(dtype), k_tile, PRECISION)
    store_state(d_initial + head * (K * V), d_state, vc, K, V, BLOCK_K)


@triton.jit
def gradient_kernel(
    q, k, log_decay, beta, gates, d_out, d_v, u, states, d_states,
    d_q, d_k, d_decay, d_beta, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, decay and beta of one chunk and head, for BLOCK_K of the key's columns.

    d_q, d_k are per value head, [B, T, HV, K]; d_decay, d_beta [column blocks, B, T, HV] sum to the
    gradients.
    """
    dtype = k.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32  # 16 bits have no use for it, nor the registers
    chunks = tl.cdiv(T, C)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block = tl.program_id(0) % blocks
    tile = (tl.program_id(0) // blocks).to(tl.int64)
    chunk = (tile % chunks).to(tl.int32)
    head = tile // chunks
    hv = head % HV
    row = (head // HV) * T + chunk * C
    i = tl.arange(0, C)
    live = i < T - chunk * C
    kc = block * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k = kc[None, :] < K
    d_out += row * (HV * V) + hv * V
    d_v += row * (HV * V) + hv * V
    u += tile * (V * C)
    states += tile * (V * K)
    d_states += tile * (V * K)

    dq = tl.zeros((C, BLOCK_K), tl.float32)
    dk_read = tl.zeros((C, BLOCK_K), tl.float32)
    dk_write = tl.zeros((C, BLOCK_K), tl.float32)
    x = tl.zeros((C, C), tl.float32)
    y = tl.zeros((C, C), tl.float32)
    trace = tl.zeros((16, BLOCK_K), tl.float32)
    one = (tl.num_programs(0) > 0).to(tl.float32)  # which Triton does not know
    for first in range(0, V, BLOCK_V):
        vc = first + tl.arange(0, BLOCK_V)
        in_v = vc < V
        mask = live[:, None] & in_v[None, :]
        do = tl.load(d_out + i[:, None] * (HV * V) + vc[None, :], mask=mask, other=0.0)
        dv = tl.load(d_v + i[:, None] * (HV * V) + vc[None, :], mask=mask, other=0.0)
        u_tile = tl.load(u + vc[:, None] * C + i[None, :], mask=in_v[:, None], other=0.0)
        mask = in_v[:, None] & in_k
        s = tl.load(states + vc[:, None] * K + kc[None, :], mask=mask, other=0.0)
        ds = tl.load(d_states + vc[:, None] * K + kc[None, :], mask=mask, other=0.0)
        dq = tl.dot(do, s, dq, input_precision=PRECISION)
        dk_read = tl.dot(dv, s, dk_read, input_precision=PRECISION)
        dk_write = tl.dot(tl.trans(u_tile), ds, dk_write, input_precision=PRECISION)
        x = tl.dot(do, u_tile, x, input_precision=PRECISION)
        y = tl.dot(dv, u_tile, y, input_precision=PRECISION)
        # Sums within a thread; across threads once, after the loop.
        product = s.to(tl.float32) * ds.to(tl.float32)
        trace += tl.sum(tl.reshape(product, (BLOCK_V // 16, 16, BLOCK_K)), axis=0)
        # Waits for the products with s and ds, whose buffers are the next to be filled: NOTES.md.
        dk_write *= one

    gate = gates + tile * (GATE_ROWS * C)
    coarse = tl.load(gate + COARSE_ROW * C + i)
    fine = tl.load(gate + FINE_ROW * C + i)
    resets = tl.load(gate + RESETS_ROW * C + i)
    start = tl.load(gate + START_ROW * C + i)
    end = tl.load(gate + END_ROW * C + i)
    mask = live[:, None] & in_k
    entry = row * (H * K) + (hv // (HV // H)) * K + i[:, None] * (H * K) + kc[None, :]
    q_tile = tl.load(q + entry, mask=mask, other=0.0)
    k_tile = tl.load(k + entry, mask=mask, other=0.0)
    strength = load_beta(beta + row * HV + hv, HV, i, live)
    lower = i[:, None] >= i[None, :]
    decay = decay_between(coarse, coarse, fine, fine, resets, resets, lower)
    on_diagonal = i[:, None] == i[None, :]
    x = scale * x * decay
    if EXACT:
        itself = tl.sum(tl.where(on_diagonal, x, 0.0), axis=1)
        x = tl.where(on_diagonal, 0.0, x)
    n_q = x.to(dtype)
    n_k = tl.where(i[:, None] > i[None, :], -y * decay, 0.0).to(dtype)
    # y is dv (beta u)^T; its diagonal is beta^2 times the gradient of beta.
    of_beta = tl.sum(tl.where(on_diagonal, y, 0.0), axis=1) / (strength * strength)

    # A log decay at l scales every path from a token before l to one at l or after; none crosses a
    # reset. What a token reads of itself is no such path: it cancels, but for its rounding.
    keys = k_tile.to(tl.float32)
    dk = (end / strength)[:, None] * dk_write
    leaving = tl.sum(keys * dk, axis=1)
    if EXACT:
        written = tl.dot(tl.trans(n_q), q_tile, input_precision=PRECISION)
        written = tl.dot(tl.trans(n_k), k_tile, written, input_precision=PRECISION)
        within = -tl.sum(keys * written, axis=1)
        dk += written
    else:
        dk = tl.dot(tl.trans(n_q), q_tile, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(n_k), k_tile, dk, input_precision=PRECISION)
        within = leaving - tl.sum(keys * dk, axis=1)
    dk_read = tl.dot(n_k, k_tile, -start[:, None] * dk_read, input_precision=PRECISION)
    within += tl.sum(keys * dk_read, axis=1)
    dk += dk_read
    dq = tl.dot(n_q, k_tile, (scale * start)[:, None] * dq, input_precision=PRECISION)
    within += tl.sum(q_tile.to(tl.float32) * dq, axis=1)
    reached = lower & (resets[:, None] == resets[None, :])
    of_decay = tl.sum(tl.where(reached, within[:, None], 0.0), axis=0)
    passing = tl.load(gate + START_ROW * C + C - 1) * tl.sum(tl.sum(trace, axis=1), axis=0)
    of_decay += (tl.cumsum(leaving, axis=0) - leaving) + passing

    if EXACT:
        dq += itself[:, None] * keys
        dk += itself[:, None] * q_tile.to(tl.float32)
    entry = row * (HV * K) + hv * K + i[:, None] * (HV * K) + kc[None, :]
    tl.store(d_q + entry, dq.to(d_q.dtype.element_ty), mask=mask)
    tl.store(d_k + entry, dk.to(d_k.dtype.element_ty), mask=mask)
    g = tl.load(log_decay + row * HV + hv + i * HV, mask=live, other=0.0).to(tl.float32)
    rows = (tl.num_programs(0) // (blocks * chunks * HV)).to(tl.int64) * T
    entry = (block * rows + row) * HV + hv + i * HV
    tl.store(d_decay + entry, tl.where(g < FORGET, 0.0, of_decay), mask=live)
    tl.store(d_beta + entry, tl.where(block == 0, of_beta, 0.0), mask=live)
