"""The gradients of CCQ's keys on Hopper, where keys count alike.

As `triton_hopper`, which see, with keys and queries in each other's place.
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

from kernels.ccq_query.triton_hopper_blocks import load_last_start, rounded
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
from kernels.gluon_blocks import hidden_zero, release


@gluon.jit
def load_queries(
    q, g, queries, items, chunks, H: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr
):
    qs, gs, full, empty = queries
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        slot = turn % SLOTS
        mbarrier.wait(empty.index(slot), (turn // SLOTS & 1) ^ 1)
        for tile in range(hidden_zero(turn), K // R):
            n = slot * (K // R) + tile
            mbarrier.expect(full.index(n), 4 * C * R)
            at = [sequence // H, chunk * C, sequence % H * K + tile * R]
            tma.async_copy_global_to_shared(q, at, full.index(n), qs.index(n))
            tma.async_copy_global_to_shared(g, at, full.index(n), gs.index(n))
        turn += 1


@gluon.jit
def part_of(tiles, n, block: gl.constexpr):
    """Half of a chunk's rows of a tile."""
    return tiles.index(n).reshape([C, R]).slice(block * R, R, dim=0)


@gluon.jit
def gather(
    k_rows, queries, ring, inputs, d_k, items, chunks, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, RING: gl.constexpr,
    RESETS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """The gradients of one group's keys."""
    ks, k_full, k_empty = k_rows
    qs, gs, full, empty = queries
    lines, starts, means, hs, length = inputs
    TILES: gl.constexpr = K // R
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = ks.dtype
    row = gl.arange(0, R, gl.SliceLayout(1, layout))
    column = gl.arange(0, R, gl.SliceLayout(0, layout))
    turn = 0
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        here = turn % SLOTS
        batch = sequence // H
        weights_q = ()
        weights_g = ()
        for block in gl.static_range(GROUP, GROUPS):  # earlier queries do not see these keys
            first = (here * GROUPS + GROUP + hidden_zero(turn)) * TILES
            first_query = (here + hidden_zero(turn)) * TILES
            scores_q = gl.zeros([R, R], gl.float32, layout)
            scores_g = gl.zeros([R, R], gl.float32, layout)
            for tile in gl.static_range(TILES):
                if block == GROUP:
                    mbarrier.wait(k_full.index(first + tile), turn // SLOTS & 1)
                    mbarrier.wait(full.index(first_query + tile), turn // SLOTS & 1)
                k_tile = square(ks, first + tile)
                q_tile = part_of(qs, first_query + tile, block).permute((1, 0))
                scores_q = warpgroup_mma(k_tile, q_tile, scores_q, is_async=True)
                g_tile = part_of(gs, first_query + tile, block).permute((1, 0))
                scores_g = warpgroup_mma(k_tile, g_tile, scores_g, is_async=True)
            line = lines + item.to(gl.int64) * LINES * C + block * R + column
            share = gl.load(line)[None, :]
            of_q = gl.load(line + C)[None, :]
            of_g = gl.load(line + 2 * C)[None, :]
            scores_q, scores_g = warpgroup_mma_wait(0, deps=[scores_q, scores_g])
            scores_q = scores_q * share - of_q
            scores_g = scores_g * share - of_g
            if block == GROUP:
                causal = row[:, None] <= column[None, :]
                scores_q = gl.where(causal, scores_q, 0.0)
                scores_g = gl.where(causal, scores_g, 0.0)
            if RESETS:
                token = chunk * C + block * R + column
                start = starts + batch.to(gl.int64) * length + token
                first_key = gl.load(start, mask=token < length, other=C)
                seen = (row + GROUP * R)[:, None] >= first_key[None, :]
                scores_q = gl.where(seen, scores_q, 0.0)
                scores_g = gl.where(seen, scores_g, 0.0)
            weights_q += (gl.convert_layout(rounded(scores_q, dtype), as_left),)
            weights_g += (gl.convert_layout(rounded(scores_g, dtype), as_left),)
        # Keys that later chunks see, from the center.
        later = gl.full([R], 1.0, gl.float32, gl.SliceLayout(1, layout))
        if RESETS:
            last_start = load_last_start(starts + batch.to(gl.int64) * length, chunk, length, C)
            later = (row + GROUP * R >= last_start).to(gl.float32)
        first_query = (here + hidden_zero(turn)) * TILES
        totals = ()
        for tile in gl.static_range(TILES):
            total = gl.zeros([R, R], gl.float32, layout)
            for block in gl.static_range(GROUP, GROUPS):
                g_tile = part_of(gs, first_query + tile, block)
                total = warpgroup_mma(weights_q[block - GROUP], g_tile, total, is_async=True)
                q_tile = part_of(qs, first_query + tile, block)
                total = warpgroup_mma(weights_g[block - GROUP], q_tile, total, is_async=True)
            totals += (total,)
        totals = wait_for(totals, 0)
        release(empty.index(here))
        if RESETS or CENTERED:
            for tile in gl.static_range(TILES):
                k_tile = square(ks, first + tile)
                away = k_tile.load(layout).to(gl.float32)
                if CENTERED:
                    entry = (sequence * (chunks + 1) + chunks).to(gl.int64)
                    away -= gl.load(means + entry * K + tile * R + column)[None, :]
                k_tile.store((away * later[:, None]).to(dtype))
            fence_async_shared()
            gl.barrier()
        first = (here * GROUPS + GROUP + hidden_zero(turn)) * TILES
        totals, step = add_symmetric(totals, ks, first, ring, step, RING)
        for tile in gl.static_range(TILES):
            h = gl.load(hs + item.to(gl.int64) * K + tile * R + column)
            total = totals[tile] + later[:, None] * h[None, :]
            square(ks, first + tile).store(total.to(dtype))
            fence_async_shared()
            gl.barrier()
            place = [batch, chunk * C + GROUP * R, sequence % H * K + tile * R]
            tma.async_copy_shared_to_global(d_k, place, ks.index(first + tile))
            if tile > 0:
                free_rows(k_empty, first + tile - 1, k_empty, 0, False, 1)
        free_rows(k_empty, first + TILES - 1, k_empty, 0, False, 0)
        turn += 1


@gluon.jit
def keys_kernel(
    q, k, g, fs, lines, starts, means, hs, length, items,
    d_k,
    H: gl.constexpr, K: gl.constexpr, RESETS: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """As `triton_gradients.keys_kernel`, from the read's `lines`."""
    dtype: gl.constexpr = q.dtype
    TILES: gl.constexpr = K // R
    # Of what shared memory has room for: chunks, and tiles of F that are there or on their way.
    SLOTS: gl.constexpr = 1 if K > 128 else 2
    RING: gl.constexpr = 4
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(dtype, [SLOTS * TILES, 1, C, R], q.layout)
    gs = gl.allocate_shared_memory(dtype, [SLOTS * TILES, 1, C, R], g.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS * TILES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars)
    for n in gl.static_range(SLOTS * TILES):
        mbarrier.init(full.index(n), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(empty.index(slot), count=GROUPS)
    k_rows = allocate_rows(k, SLOTS, TILES)
    ring = allocate_ring(fs, RING)
    chunks = (length + C - 1) // C
    queries = (qs, gs, full, empty)
    inputs = (lines, starts, means, hs, length)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (gather, (
                k_rows, queries, ring, inputs, d_k, items, chunks, first,
                H, K, SLOTS, RING, RESETS, CENTERED,
            )),
            (gather, (
                k_rows, queries, ring, inputs, d_k, items, chunks, second,
                H, K, SLOTS, RING, RESETS, CENTERED,
            )),
            (load_queries, (q, g, queries, items, chunks, H, K, SLOTS)),
            (load_rows, (k, k, k_rows, k_rows, items, chunks, first, H, K, SLOTS, False)),
            (load_rows, (k, k, k_rows, k_rows, items, chunks, second, H, K, SLOTS, False)),
            (load_symmetric, (fs, ring, items, chunks, chunks, K, RING)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip
