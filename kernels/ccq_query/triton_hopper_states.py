"""The states of wide keys on Hopper, where keys count alike: as `triton_hopper_walk`, which see, but for the queries.

Two blocks walk the chunks of a head, with half of Sigma's rows each. Their third group only has the counts and means.
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
    SIDE,
    first_means,
    first_rows,
    keep_mean,
    left_rows,
    load_last_start,
    move_mean,
    right_rows,
    send,
    step_of,
    store_last_rows,
    store_ones,
)
from kernels.gluon_blocks import release

# Tokens of a chunk.
C = gl.constexpr(128)
# Channels, and their tiles; groups of a block.
K = gl.constexpr(256)
TILES = gl.constexpr(4)
GROUPS = gl.constexpr(2)
# Chunks whose keys, and whose means, are there or on their way.
RING = gl.constexpr(2)
AHEAD = gl.constexpr(2)


@gluon.jit
def load_keys(k, keys, sequence, chunks, H: gl.constexpr):
    ks, full, empty = keys
    for chunk in range(0, chunks):
        slot = chunk % RING
        mbarrier.wait(empty.index(slot), (chunk // RING & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * C * K)
        for tile in gl.static_range(TILES):
            place = [sequence // H, chunk * C, sequence % H * K + tile * SIDE]
            tma.async_copy_global_to_shared(
                k, place, full.index(slot), ks.index(slot * TILES + tile)
            )


@gluon.jit
def tile_of(ks, slot, tile):
    return ks.index(slot * TILES + tile).reshape([C, SIDE])


@gluon.jit
def rows_of(pair, GROUP: gl.constexpr):
    """A group's tile of rows: a block's are the first and the last, or those between, with as many tiles to write."""
    if GROUP == 0:
        return pair
    else:
        return TILES - 1 - pair


@gluon.jit
def move_means(
    keys, moves, sums, inputs, outputs, sequence, pair, chunks, length,
    H: gl.constexpr,
    INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """Counts and means at the chunks' starts, and their part in what a chunk adds to n Sigma."""
    ks, keys_full, keys_empty = keys
    lefts, rights, full, empty = moves
    ones, of_channel, means, finished = sums
    first_keys, starts, count, key_sum = inputs
    final_count, final_sum, chunk_counts, chunk_means, mean_parts = outputs
    of_parts: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # A thread has half of a column.
    down: gl.constexpr = gl.BlockedLayout([HALF, 1], [1, 32], [2, 2], [1, 0])
    across: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    of_ones: gl.constexpr = gl.BlockedLayout([ROWS, 1], [1, 32], [1, 4], [1, 0])
    dtype: gl.constexpr = ks.dtype
    batch = sequence // H
    starts += batch.to(gl.int64) * length
    first_key = (batch.to(gl.int64) * length * H + sequence % H) * K
    column = gl.arange(0, SIDE, gl.SliceLayout(0, down))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, down))[:, None]
    token = gl.arange(0, C, gl.SliceLayout(0, of_ones))
    tile_row = gl.arange(0, ROWS, gl.SliceLayout(1, of_ones))[:, None]
    n = 0.0
    if INITIAL:
        n = gl.load(count + sequence)
    of_head = sequence.to(gl.int64) * K
    mean = first_means(first_keys, first_key, key_sum, of_head, n, column, K, INITIAL)
    entries = sequence * (chunks + 1)
    coming = -1
    if not RESETS:
        store_ones(ones, tile_row, token, coming, TILES)
        fence_async_shared()
        gl.barrier()
    for chunk in range(0, chunks):
        if pair == 0:
            gl.store(chunk_counts + entries + chunk, n)
            keep_mean(chunk_means, mean_parts, entries + chunk, mean, column, K)
        slot, here = chunk % RING, chunk % AHEAD
        if RESETS:
            coming = load_last_start(starts, chunk, length, C)
            store_ones(ones, tile_row, token, coming, TILES)
            fence_async_shared()
            gl.barrier()
        new, old = step_of(coming, length - chunk * C, n, C, RESETS)
        after = old + new
        mbarrier.wait(keys_full.index(slot), chunk // RING & 1)
        total = gl.zeros([SIDE, ROWS], gl.float32, of_parts)
        for tile in gl.static_range(TILES):
            k_tile = tile_of(ks, slot, tile).permute((1, 0))
            total = warpgroup_mma(k_tile, ones[tile].index(0).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        release(keys_empty.index(slot))
        of_channel.permute((1, 0)).store(total)
        gl.barrier()
        mbarrier.wait(empty.index(here), (chunk // AHEAD & 1) ^ 1)
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
                for group in gl.static_range(GROUPS):
                    if tile == rows_of(pair, group):
                        x = gl.where(below, -moved[tile][None, :], (-kept * s)[None, :])
                        lefts[group].index(here).store(left_rows(row, x, dtype))
                x = gl.where(below, e[None, :], mean[tile][None, :])
                rest = gl.zeros([ROWS, SIDE], dtype, down)
                rights[tile].index(here).store(right_rows(row, x, rest, dtype))
        fence_async_shared()
        release(full.index(here))
        mean = moved
        n = after
    for tile in gl.static_range(TILES):
        means.index(tile).store(mean[tile])
    release(finished)
    if pair == 0:
        gl.store(chunk_counts + entries + chunks, n)
        keep_mean(chunk_means, mean_parts, entries + chunks, mean, column, K)
        gl.store(final_count + sequence, n)
        for tile in gl.static_range(TILES):
            gl.store(final_sum + of_head + tile * SIDE + column, n * mean[tile])


@gluon.jit
def with_keys(
    state, counted, ks, slot, lefts, rights, here, layout: gl.constexpr,
    CENTERED: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """A group's rows of n Sigma after a chunk; without KEPT nothing is left of those before it."""
    updated = ()
    for tile in gl.static_range(TILES):
        part = gl.zeros([SIDE, SIDE], gl.float32, layout)
        part = warpgroup_mma(counted, tile_of(ks, slot, tile), part, use_acc=False, is_async=True)
        if CENTERED:
            left = lefts.index(here).permute((1, 0))
            part = warpgroup_mma(left, rights[tile].index(here), part, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        if KEPT:
            part += state[tile]
        updated += (part,)
    return updated


@gluon.jit
def add_keys(
    keys, moves, sums, results, inputs, outputs, sequence, pair, chunks, length,
    GROUP: gl.constexpr, H: gl.constexpr,
    INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """One group's rows of n Sigma; writes those of Sigma at the chunks' starts."""
    ks, keys_full, keys_empty = keys
    lefts, rights, full, empty = moves
    _, _, means, finished = sums
    starts, count, key_sum, key_outer = inputs
    final_outer, states = outputs
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_keys: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = ks.dtype
    block = rows_of(pair, GROUP)
    starts += (sequence // H).to(gl.int64) * length
    row = block * SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    column = gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    token = gl.arange(0, C, gl.SliceLayout(1, of_keys))
    of_head = sequence.to(gl.int64) * K
    n = 0.0
    if INITIAL:
        n = gl.load(count + sequence)
    state = first_rows(key_sum, key_outer, of_head, n, row, column, layout, K, INITIAL, CENTERED)
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
        entry = (sequence * (chunks + 1) + chunk) * K
        for tile in gl.static_range(TILES):
            # The first rows' last tile the last rows write, as its mirror image: no group writes four.
            if tile >= block and (tile < TILES - 1 or block > 0):
                at = [0, entry + block * SIDE, tile * SIDE]
                turn = send((state[tile] * inverse).to(dtype), states, at, results, turn)
        if block == TILES - 1:
            at = [0, entry, block * SIDE]
            turn = send((state[0] * inverse).to(dtype).permute((1, 0)), states, at, results, turn)
        mbarrier.wait(keys_full.index(slot), chunk // RING & 1)
        own = tile_of(ks, slot, block)
        counted = own.permute((1, 0))
        if RESETS:
            if first > 0:
                # No group counts these keys.
                key = own.load(of_keys)
                own.store(gl.where((token >= first)[:, None], key, gl.zeros_like(key)))
                fence_async_shared()
                gl.barrier()
        else:
            # Faster from registers, of which resets leave too few.
            counted = gl.convert_layout(counted.load(layout), as_left)
        mbarrier.wait(full.index(here), chunk // AHEAD & 1)
        if RESETS and old == 0:
            state = with_keys(
                state, counted, ks, slot, lefts[GROUP], rights, here, layout, CENTERED, False
            )
        else:
            state = with_keys(
                state, counted, ks, slot, lefts[GROUP], rights, here, layout, CENTERED, True
            )
        release(keys_empty.index(slot))
        mbarrier.arrive(empty.index(here), count=1)
        n = old + new
    tma.store_wait(0)
    mbarrier.wait(finished, 0)
    store_last_rows(final_outer, of_head, state, means, n, block, row, column, layout, K, CENTERED)


@gluon.jit
def states_kernel(
    k, keys, starts, count, key_sum, key_outer, length,
    final_count, final_sum, final_outer, chunk_counts, chunk_means, mean_parts, states,
    H: gl.constexpr, INITIAL: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """As `triton_states.states_kernel`, of whole sequences, but for the state at the end, which nothing reads."""
    pairs: gl.constexpr = TILES // GROUPS
    sequence, pair = gl.program_id(0) // pairs, gl.program_id(0) % pairs
    chunks = (length + C - 1) // C
    dtype: gl.constexpr = k.dtype
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rowwise: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(dtype, [RING * TILES, 1, C, SIDE], k.layout)
    lefts = ()
    rights = ()
    ones = ()
    for _ in gl.static_range(TILES):
        # Of each tile by itself: between stores to one buffer the compiler puts a barrier.
        rights += (gl.allocate_shared_memory(dtype, [AHEAD, ROWS, SIDE], plain),)
        ones += (gl.allocate_shared_memory(dtype, [1, ROWS, C], plain),)
    for _ in gl.static_range(GROUPS):
        lefts += (gl.allocate_shared_memory(dtype, [AHEAD, ROWS, SIDE], plain),)
    first_results = gl.allocate_shared_memory(dtype, [LEAVING, 1, SIDE, SIDE], states.layout)
    second_results = gl.allocate_shared_memory(dtype, [LEAVING, 1, SIDE, SIDE], states.layout)
    of_channel = gl.allocate_shared_memory(gl.float32, [ROWS, SIDE], rowwise)
    means = gl.allocate_shared_memory(gl.float32, [TILES, SIDE], flat)
    keys_full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    keys_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], bars)
    finished = gl.allocate_shared_memory(gl.int64, [1], bars)
    for slot in gl.static_range(RING):
        mbarrier.init(keys_full.index(slot), count=1)
        mbarrier.init(keys_empty.index(slot), count=GROUPS + 1)
    for here in gl.static_range(AHEAD):
        mbarrier.init(full.index(here), count=1)
        mbarrier.init(empty.index(here), count=GROUPS)
    mbarrier.init(finished, count=1)
    held = (ks, keys_full, keys_empty)
    moves = (lefts, rights, full, empty)
    sums = (ones, of_channel, means, finished)
    of_state, outputs = (starts, count, key_sum, key_outer), (final_outer, states)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (add_keys, (
                held, moves, sums, first_results, of_state, outputs, sequence, pair, chunks, length,
                first, H, INITIAL, RESETS, CENTERED,
            )),
            (add_keys, (
                held, moves, sums, second_results, of_state, outputs, sequence, pair, chunks, length,
                second, H, INITIAL, RESETS, CENTERED,
            )),
            (move_means, (
                held, moves, sums, (keys, starts, count, key_sum),
                (final_count, final_sum, chunk_counts, chunk_means, mean_parts),
                sequence, pair, chunks, length,
                H, INITIAL, RESETS, CENTERED,
            )),
            (load_keys, (k, held, sequence, chunks, H)),
        ],
        [4, 4, 4],
        [208, 72, 24],
    )  # fmt: skip
