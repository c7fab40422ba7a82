"""CCQ's forward in one walk on Hopper, where keys count alike; `triton_kernels` has the mathematics and the notation.

A block walks the chunks of one head. Two groups of four warps carry 64 rows each of n Sigma, in registers, to which the
tensor cores add. Four more warps have what takes no Sigma, and run ahead: weights, counts and means. The others ask for
tiles of 64 tokens and 64 channels. A buffer is `full` when it may be read, and `empty` again when all that read it say
so.

A chunk moves the mean from m to m'. With the sums s of its keys and e of their distances from m,

    n' Sigma' = n Sigma + sum_j k_j k_j^T - s m^T - m' e^T,

where no term grows with n. The tensor cores take the products of float32 vectors too, as those of their parts in the
keys' type (MEAN_PARTS): a part is a row of a tile, in an order in which the products of rows add up.
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

from kernels.ccq_query.triton_hopper_blocks import (
    HALF,
    LEAVING,
    ROWS,
    first_means,
    first_rows,
    keep_mean,
    left_rows,
    load_last_start,
    move_mean,
    parts_of,
    right_rows,
    rounded,
    send,
    square,
    step_of,
    store_last_rows,
    store_ones,
)
from kernels.ccq_query.triton_kernels import MEAN_PARTS
from kernels.gluon_blocks import release

# Tokens of a chunk, as many as a tile has rows and columns.
C = gl.constexpr(64)
# Channels, and their tiles: as many as groups.
K = gl.constexpr(128)
TILES = gl.constexpr(2)
# Chunks whose tokens, and whose weights, are there or on their way.
RING = gl.constexpr(4)
AHEAD = gl.constexpr(2)
# Every so many chunks the statistics are kept, if they are.
KEPT = gl.constexpr(2)


@gluon.jit
def load_tokens(q, k, tokens, sequence, chunks, H: gl.constexpr):
    qs, ks, full, empty = tokens
    for chunk in range(0, chunks):
        slot = chunk % RING
        ready = full.index(slot)
        mbarrier.wait(empty.index(slot), (chunk // RING & 1) ^ 1)
        mbarrier.expect(ready, 4 * C * K)
        for tile in gl.static_range(TILES):
            place = [sequence // H, chunk * C, sequence % H * K + tile * C]
            tma.async_copy_global_to_shared(k, place, ready, ks.index(slot * TILES + tile))
            tma.async_copy_global_to_shared(q, place, ready, qs.index(slot * TILES + tile))


@gluon.jit
def over_tiles(left, right, first, total):
    """The sum of left_i right_i^T over a chunk's tiles, when it is waited for."""
    for tile in gl.static_range(TILES):
        a, b = square(left, first + tile), square(right, first + tile).permute((1, 0))
        if tile == 0:
            total = warpgroup_mma(a, b, total, use_acc=False, is_async=True)
        else:
            total = warpgroup_mma(a, b, total, is_async=True)
    return total


@gluon.jit
def sum_keys(ks, ones, slot, of_parts: gl.constexpr):
    """The sums of each tile's keys, in the column of its number, when they are waited for."""
    total = gl.zeros([C, ROWS], gl.float32, of_parts)
    for tile in gl.static_range(TILES):
        k_tile = square(ks, slot * TILES + tile).permute((1, 0))
        total = warpgroup_mma(k_tile, ones[tile].index(0).permute((1, 0)), total, is_async=True)
    return total


@gluon.jit
def other_rows(row, x, dtype: gl.constexpr):
    """Parts of x in the rows that `left_rows` leaves."""
    first, second, third = parts_of(x, dtype)
    return gl.where(row == HALF - 2, first, gl.where(row == HALF - 1, second, third))


@gluon.jit
def is_other(row):
    return (row == HALF - 2) | (row == HALF - 1) | (row == ROWS - 2)


