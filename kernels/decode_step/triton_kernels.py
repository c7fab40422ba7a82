"""The decode step's Triton kernels. Imports nothing but Triton.

Each block of threads takes a tile of a head's state, which it alone reads and writes: so the states
are updated in place, whatever order the tiles come in. A tile stays in registers between its load
and its store. All blocks of `statistics_kernel` read the old count and mean, so `memory_kernel`, which
comes after them, writes the new ones. Where a small tile has fewer elements than the block has
threads, several load the same element: hence a barrier before what was loaded is overwritten.

Where states are stacked over layers, each has HEADS heads (of all rows of the batch) and `layer` points
to the index of the one to update. HEADS is 0 where they are not.
"""

import triton
import triton.language as tl

from kernels.triton_blocks import load_tile, load_vector, store_tile


@triton.jit
def statistics_kernel(
    q,
    k,
    lam,
    log_decay,
    count,
    mean,
    covariance,
    layer,
    clean,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DECAY: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """ROWS rows of one head's covariance, and what they read with q:

    past = exp(log_decay) n;  n = past + 1;  delta = k - mean
    Sigma = past / n Sigma + past / n^2 delta delta^T;  clean = q - lam Sigma q
    """
    tiles: tl.constexpr = (K + ROWS - 1) // ROWS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    place = head
    if HEADS:
        place += tl.load(layer).to(tl.int64) * HEADS
    q += head * K
    k += head * K
    mean += place * K
    covariance += place * K * K

    x = load_tile(covariance, rows, K, K, columns, K, K == WIDTH)
    past, n = _count(count + place, log_decay + head, DECAY)
    # Rounding adds up over tokens: hence once a token for x, and for `keep` to either side alike.
    keep = tl.div_rn(past, n)
    left, right = load_vector(k, rows, K), load_vector(k, columns, K)
    weight = 1 / n
    if CENTERED:
        weight *= keep
        left -= load_vector(mean, rows, K)
        right -= load_vector(mean, columns, K)
    x = tl.fma(x, keep, (weight * left)[:, None] * right[None, :])
    tl.debug_barrier()
    store_tile(covariance, x, rows, K, K, columns, K, K == WIDTH)

    read = tl.sum(x * load_vector(q, columns, K)[None, :], 1)
    cleaned = load_vector(q, rows, K) - tl.load(lam + head).to(tl.float32) * read
    tl.store(clean + head * K + rows, cleaned, mask=rows < K)


@triton.jit
def _count(count, log_decay, DECAY: tl.constexpr):
    """The weight of the keys before this one, and of all."""
    past = tl.load(count)
    if DECAY:
        past *= tl.exp(tl.load(log_decay).to(tl.float32))
    return past, past + 1


@triton.jit
def memory_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    state,
    ccq_k,
    ccq_log_decay,
    count,
    mean,
    layer,
    out,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DECAY: tl.constexpr,
    DELTA: tl.constexpr,
    CCQ: tl.constexpr,
    CCQ_DECAY: tl.constexpr,
):
    """COLUMNS columns of one head's state, and what q reads from them:

    S = exp(log_decay) S;  u = beta (v - S^T k), or v without DELTA
    S = S + k u^T;  out = scale S^T q

    Both products are with the S that was loaded, as (S + k u^T)^T q = S^T q + (k . q) u. DECAY is 0
    for none, 1 for one a head, 2 for one a key channel. With CCQ, the first block of a key head also
    counts its key and moves its mean.
    """
    tiles: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, WIDTH)
    place = head
    if HEADS:
        place += tl.load(layer).to(tl.int64) * HEADS
    state += place * K * V

    x = load_tile(state, rows, K, V, columns, V, V % COLUMNS == 0)
    query = load_vector(q + head // GROUP * K, rows, K)
    key = load_vector(k + head // GROUP * K, rows, K)
    value = load_vector(v + head * V, columns, V)
    if DECAY == 1:
        x *= tl.exp(tl.load(log_decay + head).to(tl.float32))
    elif DECAY == 2:
        x *= tl.exp(load_vector(log_decay + head * K, rows, K))[:, None]
    read = tl.sum(x * query[:, None], 0)
    if DELTA:
        held = tl.sum(x * key[:, None], 0)
        value = tl.load(beta + head).to(tl.float32) * (value - held)
    x += key[:, None] * value[None, :]
    tl.debug_barrier()
    store_tile(state, x, rows, K, V, columns, V, V % COLUMNS == 0)
    read = scale * (read + tl.sum(query * key, 0) * value)
    tl.store(out + head * V + columns, read, mask=columns < V)

    if CCQ:
        key_head = head // GROUP
        if tl.program_id(0) % (tiles * GROUP) == 0:
            count += place // GROUP
            mean += place // GROUP * K
            past, n = _count(count, ccq_log_decay + key_head, CCQ_DECAY)
            counted = load_vector(ccq_k + key_head * K, rows, K)
            center = load_vector(mean, rows, K)
            # The sum would keep what rounding leaves of a mean that is forgotten.
            center = tl.where(past > 0, center + (counted - center) / n, counted)
            tl.debug_barrier()
            tl.store(count, n)
            tl.store(mean + rows, center, mask=rows < K)
