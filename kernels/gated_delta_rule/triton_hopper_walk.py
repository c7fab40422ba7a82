"""The walks of `triton_kernels` on Hopper, which has the mathematics and the notation.

A block walks the chunks of one head with 128 of the state's columns. Two groups of four warps have the half of the
columns each and go at their own pace; the other warps ask for tiles, see `triton_hopper_chunks`. A group keeps its
state in registers, and a rounded copy in shared memory, where products read it and from where it is written.
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

from kernels.gated_delta_rule.triton_hopper_chunks import (
    GROUPS,
    HELD,
    C,
    buffers,
    carried,
    hand_on,
    line,
    load_chunks,
    passing,
    piece_of,
    share_of,
    wait_for,
)
from kernels.gluon_blocks import release


@gluon.jit
def forward(
    tiles, staged, bars, initial_state, outputs, heads, chunks,
    GROUP: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
    VALUES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """The columns of one group."""
    ks, qs, vs, ns, ps, lines = tiles
    held_full, held_empty, v_full, v_empty, q_full, q_empty = bars
    out, u, states, states_there, last = outputs
    PASSING: gl.constexpr = passing(K)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    dtype: gl.constexpr = ks.dtype
    fine: gl.constexpr = ns.dtype
    pairs: gl.constexpr = V // (GROUPS * C)
    block = gl.program_id(0) % pairs * GROUPS + GROUP
    vc = block * C + gl.arange(0, C, gl.SliceLayout(1, of_state))
    kc = gl.arange(0, K, gl.SliceLayout(0, of_state))
    place = kc[None, :] * V + vc[:, None]
    zero = gl.zeros([C, C], gl.float32, of_chunk)
    result, copy = staged[0].index(GROUP), staged[1].index(GROUP)
    rounded = copy.reshape([C, K])
    turn = 0
    at, end = share_of(heads, chunks, pairs)
    while at < end:
        head, first, end_of_piece = piece_of(at, end, chunks)
        batch, hv = head // HV, head % HV
        there = states_there + head * (pairs * GROUPS) + block
        source = initial_state
        if first > 0:
            source = last
        wait_for(there, first)
        state = gl.load(source + head.to(gl.int64) * (K * V) + place)
        for chunk in range(first, end_of_piece):
            row = (head * chunks + chunk) * V + block * C
            if STATES:
                tma.store_wait(1)  # the last state has left
                gl.barrier()
            rounded.store(state.to(dtype))
            fence_async_shared()
            gl.barrier()
            if STATES:
                tma.async_copy_shared_to_global(states, [0, row, 0], copy)
            slot, here = turn % HELD, turn % PASSING
            k_tile, n_tile = ks.index(slot).reshape([C, K]), ns.index(slot).reshape([C, C])
            mbarrier.wait(held_full.index(slot), turn // HELD & 1)
            w = warpgroup_mma(rounded, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            if VALUES:
                v_tile = vs.index(here * GROUPS + GROUP).reshape([C, C])
                mbarrier.wait(v_full.index(here), turn // PASSING & 1)
                values = v_tile.permute((1, 0)).load(of_chunk)
                release(v_empty.index(here))
            w = -line(lines, slot, 0, of_chunk) * warpgroup_mma_wait(0, deps=[w])
            if VALUES:
                w += values.to(gl.float32)
            largest = gl.maximum(gl.max(gl.abs(w), 1), 1e-20)[:, None]
            w *= 1.0 / largest
            minus = gl.convert_layout((-w).to(fine), left)
            writes = warpgroup_mma(minus, n_tile.permute((1, 0)), w)
            written = writes * largest
            if STATES:
                x = line(lines, slot, 2, of_chunk) * written
            written *= line(lines, slot, 1, of_chunk)
            narrow = written.to(dtype)
            state *= carried(lines, slot, of_state)
            if chunk == chunks - 1:
                # As in `triton_kernels`: nothing follows that would correct the last rounding errors.
                rest = (written - narrow.to(gl.float32)).to(dtype)
                state = warpgroup_mma(gl.convert_layout(rest, left_of_state), k_tile, state)
            if OUTPUT:
                # Later than might be, and before the state's product: less is held at a time.
                queries = qs.index(here).reshape([C, K]).permute((1, 0))
                share = gl.convert_layout(writes.to(fine), left)
                mbarrier.wait(q_full.index(here), turn // PASSING & 1)
                x = warpgroup_mma(rounded, queries, zero, use_acc=False)
                release(q_empty.index(here))
                x *= scale * line(lines, slot, 0, of_chunk) / largest
                p_tile = ps.index(slot).reshape([C, C])
                x = warpgroup_mma(share, p_tile.permute((1, 0)), x, is_async=True)
            narrow = gl.convert_layout(narrow, left_of_state)
            state = warpgroup_mma(narrow, k_tile, state, is_async=True)
            if OUTPUT:
                state, x = warpgroup_mma_wait(0, deps=[state, x])
                x *= largest
            else:
                state = warpgroup_mma_wait(0, deps=[state])
            tma.store_wait(1 if STATES else 0)  # the last result has left
            release(held_empty.index(slot))
            if OUTPUT:
                result.reshape([C, C]).permute((1, 0)).store(x.to(dtype))
                fence_async_shared()
                gl.barrier()
                of_values = [batch, chunk * C, hv * V + block * C]
                tma.async_copy_shared_to_global(out, of_values, result)
            if STATES:
                result.reshape([C, C]).store(x.to(dtype))
                fence_async_shared()
                gl.barrier()
                tma.async_copy_shared_to_global(u, [0, row, 0], result)
            turn += 1
        gl.store(last + head.to(gl.int64) * (K * V) + place, state)
        hand_on(there, end_of_piece, chunks)
        at += end_of_piece - first
    tma.store_wait(0)


@gluon.jit
def reverse(
    tiles, staged, bars, d_last, outputs, heads, chunks,
    GROUP: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
    STATES: gl.constexpr,
):  # fmt: skip
    """The columns of one group."""
    ks, qs, vs, ns, ps, lines = tiles
    held_full, held_empty, v_full, v_empty, q_full, q_empty = bars
    d_v, d_states, states_there, d_initial = outputs
    PASSING: gl.constexpr = passing(K)
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    of_chunk: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_chunk, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    dtype: gl.constexpr = ks.dtype
    fine: gl.constexpr = ns.dtype
    pairs: gl.constexpr = V // (GROUPS * C)
    block = gl.program_id(0) % pairs * GROUPS + GROUP
    vc = block * C + gl.arange(0, C, gl.SliceLayout(1, of_state))
    kc = gl.arange(0, K, gl.SliceLayout(0, of_state))
    place = kc[None, :] * V + vc[:, None]
    zero = gl.zeros([C, C], gl.float32, of_chunk)
    result, copy = staged[0].index(GROUP), staged[1].index(GROUP)
    rounded = copy.reshape([C, K])
    turn = 0
    at, end = share_of(heads, chunks, pairs)
    while at < end:
        head, first, end_of_piece = piece_of(at, end, chunks)
        batch, hv = head // HV, head % HV
        there = states_there + head * (pairs * GROUPS) + block
        source = d_last
        if first > 0:
            source = d_initial
        wait_for(there, first)
        d_state = gl.load(source + head.to(gl.int64) * (K * V) + place)
        for step in range(first, end_of_piece):
            chunk = chunks - 1 - step
            if STATES:
                tma.store_wait(1)  # the last gradient of the state has left
                gl.barrier()
            rounded.store(d_state.to(dtype))
            fence_async_shared()
            gl.barrier()
            if STATES:
                row = (head * chunks + chunk) * V + block * C
                tma.async_copy_shared_to_global(d_states, [0, row, 0], copy)
            slot, here = turn % HELD, turn % PASSING
            k_tile, q_tile = ks.index(slot).reshape([C, K]), qs.index(here).reshape([C, K])
            n_tile, p_tile = ns.index(slot).reshape([C, C]), ps.index(slot).reshape([C, C])
            mbarrier.wait(held_full.index(slot), turn // HELD & 1)
            du = warpgroup_mma(rounded, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            o_tile = vs.index(here * GROUPS + GROUP).reshape([C, C])
            mbarrier.wait(v_full.index(here), turn // PASSING & 1)
            do = o_tile.permute((1, 0)).load(of_chunk).to(gl.float32)
            release(v_empty.index(here))
            # Rows on the left of P and N are scaled to float16's range, if that is what they are in.
            largest = gl.maximum(gl.max(gl.abs(do), 1), 1e-30)[:, None]
            half = gl.convert_layout((do / largest).to(fine), left)
            read = (scale * line(lines, slot, 0, of_chunk) * do).to(dtype)
            d_state *= carried(lines, slot, of_state)
            mbarrier.wait(q_full.index(here), turn // PASSING & 1)
            read = gl.convert_layout(read, left_of_state)
            d_state = warpgroup_mma(read, q_tile, d_state, is_async=True)
            du = warpgroup_mma_wait(1, deps=[du])
            du *= line(lines, slot, 1, of_chunk) / largest
            du = warpgroup_mma(half, p_tile, du, is_async=True)
            du, d_state = warpgroup_mma_wait(0, deps=[du, d_state])
            release(q_empty.index(here))
            du *= largest
            largest = gl.maximum(gl.max(gl.abs(du), 1), 1e-30)[:, None]
            du /= largest
            minus = gl.convert_layout((-du).to(fine), left)
            dv = warpgroup_mma(minus, n_tile, du) * largest
            taken = (-line(lines, slot, 0, of_chunk) * dv).to(dtype)
            taken = gl.convert_layout(taken, left_of_state)
            d_state = warpgroup_mma(taken, k_tile, d_state, is_async=True)
            if STATES:
                tma.store_wait(1)  # the last dv has left
                gl.barrier()
                result.reshape([C, C]).permute((1, 0)).store(dv.to(dtype))
            d_state = warpgroup_mma_wait(0, deps=[d_state])
            fence_async_shared()
            release(held_empty.index(slot))
            if STATES:
                of_values = [batch, chunk * C, hv * V + block * C]
                tma.async_copy_shared_to_global(d_v, of_values, result)
            turn += 1
        gl.store(d_initial + head.to(gl.int64) * (K * V) + place, d_state)
        hand_on(there, end_of_piece, chunks)
        at += end_of_piece - first
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q, k, v, corrections, scores, gates, beta, initial_state, length, heads,
    states_there, out, u, states, last,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
    VALUES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.forward_kernel`, but for OUTPUT and STATES at once."""
    chunks = (length + C - 1) // C
    sources, vectors = (k, q, v, corrections, scores), (gates, beta)
    outputs = (out, u, states, states_there, last)
    tiles, staged, bars = buffers(sources, K, OUTPUT)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    backwards: gl.constexpr = False
    gl.warp_specialize(
        [
            (forward, (
                tiles, staged, bars, initial_state, outputs, heads, chunks,
                first, HV, K, V, scale, VALUES, OUTPUT, STATES,
            )),
            (forward, (
                tiles, staged, bars, initial_state, outputs, heads, chunks,
                second, HV, K, V, scale, VALUES, OUTPUT, STATES,
            )),
            (load_chunks, (
                sources, vectors, tiles, bars, heads, chunks, length,
                H, HV, K, V, OUTPUT, VALUES, STATES, backwards,
            )),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def reverse_kernel(
    q, k, d_out, corrections, scores, gates, d_last, length, heads,
    states_there, d_v, d_states, d_initial,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, scale: gl.constexpr,
    STATES: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.reverse_kernel`."""
    chunks = (length + C - 1) // C
    sources, vectors = (k, q, d_out, corrections, scores), (gates, gates)
    outputs = (d_v, d_states, states_there, d_initial)
    yes: gl.constexpr = True
    no: gl.constexpr = False
    tiles, staged, bars = buffers(sources, K, yes)
    first: gl.constexpr = 0
    second: gl.constexpr = 1
    gl.warp_specialize(
        [
            (reverse, (
                tiles, staged, bars, d_last, outputs, heads, chunks,
                first, HV, K, V, scale, STATES,
            )),
            (reverse, (
                tiles, staged, bars, d_last, outputs, heads, chunks,
                second, HV, K, V, scale, STATES,
            )),
            (load_chunks, (
                sources, vectors, tiles, bars, heads, chunks, length,
                H, HV, K, V, yes, yes, no, yes,
            )),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