@gluon.jit
def weigh(
    tokens, weighed, sums, inputs, outputs, sequence, chunks, length,
    H: gl.constexpr,
    INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """What a chunk's tokens take of each other's keys, and their counts and means."""
    qs, ks, tokens_full, tokens_empty = tokens
    weights_of, w_tiles, lefts, rights, lines, full, empty = weighed
    ones, of_channel, means, finished = sums
    keys, lam, starts, count, key_sum = inputs
    r, mean_q, counts, final_count, final_sum, chunk_counts, chunk_means, mean_parts = outputs
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    of_parts: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_channel: gl.constexpr = gl.SliceLayout(1, of_parts)
    # A thread has half of a column.
    down: gl.constexpr = gl.BlockedLayout([HALF, 1], [1, 32], [2, 2], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    dtype: gl.constexpr = ks.dtype
    batch, head = sequence // H, sequence % H
    starts += batch.to(gl.int64) * length
    first_token = batch.to(gl.int64) * length * H + head
    column = gl.arange(0, C, gl.SliceLayout(0, down))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, down))[:, None]
    part = gl.arange(0, ROWS, gl.SliceLayout(0, of_parts))[None, :]
    rows = gl.arange(0, C, by_row)
    at = gl.arange(0, C, gl.SliceLayout(0, layout))
    n = 0.0
    if INITIAL:
        n = gl.load(count + sequence)
    of_head = sequence.to(gl.int64) * K
    mean = first_means(keys, first_token * K, key_sum, of_head, n, column, K, INITIAL)
    center = mean
    entries = sequence * ((chunks + KEPT - 1) // KEPT + 1)
    last_entry = entries + (chunks + KEPT - 1) // KEPT
    coming = -1
    if RESETS:
        coming = load_last_start(starts, 0, length, C)
    store_ones(ones, row, column, coming, TILES)
    fence_async_shared()
    gl.barrier()
    mbarrier.wait(tokens_full.index(0), 0)
    total = warpgroup_mma_wait(0, deps=[sum_keys(ks, ones, 0, of_parts)])
    of_channel.permute((1, 0)).store(total)
    gl.barrier()
    for chunk in range(0, chunks):
        if STATES and chunk % KEPT == 0:
            gl.store(chunk_counts + entries + chunk // KEPT, n)
            keep_mean(chunk_means, mean_parts, entries + chunk // KEPT, mean, column, K)
        slot, here = chunk % RING, chunk % AHEAD
        left = length - chunk * C
        live = rows < left
        scalar = first_token + (chunk * C + rows).to(gl.int64) * H
        strength = -gl.load(lam + scalar, mask=live, other=0.0).to(gl.float32)
        causal = rows[:, None] >= at[None, :]
        since = gl.full([C], 1.0, gl.float32, by_row)
        own = (rows + 1).to(gl.float32)
        new, old = step_of(coming, left, n, C, RESETS)
        if RESETS:
            coming = load_last_start(starts, chunk + 1, length, C)
            first_key = gl.load(starts + chunk * C + rows, mask=live, other=0)
            causal = causal & (at[None, :] >= first_key[:, None])
            since = (first_key < 0).to(gl.float32)
            own -= gl.maximum(first_key, 0).to(gl.float32)
        after = old + new
        of_row = since * n + own
        inverse = 1.0 / of_row
        mbarrier.wait(empty.index(here), (chunk // AHEAD & 1) ^ 1)
        if RESETS:
            store_ones(ones, row, column, coming, TILES)
        # Of keys before a reset nothing is left.
        kept = gl.where(old > 0, 1.0, 0.0)
        moved = ()
        for tile in gl.static_range(TILES):
            s = gl.sum(of_channel.slice(tile, 1).load(across), 0)
            s = gl.convert_layout(s, gl.SliceLayout(0, down))
            e, of_tile = move_mean(mean[tile], s, after, kept, new)
            moved += (of_tile,)
            if CENTERED:
                below = row < HALF
                x = gl.where(below, -moved[tile][None, :], (-kept * s)[None, :])
                lefts[tile].index(here).store(left_rows(row, x, dtype))
                rest = gl.zeros([ROWS, C], dtype, down)
                if STATES:
                    rest = other_rows(
                        row, gl.where(chunk == 0, moved[tile], center[tile])[None, :], dtype
                    )
                x = gl.where(below, e[None, :], mean[tile][None, :])
                rights[tile].index(here).store(right_rows(row, x, rest, dtype))
        if STATES and chunk == 0:
            center = moved
            keep_mean(chunk_means, mean_parts, last_entry, center, column, K)
        shift = gl.zeros([C], gl.float32, by_row)
        of_center = gl.zeros([C], gl.float32, by_row)
        average = gl.zeros([C], gl.float32, by_row)
        scores = gl.zeros([C, C], gl.float32, layout)
        scores = over_tiles(qs, ks, slot * TILES, scores)
        fence_async_shared()
        gl.barrier()
        if CENTERED:
            products = gl.zeros([C, ROWS], gl.float32, of_parts)
            for tile in gl.static_range(TILES):
                right = rights[tile].index(here).permute((1, 0))
                products = warpgroup_mma(
                    square(qs, slot * TILES + tile), right, products, is_async=True
                )
            scores, products = warpgroup_mma_wait(0, deps=[scores, products])
            of_mean = (part >= HALF) & (part < HALF + MEAN_PARTS)
            shift = gl.convert_layout(gl.sum(gl.where(of_mean, products, 0.0), 1), by_row)
            if STATES:
                of_center = gl.sum(gl.where(is_other(part), products, 0.0), 1)
                of_center = gl.convert_layout(of_center, by_row)
            average = (gl.sum(gl.where(causal, scores, 0.0), 1) - own * shift) * inverse
        else:
            scores = warpgroup_mma_wait(0, deps=[scores])
        # The next chunk's sums are on their way meanwhile.
        following = chunk + 1
        if following < chunks:
            mbarrier.wait(tokens_full.index(following % RING), following // RING & 1)
        total = sum_keys(ks, ones, following % RING, of_parts)
        factor = strength * inverse
        scores = scores * factor[:, None] - ((average + shift) * factor)[:, None]
        weights = rounded(gl.where(causal, scores, 0.0), dtype)
        if STATES:
            gl.store(mean_q + scalar, average + shift, mask=live)
            gl.store(r + scalar, average + shift - of_center, mask=live)
            gl.store(counts + scalar, of_row, mask=live)
        weights_of.index(here).store(weights)
        lines.index(here).store(since * n * inverse * strength)
        if CENTERED:
            w = gl.convert_layout(-gl.sum(weights.to(gl.float32), 1), by_channel)
            w_rows = left_rows(part, w[:, None], dtype)
            w_rows = gl.where(part >= HALF, w_rows, gl.zeros_like(w_rows))
            w_tiles.index(here).permute((1, 0)).store(w_rows)
        total = warpgroup_mma_wait(0, deps=[total])
        of_channel.permute((1, 0)).store(total)
        fence_async_shared()
        release(full.index(here))
        mbarrier.arrive(tokens_empty.index(slot), count=1)
        mean = moved
        n = after
    for tile in gl.static_range(TILES):
        means.index(tile).store(mean[tile])
    release(finished)
    gl.store(final_count + sequence, n)
    for tile in gl.static_range(TILES):
        gl.store(final_sum + of_head + tile * C + column, n * mean[tile])


@gluon.jit
def added(
    counted,
    ks,
    slot,
    left,
    rights,
    here,
    tile: gl.constexpr,
    layout: gl.constexpr,
    CENTERED: gl.constexpr,
):
    """What a chunk adds to a group's rows and a tile's columns of n Sigma, when it is waited for.

    By itself: the tensor cores cut off what they add to a sum, which would add up with the chunks.
    """
    total = gl.zeros([C, C], gl.float32, layout)
    total = warpgroup_mma(
        counted, square(ks, slot * TILES + tile), total, use_acc=False, is_async=True
    )
    if CENTERED:
        total = warpgroup_mma(left, rights[tile].index(here), total, is_async=True)
    return total


@gluon.jit
def read(
    tokens, weighed, sums, results, inputs, outputs, sequence, chunks, length,
    GROUP: gl.constexpr, H: gl.constexpr,
    INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """Cleans the columns of one group, and carries its rows of n Sigma."""
    qs, ks, tokens_full, tokens_empty = tokens
    weights_of, w_tiles, lefts, rights, lines, full, empty = weighed
    _, _, means, finished = sums
    starts, count, key_sum, key_outer = inputs
    out, final_outer, states = outputs
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = ks.dtype
    batch, head = sequence // H, sequence % H
    starts += batch.to(gl.int64) * length
    row = GROUP * C + gl.arange(0, C, gl.SliceLayout(1, layout))
    column = gl.arange(0, C, gl.SliceLayout(0, layout))
    of_head = sequence.to(gl.int64) * K
    n = 0.0
    if INITIAL:
        n = gl.load(count + sequence)
    state = first_rows(key_sum, key_outer, of_head, n, row, column, layout, K, INITIAL, CENTERED)
    entries = sequence * ((chunks + KEPT - 1) // KEPT + 1)
    turn = 0
    coming = -1
    if RESETS:
        coming = load_last_start(starts, 0, length, C)
    for chunk in range(0, chunks):
        slot, here = chunk % RING, chunk % AHEAD
        new, old = step_of(coming, length - chunk * C, n, C, RESETS)
        first = coming
        if RESETS:
            coming = load_last_start(starts, chunk + 1, length, C)
        inverse = 0.0
        if n > 0:
            inverse = 1.0 / n
        mbarrier.wait(tokens_full.index(slot), chunk // RING & 1)
        total = gl.zeros([C, C], gl.float32, layout)
        for tile in gl.static_range(TILES):
            copy = (state[tile] * inverse).to(dtype)
            if STATES and tile >= GROUP and chunk % KEPT == 0:
                at = [0, (entries + chunk // KEPT) * K + GROUP * C, tile * C]
                turn = send(copy, states, at, results, turn)
            q_tile = square(qs, slot * TILES + tile).permute((1, 0))
            total = warpgroup_mma(gl.convert_layout(copy, as_left), q_tile, total, is_async=True)
        keys = square(ks, slot * TILES + GROUP).permute((1, 0))
        counted = keys.load(layout)
        if RESETS:
            counted = gl.where((column >= first)[None, :], counted, gl.zeros_like(counted))
        counted = gl.convert_layout(counted, as_left)
        mbarrier.wait(full.index(here), chunk // AHEAD & 1)
        factor = lines.index(here).load(gl.SliceLayout(0, layout))
        total = warpgroup_mma_wait(0, deps=[total]) * factor[None, :]
        weights = weights_of.index(here).permute((1, 0))
        if RESETS:
            total = warpgroup_mma(keys, weights, total, is_async=True)
        else:
            total = warpgroup_mma(counted, weights, total, is_async=True)
        if CENTERED:
            right = rights[GROUP].index(here).permute((1, 0))
            total = warpgroup_mma(right, w_tiles.index(here), total, is_async=True)
        left = lefts[GROUP].index(here).permute((1, 0))
        part = added(counted, ks, slot, left, rights, here, 0, layout, CENTERED)
        total = warpgroup_mma_wait(2 if CENTERED else 1, deps=[total])
        queries = square(qs, slot * TILES + GROUP).permute((1, 0)).load(layout)
        x = queries.to(gl.float32) + total
        at = [batch, chunk * C, head * K + GROUP * C]
        turn = send(x.to(dtype).permute((1, 0)), out, at, results, turn)
        updated = ()
        for tile in gl.static_range(TILES):
            kept = state[tile]
            if RESETS:
                kept = kept * gl.where(old > 0, 1.0, 0.0)
            if tile > 0:
                part = added(counted, ks, slot, left, rights, here, tile, layout, CENTERED)
            updated += (kept + warpgroup_mma_wait(0, deps=[part]),)
        state = updated
        release(tokens_empty.index(slot))
        mbarrier.arrive(empty.index(here), count=1)
        n = old + new
    tma.store_wait(0)
    mbarrier.wait(finished, 0)
    store_last_rows(final_outer, of_head, state, means, n, GROUP, row, column, layout, K, CENTERED)


@gluon.jit
def walk_kernel(
    q, k, keys, lam, starts, count, key_sum, key_outer, length,
    out, r, mean_q, counts, final_count, final_sum, final_outer,
    chunk_counts, chunk_means, mean_parts, states,
    H: gl.constexpr,
    INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """Cleaned queries and the last statistics, from those at the start.

    STATES: writes r, q . mean and n of every token and the statistics of `triton_states.states_kernel` at the starts of
    chunks of 128; the center, entry N of the means, is the mean after the first C tokens.
    """
    sequence = gl.program_id(0)
    chunks = (length + C - 1) // C
    dtype: gl.constexpr = q.dtype
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rowwise: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(dtype, [RING * TILES, 1, C, C], q.layout)
    ks = gl.allocate_shared_memory(dtype, [RING * TILES, 1, C, C], k.layout)
    weights_of = gl.allocate_shared_memory(dtype, [AHEAD, C, C], plain)
    w_tiles = gl.allocate_shared_memory(dtype, [AHEAD, ROWS, C], plain)
    lefts = ()
    rights = ()
    ones = ()
    for _ in gl.static_range(TILES):
        # Of each tile by itself: between stores to one buffer the compiler puts a barrier.
        rights += (gl.allocate_shared_memory(dtype, [AHEAD, ROWS, C], plain),)
        lefts += (gl.allocate_shared_memory(dtype, [AHEAD, ROWS, C], plain),)
        ones += (gl.allocate_shared_memory(dtype, [1, ROWS, C], plain),)
    first_results = gl.allocate_shared_memory(dtype, [LEAVING, 1, C, C], out.layout)
    second_results = gl.allocate_shared_memory(dtype, [LEAVING, 1, C, C], out.layout)
    lines = gl.allocate_shared_memory(gl.float32, [AHEAD, C], flat)
    of_channel = gl.allocate_shared_memory(gl.float32, [ROWS, C], rowwise)
    means = gl.allocate_shared_memory(gl.float32, [TILES, C], flat)
    tokens_full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    tokens_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], bars)
    finished = gl.allocate_shared_memory(gl.int64, [1], bars)
    for slot in gl.static_range(RING):
        mbarrier.init(tokens_full.index(slot), count=1)
        mbarrier.init(tokens_empty.index(slot), count=TILES + 1)
    for here in gl.static_range(AHEAD):
        mbarrier.init(full.index(here), count=1)
        mbarrier.init(empty.index(here), count=TILES)
    mbarrier.init(finished, count=1)
    tokens = (qs, ks, tokens_full, tokens_empty)
    weighed = (weights_of, w_tiles, lefts, rights, lines, full, empty)
    sums = (ones, of_channel, means, finished)
    of_state, outputs = (starts, count, key_sum, key_outer), (out, final_outer, states)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (read, (
                tokens, weighed, sums, first_results, of_state, outputs, sequence, chunks, length,
                first, H, INITIAL, RESETS, CENTERED, STATES,
            )),
            (read, (
                tokens, weighed, sums, second_results, of_state, outputs, sequence, chunks, length,
                second, H, INITIAL, RESETS, CENTERED, STATES,
            )),
            (weigh, (
                tokens, weighed, sums, (keys, lam, starts, count, key_sum),
                (r, mean_q, counts, final_count, final_sum, chunk_counts, chunk_means, mean_parts),
                sequence, chunks, length,
                H, INITIAL, RESETS, CENTERED, STATES,
            )),
            (load_tokens, (q, k, tokens, sequence, chunks, H)),
        ],
        [4, 4, 4],
        [184, 120, 24],
    )  # fmt: skip
