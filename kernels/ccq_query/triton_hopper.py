"""CCQ's read on Hopper, where keys count alike; `triton_kernels` has the mathematics and the notation.

A block takes chunk after chunk. Two groups of four warps have the rows of one half each, and go at
their own pace: one computes while the other waits, loads or stores. Two more warps only ask for tiles:
one for a chunk's keys and queries, one for its state in tiles of R rows and, backward, for `other`.
A buffer is `full` when its tile has come, and `empty` again when all groups that read it say so. What
is written goes where the queries were, and from there to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from kernels.ccq_query.triton_kernels import MEAN_PARTS
from kernels.gluon_blocks import release

# Rows of a group and of a tile of the state.
R = gl.constexpr(64)
GROUPS = gl.constexpr(2)
C = gl.constexpr(128)
# Tiles of the state, and of `other`, that are held or on their way.
RING = gl.constexpr(4)
# Rows that products take at least; of a mean's parts the others are not looked at.
MEAN_ROWS = gl.constexpr(8)


@gluon.jit
def load_tokens(q, k, mean_parts, tiles, items, chunks, H: gl.constexpr, K: gl.constexpr):
    q_tiles, k_tile, mean_tile, center_tile, k_full, k_empty, q_full, q_empty = tiles
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        batch, column = sequence // H, sequence % H * K
        entry = sequence * (chunks + 1)
        row = chunk * C
        mbarrier.wait(k_empty, (turn & 1) ^ 1)
        mbarrier.expect(k_full, 2 * (C + 2 * MEAN_ROWS) * K)
        at = [(entry + chunk) * MEAN_PARTS, 0]
        tma.async_copy_global_to_shared(mean_parts, at, k_full, mean_tile)
        at = [(entry + chunks) * MEAN_PARTS, 0]
        tma.async_copy_global_to_shared(mean_parts, at, k_full, center_tile)
        tma.async_copy_global_to_shared(k, [batch, row, column], k_full, k_tile)
        for group in gl.static_range(GROUPS):
            full = q_full.index(group)
            mbarrier.wait(q_empty.index(group), (turn & 1) ^ 1)
            mbarrier.expect(full, 2 * R * K)
            at = [batch, row + group * R, column]
            tma.async_copy_global_to_shared(q, at, full, q_tiles.index(group))
        turn += 1


@gluon.jit
def load_next(source, at, ring, full, empty, step):
    """Asks for a tile as soon as the ring has room for it."""
    slot = step % RING
    mbarrier.wait(empty.index(slot), (step // RING & 1) ^ 1)
    mbarrier.expect(full.index(slot), source.nbytes_per_cta)
    tma.async_copy_global_to_shared(source, at, full.index(slot), ring.index(slot))
    return step + 1


@gluon.jit
def load_states(
    states, other, ring, full, empty, items, chunks,
    H: gl.constexpr, K: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        row = (sequence * (chunks + 1) + chunk) * K
        for tile in range(K // R):
            step = load_next(states, [0, row + tile * R, 0], ring, full, empty, step)
        if BACKWARD:
            for group in range(GROUPS):
                at = [sequence // H, (chunk * GROUPS + group) * R, sequence % H * K]
                step = load_next(other, at, ring, full, empty, step)


@gluon.jit
def wait_next(ring, full, step):
    slot = step % RING
    mbarrier.wait(full.index(slot), step // RING & 1)
    return ring.index(slot).reshape([ring.shape[2], ring.shape[3]])


@gluon.jit
def product(a, b, layout: gl.constexpr):
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[1]
    zero = gl.zeros([M, N], gl.float32, layout)
    return warpgroup_mma(a, b, zero, use_acc=False)


@gluon.jit
def times_mean(x, parts, layout: gl.constexpr):
    """x @ mean to float32's precision, from the mean's parts."""
    of_parts: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MEAN_ROWS, 16])
    products = product(x, parts.permute((1, 0)), of_parts)
    column = gl.arange(0, MEAN_ROWS, gl.SliceLayout(0, of_parts))
    total = gl.sum(gl.where((column < MEAN_PARTS)[None, :], products, 0.0), 1)
    return gl.convert_layout(total, layout)


@gluon.jit
def store_tile(target, at, tile):
    """Writes rows from a tile that threads wrote, those that there are, and waits until it may be used again."""
    fence_async_shared()
    gl.barrier()
    tma.async_copy_shared_to_global(target, at, tile)
    tma.store_wait(0)


@gluon.jit
def clean_queries(
    tiles, ring, ring_full, ring_empty, inputs, outputs, items, chunks, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr,
    RESETS: gl.constexpr, CENTERED: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """The rows of one group."""
    q_tiles, k_tiles, mean_tile, center_tile, k_full, k_empty, q_full, q_empty = tiles
    lam, starts, other_r, counts, means, length = inputs
    out, r, mean_q, count, d_lam, shares, h_terms = outputs
    KEYS: gl.constexpr = (GROUP + 1) * R  # later ones are of no use
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_reads: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, of_reads, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    by_read: gl.constexpr = gl.SliceLayout(1, of_reads)
    dtype: gl.constexpr = q_tiles.dtype
    q_tile = q_tiles.index(GROUP).reshape([R, K])
    k_tile = k_tiles.reshape([C, K]).slice(0, KEYS, dim=0)
    rows = GROUP * R + gl.arange(0, R, by_row)
    at = gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
    column = gl.arange(0, K, gl.SliceLayout(0, of_reads))
    turn = 0
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        chunk = item % chunks
        sequence = (item // chunks).to(gl.int64)
        entry = sequence * (chunks + 1) + chunk
        live = rows < length - chunk * C
        scalar = (sequence // H * length + chunk * C + rows) * H + sequence % H
        strength = gl.load(lam + scalar, mask=live, other=0.0).to(gl.float32)
        incoming = gl.load(counts + entry)
        causal = (rows[:, None] >= at[None, :]) & live[:, None]
        since = gl.full([R], 1.0, gl.float32, by_row)
        if RESETS:
            place = sequence // H * length + chunk * C + rows
            first_key = gl.load(starts + place, mask=live, other=0)
            causal = causal & (at[None, :] >= first_key[:, None])
            since = (first_key < 0).to(gl.float32)
            new = (rows + 1 - gl.maximum(first_key, 0)).to(gl.float32)
        else:
            new = (rows + 1).to(gl.float32)
        old = since * incoming
        n = old + new
        kept = old / n
        inverse = 1.0 / n
        if BACKWARD:
            r_other = gl.load(other_r + scalar, mask=live, other=0.0)
            share = -strength * since / n

        mbarrier.wait(k_full, turn & 1)
        mbarrier.wait(q_full.index(GROUP), turn & 1)
        scores = product(q_tile, k_tile.permute((1, 0)), of_scores)
        shift = gl.zeros([R], gl.float32, by_row)
        center_q = gl.zeros([R], gl.float32, by_row)
        average = gl.zeros([R], gl.float32, by_row)
        if CENTERED:
            shift = times_mean(q_tile, mean_tile, by_row)
            center_q = times_mean(q_tile, center_tile, by_row)
            scores = scores - shift[:, None]
            average = gl.sum(gl.where(causal, scores, 0.0), 1) * inverse
            scores = scores - average[:, None]
        weights = gl.where(causal, scores * inverse[:, None], 0.0).to(dtype)
        total = gl.convert_layout(gl.sum(weights.to(gl.float32), 1), by_read)
        weights = gl.convert_layout(weights, as_left)
        mean_of = average + shift
        distance = mean_of - center_q
        gl.store(mean_q + scalar, mean_of, mask=live)
        if not BACKWARD:
            gl.store(r + scalar, distance, mask=live)
            gl.store(count + scalar, n, mask=live)

        read = gl.zeros([R, K], gl.float32, of_reads)
        for tile in gl.static_range(K // R):
            state = wait_next(ring, ring_full, step)
            read = warpgroup_mma(q_tile.slice(tile * R, R, dim=1), state, read)
            release(ring_empty.index(step % RING))
            step += 1
        read = read * gl.convert_layout(kept, by_read)[:, None]
        read = warpgroup_mma(weights, k_tile, read)
        release(k_empty)

        strength = gl.convert_layout(strength, by_read)
        if BACKWARD:
            # The other group's tile passes by.
            for group in gl.static_range(GROUP):
                wait_next(ring, ring_full, step + group)
                release(ring_empty.index((step + group) % RING))
            x_tile = wait_next(ring, ring_full, step + GROUP)
            share = gl.convert_layout(share, by_read)
            of_x = share * gl.convert_layout(distance, by_read)
            of_query = share * gl.convert_layout(r_other, by_read)
        if CENTERED:
            origin = gl.load(means + entry * K + column)
            read = read - total[:, None] * origin[None, :]
        query = q_tile.load(of_reads).to(gl.float32)
        q_tile.store((query - strength[:, None] * read).to(dtype))
        if BACKWARD:
            x = x_tile.load(of_reads).to(gl.float32)
            x_tile.store((x * share[:, None]).to(dtype))
            projected = gl.convert_layout(gl.sum(x * read, 1), by_row)
            gl.store(d_lam + scalar, -projected.to(d_lam.dtype.element_ty), mask=live)
            terms = x * of_x[:, None] + query * of_query[:, None]
            term = ((sequence * chunks + chunk) * GROUPS + GROUP) * K + column
            gl.store(h_terms + term, -gl.sum(terms, 0))
        narrow = item // chunks
        place = [narrow // H, chunk * C + GROUP * R, narrow % H * K]
        store_tile(out, place, q_tiles.index(GROUP))
        release(q_empty.index(GROUP))
        if BACKWARD:
            slot = (step + GROUP) % RING
            store_tile(shares, place, ring.index(slot))
            release(ring_empty.index(slot))
            for group in gl.static_range(GROUP + 1, GROUPS):
                wait_next(ring, ring_full, step + group)
                release(ring_empty.index((step + group) % RING))
            step += GROUPS
        turn += 1


@gluon.jit
def read_kernel(
    q, k, other, mean_parts, states, lam, starts, other_r, counts, means, length, items,
    out, r, mean_q, count, d_lam, shares, h_terms,
    H: gl.constexpr, K: gl.constexpr,
    RESETS: gl.constexpr, CENTERED: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.read_kernel`, with chunks of C tokens, `items` in all."""
    dtype: gl.constexpr = q.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, R, K], q.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, C, K], k.layout)
    mean_tile = gl.allocate_shared_memory(dtype, [MEAN_ROWS, K], mean_parts.layout)
    center_tile = gl.allocate_shared_memory(dtype, [MEAN_ROWS, K], mean_parts.layout)
    ring = gl.allocate_shared_memory(dtype, [RING, 1, R, K], states.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars)
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_empty, count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=1)
    for slot in gl.static_range(RING):
        mbarrier.init(ring_full.index(slot), count=1)
        mbarrier.init(ring_empty.index(slot), count=GROUPS)
    chunks = (length + C - 1) // C
    tiles = (q_tiles, k_tile, mean_tile, center_tile, k_full, k_empty, q_full, q_empty)
    inputs = (lam, starts, other_r, counts, means, length)
    outputs = (out, r, mean_q, count, d_lam, shares, h_terms)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (clean_queries, (
                tiles, ring, ring_full, ring_empty, inputs, outputs, items, chunks, first,
                H, K, RESETS, CENTERED, BACKWARD,
            )),
            (clean_queries, (
                tiles, ring, ring_full, ring_empty, inputs, outputs, items, chunks, second,
                H, K, RESETS, CENTERED, BACKWARD,
            )),
            (load_tokens, (q, k, mean_parts, tiles, items, chunks, H, K)),
            (load_states, (
                states, other, ring, ring_full, ring_empty, items, chunks, H, K, BACKWARD,
            )),
        ],
        [4, 2, 2],
        [240, 24, 24],
    )  # fmt: skip
