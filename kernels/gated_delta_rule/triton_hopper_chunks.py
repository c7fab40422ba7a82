"""How the walks for Hopper come by their chunks: which block takes which, and the tiles of those to come.

The blocks of a head's columns form a team and keep step, as they read the same tiles. More heads than teams are laid
end to end and cut into equal shares. Of a head that is cut, one team takes the first steps at once, another the last
steps at last: by then the state that it goes on from is there.

Keys, a chunk's matrices and its gates are held to its end; values and queries only pass. A buffer is `full` when its
tiles have come, and `empty` again when both groups say so.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gated_delta_rule.triton_kernels import END_ROW, GATE_ROWS, SMALLEST_BETA, START_ROW
from kernels.gluon_blocks import release

# Tokens of a chunk, and a group's columns of V.
C = gl.constexpr(64)
GROUPS = gl.constexpr(2)
# Chunks of which what is held is there or on its way, and the lines of each: two of the gates, and beta.
HELD = gl.constexpr(2)
LINES = gl.constexpr(3)


@gluon.constexpr_function
def passing(K):
    """Chunks of which what passes is there or on its way: wide keys leave room for one."""
    return 2 if K <= 128 else 1


@gluon.jit
def load_beta(pointer, live):
    """Write strengths, as `triton_kernels.load_beta`."""
    strength = gl.load(pointer, mask=live, other=0.0).to(gl.float32)
    return gl.where(gl.abs(strength) < SMALLEST_BETA, SMALLEST_BETA, strength)


@gluon.jit
def share_of(heads, chunks, pairs: gl.constexpr):
    """Where in all heads' steps, end to end, this block's team begins and ends; no share is shorter than a head."""
    teams, steps = gl.num_programs(0) // pairs, heads * chunks
    share = gl.maximum(chunks, (steps + teams - 1) // teams)
    # A team waits for one that starts before it.
    begin = (teams - 1 - gl.program_id(0) // pairs) * share
    return gl.minimum(begin, steps), gl.minimum(begin + share, steps)


@gluon.jit
def piece_of(at, end, chunks):
    """The head at `at`, and which of its steps to take."""
    taken = gl.minimum(chunks - at % chunks, end - at)
    first = gl.where(at % chunks == 0, chunks - taken, 0)
    return at // chunks, first, first + taken


@gluon.jit
def wait_for(state_there, first):
    """Until another block has taken the steps before `first`."""
    if first > 0:
        while gl.atomic_add(state_there, 0, sem="acquire") == 0:
            pass
        gl.barrier()


@gluon.jit
def hand_on(state_there, last, chunks):
    """Says that the steps up to `last` are done, if others follow."""
    if last < chunks:
        gl.barrier()
        gl.atomic_xchg(state_there, 1, sem="release")


@gluon.jit
def buffers(sources, K: gl.constexpr, QUERIES: gl.constexpr):
    """What the warps share: tiles that come, tiles that leave, and the barriers of those that come."""
    k, q, v, corrections, scores = sources
    dtype: gl.constexpr = q.dtype
    fine: gl.constexpr = corrections.dtype
    PASSING: gl.constexpr = passing(K)
    ks = gl.allocate_shared_memory(dtype, [HELD, 1, C, K], k.layout)
    qs = gl.allocate_shared_memory(dtype, [PASSING, 1, C, K if QUERIES else C], q.layout)
    vs = gl.allocate_shared_memory(dtype, [PASSING * GROUPS, 1, C, C], v.layout)
    ns = gl.allocate_shared_memory(fine, [HELD, 1, C, C], corrections.layout)
    ps = gl.allocate_shared_memory(fine, [HELD if QUERIES else 1, 1, C, C], scores.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = gl.allocate_shared_memory(gl.float32, [HELD * LINES, C], flat)
    results = gl.allocate_shared_memory(dtype, [GROUPS, 1, C, C], v.layout)
    copies = gl.allocate_shared_memory(dtype, [GROUPS, 1, C, K], k.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    held_full = gl.allocate_shared_memory(gl.int64, [HELD, 1], bars)
    held_empty = gl.allocate_shared_memory(gl.int64, [HELD, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [PASSING, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [PASSING, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [PASSING, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [PASSING, 1], bars)
    for slot in gl.static_range(HELD):
        mbarrier.init(held_full.index(slot), count=2)  # the tiles, and the lines
        mbarrier.init(held_empty.index(slot), count=GROUPS)
    for slot in gl.static_range(PASSING):
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=GROUPS)
    all_bars = (held_full, held_empty, v_full, v_empty, q_full, q_empty)
    return (ks, qs, vs, ns, ps, lines), (results, copies), all_bars


@gluon.jit
def load_chunks(
    sources, vectors, tiles, bars, heads, chunks, length,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    QUERIES: gl.constexpr, VALUES: gl.constexpr, BETA: gl.constexpr, REVERSE: gl.constexpr,
):  # fmt: skip
    """Of each chunk the gates, k and N; with VALUES v (or d_out), with QUERIES q and P."""
    k, q, v, corrections, scores = sources
    gates, beta = vectors
    ks, qs, vs, ns, ps, lines = tiles
    held_full, held_empty, v_full, v_empty, q_full, q_empty = bars
    PASSING: gl.constexpr = passing(K)
    square: gl.constexpr = 2 * C * C
    wide: gl.constexpr = 2 * C * K
    token = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    pairs: gl.constexpr = V // (GROUPS * C)
    pair = gl.program_id(0) % pairs
    turn = 0
    at, end = share_of(heads, chunks, pairs)
    while at < end:
        head, first, last = piece_of(at, end, chunks)
        batch, hv = head // HV, head % HV
        for step in range(first, last):
            chunk = chunks - 1 - step if REVERSE else step
            of_keys = [batch, chunk * C, hv // (HV // H) * K]
            row = (head * chunks + chunk) * C
            slot = turn % HELD
            ready = held_full.index(slot)
            mbarrier.wait(held_empty.index(slot), (turn // HELD & 1) ^ 1)
            mbarrier.expect(ready, wide + (2 * square if QUERIES else square))
            tma.async_copy_global_to_shared(k, of_keys, ready, ks.index(slot))
            tma.async_copy_global_to_shared(corrections, [0, row, 0], ready, ns.index(slot))
            if QUERIES:
                tma.async_copy_global_to_shared(scores, [0, row, 0], ready, ps.index(slot))
            mine = gates + (head.to(gl.int64) * chunks + chunk) * (GATE_ROWS * C) + token
            from_start = gl.load(mine + START_ROW * C)
            to_end = gl.load(mine + END_ROW * C)
            if BETA:
                live = token < length - chunk * C
                entry = (batch.to(gl.int64) * length + chunk * C + token) * HV + hv
                lines.index(slot * LINES + 2).store(load_beta(beta + entry, live))
            lines.index(slot * LINES).store(from_start)
            lines.index(slot * LINES + 1).store(to_end)
            release(ready)
            slot, phase = turn % PASSING, (turn // PASSING & 1) ^ 1
            if VALUES:
                ready = v_full.index(slot)
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(ready, GROUPS * square)
                for group in gl.static_range(GROUPS):
                    of_values = [batch, chunk * C, hv * V + (pair * GROUPS + group) * C]
                    tile = vs.index(slot * GROUPS + group)
                    tma.async_copy_global_to_shared(v, of_values, ready, tile)
            if QUERIES:
                mbarrier.wait(q_empty.index(slot), phase)
                mbarrier.expect(q_full.index(slot), wide)
                tma.async_copy_global_to_shared(q, of_keys, q_full.index(slot), qs.index(slot))
            turn += 1
        at += last - first


@gluon.jit
def line(lines, slot, row: gl.constexpr, layout: gl.constexpr):
    return lines.index(slot * LINES + row).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def carried(lines, slot, layout: gl.constexpr):
    """The factor of the state over a chunk."""
    last = lines.index(slot * LINES).slice(C - 1, 1)
    return last.load(gl.SliceLayout(1, layout))[:, None]
