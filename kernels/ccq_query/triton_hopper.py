"""CCQ's read on Hopper, where keys count alike; `triton_kernels` has the mathematics and the notation.

A block takes chunk after chunk, in tiles of R tokens or channels by R channels. Two groups of four warps
have the rows of one half each, and go at their own pace: one computes while the other waits, loads or
stores. Four more warps only ask for tiles: one for a chunk's keys and means, one for each group's queries
and, backward, its rows of `other`, one for the state, of which the tiles on and above the diagonal stand
for their mirror images too. A buffer is `full` when its tiles have come, and `empty` again when all groups
that read it say so. What is written goes where the queries were, and from there to memory.

At K 256 both groups' instructions have to stay in the instruction cache of 128 KB, or all takes three times
as long. So what the tensor cores can add up is theirs, also sums of vectors in float32, as products of their
parts in the keys' type (MEAN_PARTS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.ccq_query.triton_hopper_blocks import HALF, ROWS, parts_of, rounded
from kernels.ccq_query.triton_hopper_tiles import (
    GROUPS,
    LINES,
    C,
    R,
    add_symmetric,
    allocate_ring,
    allocate_rows,
    free_rows,
    load_rows,
    load_symmetric,
    square,
    wait_for,
)
from kernels.ccq_query.triton_kernels import MEAN_PARTS
from kernels.gluon_blocks import hidden_zero, release


@gluon.jit
def load_keys(k, mean_parts, keys, items, chunks, H: gl.constexpr, K: gl.constexpr):
    """A tile of means has parts of the mean at the chunk's start in its first half, of the center in the other."""
    ks, means, full, empty = keys
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        entry = sequence * (chunks + 1)
        mbarrier.wait(empty, (turn & 1) ^ 1)
        for tile in range(hidden_zero(turn), K // R):
            ready = full.index(tile)
            mbarrier.expect(ready, 2 * (C + ROWS) * R)
            at = [sequence // H, chunk * C, sequence % H * K + tile * R]
            tma.async_copy_global_to_shared(k, at, ready, ks.index(tile))
            below = means.index(tile).slice(0, HALF, dim=0)
            above = means.index(tile).slice(HALF, HALF, dim=0)
            at = [(entry + chunk) * MEAN_PARTS, tile * R]
            tma.async_copy_global_to_shared(mean_parts, at, ready, below)
            at = [(entry + chunks) * MEAN_PARTS, tile * R]
            tma.async_copy_global_to_shared(mean_parts, at, ready, above)
        turn += 1


@gluon.jit
def sum_columns(x, first: gl.constexpr, layout: gl.constexpr):
    """The sum of MEAN_PARTS columns of a matrix."""
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    wanted = (column >= first) & (column < first + MEAN_PARTS)
    return gl.convert_layout(gl.sum(gl.where(wanted[None, :], x, 0.0), 1), layout)


@gluon.jit
def less_mean(reads, total, means, zero, layout: gl.constexpr, dtype: gl.constexpr):
    """reads - total mean^T, in tiles, from the mean's parts, when it is waited for."""
    as_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    part = gl.arange(0, ROWS, gl.SliceLayout(0, as_left))[None, :]
    parts = parts_of(gl.convert_layout(-total, gl.SliceLayout(1, as_left)), dtype)
    for n in gl.static_range(MEAN_PARTS):
        left = parts[n][:, None]
        left = gl.where(part < MEAN_PARTS - n, left, gl.zeros_like(left))
        moved = ()
        for tile in gl.static_range(len(reads)):
            mean = means.index(tile + zero)
            moved += (warpgroup_mma(left, mean, reads[tile], is_async=True),)
        reads = moved
    return reads


@gluon.jit
def store_parts(tile, of_x, of_query):
    """In the columns of their tokens, the parts of both vectors."""
    down: gl.constexpr = gl.BlockedLayout([HALF, 1], [1, 32], [1, 4], [1, 0])
    row = gl.arange(0, HALF, gl.SliceLayout(1, down))[:, None]
    dtype: gl.constexpr = tile.dtype
    x = parts_of(gl.convert_layout(of_x, gl.SliceLayout(0, down))[None, :], dtype)
    query = parts_of(gl.convert_layout(of_query, gl.SliceLayout(0, down))[None, :], dtype)
    rows = gl.where(row == 0, x[0], gl.where(row == 1, x[1], x[2]))
    others = gl.where(row == 3, query[0], gl.where(row == 4, query[1], query[2]))
    rows = gl.where(row < MEAN_PARTS, rows, others)
    tile.store(gl.where(row < 2 * MEAN_PARTS, rows, gl.zeros_like(rows)))


@gluon.jit
def clean_queries(
    keys, q_rows, x_rows, ring, sums, inputs, outputs, items, chunks, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
    RESETS: gl.constexpr, CENTERED: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """The rows of one group."""
    ks, means, k_full, k_empty = keys
    qs, q_full, q_empty = q_rows
    xs, x_full, x_empty = x_rows
    lam, starts, other_r, mean_other, counts, length = inputs
    out, r, mean_q, count, d_lam, shares, h_terms, lines = outputs
    TILES: gl.constexpr = K // R
    KEYS: gl.constexpr = (GROUP + 1) * R  # later ones are of no use
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_means: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, of_scores)
    by_read: gl.constexpr = gl.SliceLayout(1, layout)
    by_channel: gl.constexpr = gl.SliceLayout(1, of_sums)
    dtype: gl.constexpr = ks.dtype
    rows = GROUP * R + gl.arange(0, R, by_row)
    at = gl.arange(0, KEYS, gl.SliceLayout(0, of_scores))
    channel = gl.arange(0, R, by_channel)
    part = gl.arange(0, HALF, gl.SliceLayout(0, of_sums))[None, :]
    turn = 0
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        chunk = item % chunks
        sequence = (item // chunks).to(gl.int64)
        live = rows < length - chunk * C
        scalar = (sequence // H * length + chunk * C + rows) * H + sequence % H
        strength = gl.load(lam + scalar, mask=live, other=0.0).to(gl.float32)
        incoming = gl.load(counts + sequence * (chunks + 1) + chunk)
        causal = (rows[:, None] >= at[None, :]) & live[:, None]
        since = gl.full([R], 1.0, gl.float32, by_row)
        new = (rows + 1).to(gl.float32)
        if RESETS:
            place = sequence // H * length + chunk * C + rows
            first_key = gl.load(starts + place, mask=live, other=0)
            causal = causal & (at[None, :] >= first_key[:, None])
            since = (first_key < 0).to(gl.float32)
            new -= gl.maximum(first_key, 0).to(gl.float32)
        old = since * incoming
        n = old + new
        inverse = 1.0 / n
        if BACKWARD:
            r_other = gl.load(other_r + scalar, mask=live, other=0.0)
            mean_of_other = gl.load(mean_other + scalar, mask=live, other=0.0)

        zero = hidden_zero(turn)
        slot = turn % SLOTS * GROUPS + GROUP + zero
        scores = gl.zeros([R, KEYS], gl.float32, of_scores)
        for tile in gl.static_range(TILES):
            mbarrier.wait(q_full.index(slot * TILES + tile), turn // SLOTS & 1)
            mbarrier.wait(k_full.index(tile), turn & 1)
            k_tile = ks.index(tile + zero).reshape([C, R]).slice(0, KEYS, dim=0)
            q_tile = square(qs, slot * TILES + tile)
            scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, is_async=True)
        mean_of = gl.zeros([R], gl.float32, by_row)
        distance = gl.zeros([R], gl.float32, by_row)
        if CENTERED:
            products = gl.zeros([R, ROWS], gl.float32, of_means)
            for tile in gl.static_range(TILES):
                parts = means.index(tile + zero).permute((1, 0))
                q_tile = square(qs, slot * TILES + tile)
                products = warpgroup_mma(q_tile, parts, products, is_async=True)
            scores, products = warpgroup_mma_wait(0, deps=[scores, products])
            shift = sum_columns(products, 0, by_row)
            average = (gl.sum(gl.where(causal, scores, 0.0), 1) - new * shift) * inverse
            mean_of = average + shift
            distance = mean_of - sum_columns(products, HALF, by_row)
        else:
            scores = warpgroup_mma_wait(0, deps=[scores])
        scores = scores * inverse[:, None] - (mean_of * inverse)[:, None]
        weights = rounded(gl.where(causal, scores, 0.0), dtype)
        total = gl.sum(weights.to(gl.float32), 1)
        weights = gl.convert_layout(weights, as_left)
        gl.store(mean_q + scalar, mean_of, mask=live)
        if not BACKWARD:
            gl.store(r + scalar, distance, mask=live)
            gl.store(count + scalar, n, mask=live)

        reads = ()
        for _ in gl.static_range(TILES):
            reads += (gl.zeros([R, R], gl.float32, layout),)
        reads, step = add_symmetric(reads, qs, slot * TILES, ring, step, RING)
        zero = hidden_zero(turn)
        kept = gl.convert_layout(old * inverse, by_read)[:, None]
        added = ()
        for tile in gl.static_range(TILES):
            k_tile = ks.index(tile + zero).reshape([C, R]).slice(0, KEYS, dim=0)
            added += (warpgroup_mma(weights, k_tile, reads[tile] * kept, is_async=True),)
        reads = wait_for(added, 0)
        if CENTERED:
            reads = less_mean(reads, total, means, zero, layout, dtype)
        if BACKWARD:
            share = -strength * inverse
            line = lines + item.to(gl.int64) * LINES * C + rows
            gl.store(line, share)
            gl.store(line + C, share * mean_of_other)
            gl.store(line + 2 * C, share * mean_of)
            share *= since
            parts = sums.index(GROUP + zero)
            store_parts(parts, -share * distance, -share * r_other)
            share = gl.convert_layout(share, by_read)
            projected = gl.zeros([R], gl.float32, by_read)
        reads = wait_for(reads, 0)
        fence_async_shared()
        release(k_empty)

        strength = gl.convert_layout(strength, by_read)
        if BACKWARD:
            for tile in gl.static_range(TILES):
                mbarrier.wait(x_full.index(GROUP * TILES + tile), turn & 1)
                of_x = gl.zeros([R, HALF], gl.float32, of_sums)
                of_query = gl.zeros([R, HALF], gl.float32, of_sums)
                if CENTERED:
                    right = parts.permute((1, 0))
                    x_tile = square(xs, GROUP * TILES + tile + zero).permute((1, 0))
                    of_x = warpgroup_mma(x_tile, right, of_x, is_async=True)
                    q_tile = square(qs, slot * TILES + tile).permute((1, 0))
                    of_query = warpgroup_mma(q_tile, right, of_query, is_async=True)
                    of_x, of_query = warpgroup_mma_wait(0, deps=[of_x, of_query])
                h_term = gl.sum(gl.where(part < MEAN_PARTS, of_x, of_query), 1)
                term = ((sequence * chunks + chunk) * GROUPS + GROUP) * K + tile * R + channel
                gl.store(h_terms + term, h_term)
        narrow = item // chunks
        for tile in gl.static_range(TILES):
            q_tile = square(qs, slot * TILES + tile)
            clean = q_tile.load(layout).to(gl.float32) - strength[:, None] * reads[tile]
            q_tile.store(clean.to(dtype))
            if BACKWARD:
                x_tile = square(xs, GROUP * TILES + tile + zero)
                x = x_tile.load(layout).to(gl.float32)
                x_tile.store((x * share[:, None]).to(dtype))
                projected += gl.sum(x * reads[tile], 1)
            fence_async_shared()
            gl.barrier()
            place = [narrow // H, chunk * C + GROUP * R, narrow % H * K + tile * R]
            tma.async_copy_shared_to_global(out, place, qs.index(slot * TILES + tile))
            if BACKWARD:
                tma.async_copy_shared_to_global(shares, place, xs.index(GROUP * TILES + tile))
            if tile > 0:
                free_rows(
                    q_empty, slot * TILES + tile - 1, x_empty, GROUP * TILES + tile - 1, BACKWARD, 1
                )
        if BACKWARD:
            projected = gl.convert_layout(projected, by_row)
            gl.store(d_lam + scalar, -projected.to(d_lam.dtype.element_ty), mask=live)
        free_rows(
            q_empty, slot * TILES + TILES - 1, x_empty, GROUP * TILES + TILES - 1, BACKWARD, 0
        )
        turn += 1


@gluon.jit
def read_kernel(
    q, k, other, mean_parts, states, lam, starts, other_r, mean_other, counts, length, items,
    out, r, mean_q, count, d_lam, shares, h_terms, lines,
    H: gl.constexpr, K: gl.constexpr,
    RESETS: gl.constexpr, CENTERED: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.read_kernel`, with chunks of C tokens, `items` in all.

    BACKWARD: `mean_other` is the queries' product with the mean. `lines` are what the keys' gradients take of each
    token t of a chunk: -lam_t / n_t by itself, and times q_t . mean and g_t . mean.
    """
    dtype: gl.constexpr = q.dtype
    TILES: gl.constexpr = K // R
    # Of what shared memory has room for: chunks whose queries, and tiles of the state that are there or on their way.
    SLOTS: gl.constexpr = 1 if K > 128 else 2
    RING: gl.constexpr = (3 if BACKWARD else 10) if K > 128 else 6
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ks = gl.allocate_shared_memory(dtype, [TILES, 1, C, R], k.layout)
    means = gl.allocate_shared_memory(dtype, [TILES, ROWS, R], mean_parts.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    for tile in gl.static_range(TILES):
        mbarrier.init(k_full.index(tile), count=1)
    mbarrier.init(k_empty, count=GROUPS)
    q_rows = allocate_rows(q, SLOTS, TILES)
    x_rows = q_rows
    sums = means
    if BACKWARD:
        x_rows = allocate_rows(other, 1, TILES)
        sums = gl.allocate_shared_memory(dtype, [GROUPS, HALF, R], plain)
    ring = allocate_ring(states, RING)
    chunks = (length + C - 1) // C
    keys = (ks, means, k_full, k_empty)
    inputs = (lam, starts, other_r, mean_other, counts, length)
    outputs = (out, r, mean_q, count, d_lam, shares, h_terms, lines)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (clean_queries, (
                keys, q_rows, x_rows, ring, sums, inputs, outputs, items, chunks, first,
                H, K, SLOTS, RING, RESETS, CENTERED, BACKWARD,
            )),
            (clean_queries, (
                keys, q_rows, x_rows, ring, sums, inputs, outputs, items, chunks, second,
                H, K, SLOTS, RING, RESETS, CENTERED, BACKWARD,
            )),
            (load_keys, (k, mean_parts, keys, items, chunks, H, K)),
            (load_rows, (q, other, q_rows, x_rows, items, chunks, first, H, K, SLOTS, BACKWARD)),
            (load_rows, (q, other, q_rows, x_rows, items, chunks, second, H, K, SLOTS, BACKWARD)),
            (load_symmetric, (states, ring, items, chunks, chunks + 1, K, RING)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip
