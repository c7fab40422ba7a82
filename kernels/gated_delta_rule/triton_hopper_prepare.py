"""`triton_kernels.prepare_kernel` on Hopper, which has the mathematics and the notation.

A block has one chunk of a head. Of the inverse X of I + A, the diagonal blocks of 16 come row by row; be D what they
are alone, and I + A = D^-1 + L. The rest comes by X = D + M X with M = -D L, which has nothing on or above its
diagonal blocks, so that three steps from X = D are exact. What is multiplied is split into two bfloat16: 2^-16 of a
number is lost. No intermediate is much larger than the result.
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

from kernels.gated_delta_rule.triton_hopper_chunks import C, load_beta
from kernels.gated_delta_rule.triton_kernels import (
    COARSE,
    COARSE_ROW,
    END_ROW,
    FINE_ROW,
    GATE_ROWS,
    RESETS_ROW,
    START_ROW,
)
from kernels.gluon_blocks import exp
from kernels.triton_blocks import FORGET


@gluon.constexpr_function
def plain(rank):
    """A layout of shared memory row by row."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.constexpr_function
def reverse(j):
    """The four bits of j in reverse."""
    return (j & 1) * 8 + (j // 2 & 1) * 4 + (j // 4 & 1) * 2 + j // 8


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def split(x):
    """Two bfloat16 whose sum is x."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def stage(tiles, first: gl.constexpr, parts):
    """Puts a matrix's parts where products can read them."""
    tiles.index(first).store(parts[0])
    tiles.index(first + 1).store(parts[1])


@gluon.jit
def product(parts, tiles, first: gl.constexpr, layout: gl.constexpr):
    """A matrix, by its parts, times a staged one."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    high, low = gl.convert_layout(parts[0], left), gl.convert_layout(parts[1], left)
    total = gl.zeros([C, C], gl.float32, layout)
    total = warpgroup_mma(low, tiles.index(first), total, use_acc=False, is_async=True)
    total = warpgroup_mma(high, tiles.index(first + 1), total, is_async=True)
    total = warpgroup_mma(high, tiles.index(first), total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def numbers(row):
    """What a thread has of a tensor [4, 16], by turns halved into 16 of [4, 1]: bits in reverse."""
    parts = (row,)
    for size in gl.static_range(4):
        halves = ()
        for part in gl.static_range(1 << size):
            even, odd = gl.split(parts[part].reshape([4, 8 >> size, 2]))
            halves += (even, odd)
        parts = halves
    return parts


@gluon.jit
def stack(rows):
    """16 tensors [4, 16] as one [4, 16, 16], the row last."""
    for size in gl.static_range(4):
        pairs = ()
        for r in gl.static_range(8 >> size):
            pairs += (gl.join(rows[r], rows[r + (8 >> size)]),)
        rows = pairs
    return rows[0].reshape([4, 16, 16])


@gluon.jit
def invert_blocks(minus, same, words):
    """(I - d)^-1 - I of the four diagonal blocks d of `minus`, [C, 16]; only what is below the diagonal counts.

    A warp has a block, a thread one of its columns. What it needs of d comes from shared memory,
    which serves the same numbers to all threads at once.
    """
    f32: gl.constexpr = gl.float32
    line: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    whole: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    blocks = gl.sum(gl.where(same, minus, 0.0).reshape([C, 4, 16]), 1)
    cubes = blocks.reshape([4, 16, 16])
    words._reinterpret(f32, [16, 4, 16], plain(3)).store(cubes.permute((1, 0, 2)))
    by_row = words._reinterpret(f32, [16, 4, 16], plain(2))
    column = gl.arange(0, 16, gl.SliceLayout(0, line))[None, :]
    gl.barrier()
    x = (gl.zeros([4, 16], f32, line),)
    for r in gl.static_range(1, 16):
        of_row = numbers(by_row.index(r).load(whole))
        this = gl.where(column < r, by_row.index(r).load(line), 0.0)
        for j in gl.static_range(r):
            number = gl.convert_layout(of_row[reverse(j)].reshape([4]), gl.SliceLayout(1, line))
            this += number[:, None] * x[j]
        x += (this,)
    found = gl.convert_layout(stack(x).permute((0, 2, 1)), cubes.type.layout)
    return gl.convert_layout(found.reshape([C, 16]), blocks.type.layout)


@gluon.jit
def on_blocks(same, blocks, rest):
    """The diagonal blocks [C, 16] where `same`, the rest elsewhere."""
    wide = gl.where(same.reshape([C, 4, 16]), blocks.expand_dims(1), rest.reshape([C, 4, 16]))
    return gl.convert_layout(wide.reshape([C, C]), rest.type.layout)


@gluon.jit
def cumulative_gates(log_decay, beta, gates, vectors, entry, live, tile, line: gl.constexpr):
    """Writes the chunk's five rows of gates, and puts beside each other what decays come from."""
    t = gl.arange(0, C, line)
    g = gl.load(log_decay + entry, mask=live, other=0.0).to(gl.float32)
    strength = load_beta(beta + entry, live)
    reset = g < FORGET
    g = gl.where(reset, 0.0, g)
    coarse = gl.floor(g * COARSE) / COARSE
    coarse_sum = gl.associative_scan(coarse, 0, add)
    fine_sum = gl.associative_scan(g - coarse, 0, add)
    resets = gl.associative_scan(gl.where(reset, 1.0, 0.0), 0, add)
    at_end = t == C - 1
    coarse_left = gl.sum(gl.where(at_end, coarse_sum, 0.0), 0) - coarse_sum
    fine_left = gl.sum(gl.where(at_end, fine_sum, 0.0), 0) - fine_sum
    start = exp(gl.where(resets == 0.0, coarse_sum + fine_sum, float("-inf")))
    to_end = gl.where(resets == gl.max(resets, 0), coarse_left + fine_left, float("-inf"))
    mine = gates + tile.to(gl.int64) * (GATE_ROWS * C) + t
    gl.store(mine + COARSE_ROW * C, coarse_sum)
    gl.store(mine + FINE_ROW * C, fine_sum)
    gl.store(mine + RESETS_ROW * C, resets)
    gl.store(mine + START_ROW * C, start)
    gl.store(mine + END_ROW * C, strength * exp(to_end))
    vectors.index(0).store(coarse_sum)
    vectors.index(1).store(fine_sum)
    vectors.index(2).store(resets)
    vectors.index(3).store(strength)
    gl.barrier()


@gluon.jit
def prepare_kernel(
    q, k, log_decay, beta, length, gates, corrections, scores,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, scale: gl.constexpr,
):  # fmt: skip
    """As `triton_kernels.prepare_kernel`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    chunks = (length + C - 1) // C
    tile = gl.program_id(0)
    chunk, sequence = tile % chunks, tile // chunks
    batch, hv = sequence // HV, sequence % HV
    tokens = gl.allocate_shared_memory(q.dtype, [2, 1, C, K], q.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 2 * q.nbytes_per_cta)
    at = [batch, chunk * C, hv // (HV // H) * K]
    tma.async_copy_global_to_shared(q, at, ready, tokens.index(0))
    tma.async_copy_global_to_shared(k, at, ready, tokens.index(1))

    # Every warp has all tokens.
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    t = gl.arange(0, C, line)
    entry = (batch.to(gl.int64) * length + chunk * C + t) * HV + hv
    vectors = gl.allocate_shared_memory(gl.float32, [4, C], plain(1))
    live = t < length - chunk * C
    cumulative_gates(log_decay, beta, gates, vectors, entry, live, tile, line)
    i, j = gl.arange(0, C, by_row)[:, None], gl.arange(0, C, by_column)[None, :]
    coarse = vectors.index(0).load(by_row)[:, None] - vectors.index(0).load(by_column)[None, :]
    fine = vectors.index(1).load(by_row)[:, None] - vectors.index(1).load(by_column)[None, :]
    reached = vectors.index(2).load(by_row)[:, None] == vectors.index(2).load(by_column)[None, :]
    decay = exp(gl.where((i >= j) & reached, coarse + fine, float("-inf")))
    decay *= vectors.index(3).load(by_column)[None, :]

    # One product after the other: less to hold at a time.
    q_tile, k_tile = tokens.index(0).reshape([C, K]), tokens.index(1).reshape([C, K])
    zero = gl.zeros([C, C], gl.float32, layout)
    to_scores = gl.allocate_shared_memory(scores.dtype, [1, C, C], scores.layout)
    mbarrier.wait(ready, 0)
    p = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False)
    to_scores.reshape([C, C]).store((p * decay * scale).to(scores.dtype))
    minus = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zero, use_acc=False) * -decay
    tokens._keep_alive()
    fence_async_shared()
    gl.barrier()  # all have read the tokens, whose memory may serve again
    tma.async_copy_shared_to_global(scores, [0, tile * C, 0], to_scores)

    same = i // 16 == j // 16
    tiles = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], gl.NVMMASharedLayout(128, 16, 2))
    stage(tiles, 0, split(gl.where(same, 0.0, minus)))
    words = gl.allocate_shared_memory(gl.float32, [C * 16], plain(1))
    blocks = invert_blocks(minus, same, words)
    row = gl.arange(0, C, gl.SliceLayout(1, blocks.type.layout))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, blocks.type.layout))[None, :]
    blocks += gl.where(row % 16 == column, 1.0, 0.0)
    d = split(on_blocks(same, blocks, zero))
    stage(tiles, 2, d)
    fence_async_shared()
    gl.barrier()
    m = split(product(d, tiles, 0, layout))
    x = on_blocks(same, blocks, product(m, tiles, 2, layout))
    for _ in gl.static_range(2):
        gl.barrier()  # all have read the last x
        stage(tiles, 2, split(x))
        fence_async_shared()
        gl.barrier()
        x = on_blocks(same, blocks, product(m, tiles, 2, layout))
    n = gl.where(i > j, -x, 0.0)
    to_corrections = gl.allocate_shared_memory(corrections.dtype, [1, C, C], corrections.layout)
    to_corrections.reshape([C, C]).store(n.to(corrections.dtype))
    fence_async_shared()
    gl.barrier()
    tma.async_copy_shared_to_global(corrections, [0, tile * C, 0], to_corrections)
    tma.store_wait(0)
    to_scores._keep_alive()
    to_corrections._keep_alive()
