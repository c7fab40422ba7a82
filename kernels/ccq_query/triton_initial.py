"""The gradient of the initial state, from its definition; `triton_kernels` has the notation.

The state's share of Sigma_t is e^{G_t} / n_t. Sums over tokens run in one order, in float32, whatever
the batch and the compilation.
"""

import triton
import triton.language as tl

from kernels.triton_blocks import dot, last, load_tile, load_vector, store_tile


@triton.jit
def load_shares(
    lam, log_decay, count, at, live, total, H: tl.constexpr, HAS_DECAY: tl.constexpr
):  # fmt: skip
    """-lam_t e^{G_t} / n_t of some tokens, and G at the last of them; `total` is G before them."""
    share = -tl.load(lam + at * H, mask=live, other=0.0).to(tl.float32)
    share /= tl.load(count + at * H, mask=live, other=1.0)
    if HAS_DECAY:
        decay = tl.load(log_decay + at * H, mask=live, other=0.0).to(tl.float32)
        sums = total + tl.cumsum(decay, 0)
        share *= tl.exp(sums)
        total = last(sums, tl.arange(0, at.shape[0]) == at.shape[0] - 1)
    return share, total


@triton.jit
def initial_sums_kernel(
    q, g, clean, lam, log_decay, count, mean_q, mean_g, d_count, d_sum, length,
    initial_count, initial_sum,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, HAS_DECAY: tl.constexpr,
):  # fmt: skip
    """The gradients of a sequence's count and sum of keys. `clean`: q - Sigma q, in float32. S: tokens a step."""
    WIDTH: tl.constexpr = triton.next_power_of_2(K)
    even: tl.constexpr = K == WIDTH
    stride: tl.constexpr = H * K
    sequence = tl.program_id(0).to(tl.int64)
    batch, head = sequence // H, sequence % H
    tokens = batch * length * stride + head * K
    scalar = batch * length * H + head
    column = tl.arange(0, WIDTH)
    of_count = 0.0
    of_sum = tl.zeros([WIDTH], tl.float32)
    total = 0.0
    for start in range(0, length, S):
        at = (start + tl.arange(0, S)).to(tl.int64)
        live = at < length
        share, total = load_shares(
            lam + scalar, log_decay + scalar, count + scalar, at, live, total, H, HAS_DECAY
        )
        queries = load_tile(q + tokens, at, length, stride, column, K, even).to(tl.float32)
        grads = load_tile(g + tokens, at, length, stride, column, K, even).to(tl.float32)
        read = queries - load_tile(clean + tokens, at, length, stride, column, K, even)
        of_q = tl.load(mean_q + scalar + at * H, mask=live, other=0.0)
        of_g = tl.load(mean_g + scalar + at * H, mask=live, other=0.0)
        of_count += tl.sum(share * (of_q * of_g - tl.sum(grads * read, 1)), 0)
        of_sum -= tl.sum((share * of_q)[:, None] * grads + (share * of_g)[:, None] * queries, 0)
    left = tl.exp(total)
    tl.store(initial_count + sequence, of_count + left * tl.load(d_count + sequence))
    of_sum += left * load_vector(d_sum + sequence * K, column, K)
    tl.store(initial_sum + sequence * K + column, of_sum, mask=column < K)


@triton.jit
def initial_outer_kernel(
    q, g, lam, log_decay, count, d_outer, length,
    initial_outer,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, HAS_DECAY: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of a sequence's sum of k k^T. S: tokens a step."""
    tiles: tl.constexpr = (K + BT - 1) // BT
    even: tl.constexpr = K % BT == 0
    stride: tl.constexpr = H * K
    sequence = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    tile = tl.program_id(0) % (tiles * tiles)
    batch, head = sequence // H, sequence % H
    tokens = batch * length * stride + head * K
    scalar = batch * length * H + head
    i = tile // tiles * BT + tl.arange(0, BT)
    j = tile % tiles * BT + tl.arange(0, BT)
    outer = tl.zeros([BT, BT], tl.float32)
    total = 0.0
    for start in range(0, length, S):
        at = (start + tl.arange(0, S)).to(tl.int64)
        share, total = load_shares(
            lam + scalar, log_decay + scalar, count + scalar, at, at < length, total, H, HAS_DECAY
        )
        g_i = load_tile(g + tokens, at, length, stride, i, K, even).to(tl.float32)
        q_j = load_tile(q + tokens, at, length, stride, j, K, even).to(tl.float32)
        outer += dot(tl.trans(share[:, None] * g_i), q_j)
    outer += tl.exp(total) * load_tile(d_outer + sequence * K * K, i, K, K, j, K, even)
    store_tile(initial_outer + sequence * K * K, outer, i, K, K, j, K, even)
