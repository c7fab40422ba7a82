"""The gradients of `triton_kernels.gradient_kernel` on Hopper, which has the mathematics and the notation.

A block takes chunk after chunk, with 128 of the key's columns. Two groups of four warps have the half
of the columns each, and go at their own pace. Two more warps only ask for tiles: one for queries and keys,
one for what a step over V takes. A buffer is `full` when its tiles have come, and `empty` again when the
groups that read it say so. Gradients go where queries and keys were, and from there to memory.
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

from kernels.gated_delta_rule.triton_hopper_chunks import load_beta
from kernels.gated_delta_rule.triton_kernels import (
    COARSE_ROW,
    END_ROW,
    FINE_ROW,
    GATE_ROWS,
    RESETS_ROW,
    START_ROW,
)
from kernels.gluon_blocks import exp, release
from kernels.triton_blocks import FORGET

# Tokens of a chunk, a group's columns of K and a step's of V: all tiles are squares.
C = gl.constexpr(64)
GROUPS = gl.constexpr(2)
# Steps over V that are held or on their way, and their tiles: d_out, d_v, u, and S and dS of each group.
RING = gl.constexpr(2)
TILES = gl.constexpr(7)


@gluon.jit
def place_of(item, chunks, H: gl.constexpr, K: gl.constexpr):
    """Row of the batch, head, chunk, chunk of all, and pair of column blocks of an item of work."""
    pairs: gl.constexpr = K // (GROUPS * C)
    tile = item // pairs
    sequence = tile // chunks
    return sequence // H, sequence % H, tile % chunks, tile, item % pairs


@gluon.jit
def load_tokens(q, k, tokens, full, empty, items, chunks, H: gl.constexpr, K: gl.constexpr):
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, chunk, _, pair = place_of(item, chunks, H, K)
        column = head * K + pair * (GROUPS * C)
        for group in gl.static_range(GROUPS):
            ready = full.index(group)
            mbarrier.wait(empty.index(group), (turn & 1) ^ 1)
            mbarrier.expect(ready, 2 * q.nbytes_per_cta)
            at = [batch, chunk * C, column + group * C]
            tma.async_copy_global_to_shared(q, at, ready, tokens.index(2 * group))
            tma.async_copy_global_to_shared(k, at, ready, tokens.index(2 * group + 1))
        turn += 1


@gluon.jit
def load_steps(
    d_out, d_v, u, states, d_states, ring, full, empty, items, chunks,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, chunk, tile, pair = place_of(item, chunks, H, K)
        for first in range(0, V, C):
            ready = full.index(step % RING)
            at_ring = step % RING * TILES
            mbarrier.wait(empty.index(step % RING), (step // RING & 1) ^ 1)
            mbarrier.expect(ready, TILES * u.nbytes_per_cta)
            at = [batch, chunk * C, head * V + first]
            tma.async_copy_global_to_shared(d_out, at, ready, ring.index(at_ring))
            tma.async_copy_global_to_shared(d_v, at, ready, ring.index(at_ring + 1))
            row = tile * V + first
            tma.async_copy_global_to_shared(u, [0, row, 0], ready, ring.index(at_ring + 2))
            for group in gl.static_range(GROUPS):
                at = [0, row, (pair * GROUPS + group) * C]
                tma.async_copy_global_to_shared(states, at, ready, ring.index(at_ring + 3 + group))
                tma.async_copy_global_to_shared(
                    d_states, at, ready, ring.index(at_ring + 5 + group)
                )
            step += 1


@gluon.jit
def square(tiles, n):
    return tiles.index(n).reshape([C, C])


@gluon.jit
def gate(gates, row: gl.constexpr, at):
    return gl.load(gates + row * C + at)


@gluon.jit
def differentiate(
    tokens, ring, pairs, token_bars, ring_bars, inputs, outputs, length, items, chunks,
    GROUP: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
):  # fmt: skip
    """The columns of one group."""
    log_decay, beta, gates = inputs
    d_q, d_k, d_decay, d_beta = outputs
    token_full, token_empty = token_bars
    ring_full, ring_empty = ring_bars
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    # Each thread has 16 rows of its columns.
    down: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    dtype: gl.constexpr = tokens.dtype
    q_tile = square(tokens, 2 * GROUP)
    k_tile = square(tokens, 2 * GROUP + 1)
    to_q = pairs.index(2 * GROUP)
    to_k = pairs.index(2 * GROUP + 1)
    i = gl.arange(0, C, by_row)
    j = gl.arange(0, C, gl.SliceLayout(0, layout))
    lower = i[:, None] >= j[None, :]
    diagonal = i[:, None] == j[None, :]
    turn = 0
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        batch, head, chunk, tile, pair = place_of(item, chunks, H, K)
        # Asked for long before they are used.
        mine = gates + tile.to(gl.int64) * (GATE_ROWS * C)
        live = i < length - chunk * C
        row = (batch.to(gl.int64) * length + chunk * C + i) * H + head
        g = gl.load(log_decay + row, mask=live, other=0.0).to(gl.float32)
        strength = load_beta(beta + row, live)
        coarse_i, fine_i = gate(mine, COARSE_ROW, i), gate(mine, FINE_ROW, i)
        start, end = gate(mine, START_ROW, i), gate(mine, END_ROW, i)
        resets_i = gate(mine, RESETS_ROW, i)
        carried = gl.load(mine + START_ROW * C + C - 1)
        dq = gl.zeros([C, C], gl.float32, layout)
        dk_read = gl.zeros([C, C], gl.float32, layout)
        dk_write = gl.zeros([C, C], gl.float32, layout)
        x = gl.zeros([C, C], gl.float32, layout)
        y = gl.zeros([C, C], gl.float32, layout)
        trace = gl.zeros([C, C], gl.float32, down).reshape([4, 16, C])
        trace = gl.sum(trace, 1)
        if turn > 0:
            # The last gradients have left.
            tma.store_wait(0)
            release(token_empty.index(GROUP))
        for _ in range(V // C):
            mbarrier.wait(ring_full.index(step % RING), step // RING & 1)
            at_ring = step % RING * TILES
            do, dv, u = square(ring, at_ring), square(ring, at_ring + 1), square(ring, at_ring + 2)
            s, ds = square(ring, at_ring + 3 + GROUP), square(ring, at_ring + 5 + GROUP)
            dq = warpgroup_mma(do, s, dq, is_async=True)
            dk_read = warpgroup_mma(dv, s, dk_read, is_async=True)
            dk_write = warpgroup_mma(u.permute((1, 0)), ds, dk_write, is_async=True)
            x = warpgroup_mma(do, u, x, is_async=True)
            y = warpgroup_mma(dv, u, y, is_async=True)
            passed = s.load(down).to(gl.float32) * ds.load(down).to(gl.float32)
            trace += gl.sum(passed.reshape([4, 16, C]), 1)
            dq, dk_read, dk_write, x, y = warpgroup_mma_wait(0, deps=[dq, dk_read, dk_write, x, y])
            release(ring_empty.index(step % RING))
            step += 1

        coarse = coarse_i[:, None] - gate(mine, COARSE_ROW, j)[None, :]
        fine = fine_i[:, None] - gate(mine, FINE_ROW, j)[None, :]
        resets_j = gate(mine, RESETS_ROW, j)
        reached = lower & (resets_i[:, None] == resets_j[None, :])
        decay = exp(gl.where(reached, coarse + fine, float("-inf")))
        # y is dv (beta u)^T; its diagonal is beta^2 times the gradient of beta.
        of_beta = gl.sum(gl.where(diagonal, y, 0.0), 1) / (strength * strength)
        to_q.store((scale * x * decay).to(dtype))
        to_k.store(gl.where(diagonal, 0.0, -y * decay).to(dtype))
        fence_async_shared()
        gl.barrier()

        # A log decay at l scales every path from a token before l to one at l or after; none crosses a
        # reset. What a token reads of itself is no such path: it cancels, but for its rounding.
        mbarrier.wait(token_full.index(GROUP), turn & 1)
        keys = k_tile.load(layout).to(gl.float32)
        dk = (end / strength)[:, None] * dk_write
        leaving = gl.sum(keys * dk, 1)
        dk_read = -start[:, None] * dk_read
        dq = (scale * start)[:, None] * dq
        dk = warpgroup_mma(to_q.permute((1, 0)), q_tile, dk, is_async=True)
        dk = warpgroup_mma(to_k.permute((1, 0)), k_tile, dk, is_async=True)
        dk_read = warpgroup_mma(to_k, k_tile, dk_read, is_async=True)
        dq = warpgroup_mma(to_q, k_tile, dq, is_async=True)
        dk, dk_read, dq = warpgroup_mma_wait(0, deps=[dk, dk_read, dq])
        within = leaving - gl.sum(keys * dk, 1)
        within += gl.sum(keys * dk_read, 1)
        within += gl.sum(q_tile.load(layout).to(gl.float32) * dq, 1)
        dk += dk_read
        of_decay = gl.where(reached, within[:, None], 0.0)
        of_decay += gl.where(lower, 0.0, leaving[:, None])
        of_decay = gl.convert_layout(gl.sum(of_decay, 0), by_row)
        of_decay += carried * gl.sum(gl.sum(trace, 1), 0)

        gl.barrier()  # all have read both tiles
        q_tile.store(dq.to(dtype))
        k_tile.store(dk.to(dtype))
        fence_async_shared()
        gl.barrier()
        at = [batch, chunk * C, head * K + (pair * GROUPS + GROUP) * C]
        tma.async_copy_shared_to_global(d_q, at, tokens.index(2 * GROUP))
        tma.async_copy_shared_to_global(d_k, at, tokens.index(2 * GROUP + 1))
        block = pair * GROUPS + GROUP
        rows = (items // (K // (GROUPS * C) * chunks * H)).to(gl.int64) * length
        row += block * rows * H
        gl.store(d_decay + row, gl.where(g < FORGET, 0.0, of_decay), mask=live)
        gl.store(d_beta + row, gl.where(block == 0, of_beta, 0.0), mask=live)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def gradient_kernel(
    q, k, d_out, d_v, u, states, d_states, log_decay, beta, gates, length, items,
    d_q, d_k, d_decay, d_beta,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.gradient_kernel`, `items` of chunks and pairs of column blocks in all."""
    dtype: gl.constexpr = q.dtype
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tokens = gl.allocate_shared_memory(dtype, [2 * GROUPS, 1, C, C], q.layout)
    ring = gl.allocate_shared_memory(dtype, [RING * TILES, 1, C, C], q.layout)
    pairs = gl.allocate_shared_memory(dtype, [2 * GROUPS, C, C], flat)
    token_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars)
    token_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars)
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    for group in gl.static_range(GROUPS):
        mbarrier.init(token_full.index(group), count=1)
        mbarrier.init(token_empty.index(group), count=1)
    for slot in gl.static_range(RING):
        mbarrier.init(ring_full.index(slot), count=1)
        mbarrier.init(ring_empty.index(slot), count=GROUPS)
    chunks = (length + C - 1) // C
    token_bars, ring_bars = (token_full, token_empty), (ring_full, ring_empty)
    inputs, outputs = (log_decay, beta, gates), (d_q, d_k, d_decay, d_beta)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (differentiate, (
                tokens, ring, pairs, token_bars, ring_bars, inputs, outputs, length, items, chunks,
                first, H, K, V, scale,
            )),
            (differentiate, (
                tokens, ring, pairs, token_bars, ring_bars, inputs, outputs, length, items, chunks,
                second, H, K, V, scale,
            )),
            (load_tokens, (q, k, tokens, token_full, token_empty, items, chunks, H, K)),
            (load_steps, (
                d_out, d_v, u, states, d_states, ring, ring_full, ring_empty, items, chunks, H, K, V,
            )),
        ],
        [4, 2, 2],
        [240, 24, 24],
    )  # fmt: skip
