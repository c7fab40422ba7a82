"""What CCQ's kernels of all chunks at once share on Hopper; `triton_hopper` says how they work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon_blocks import hidden_zero, release

# Rows of a group; rows and columns of a tile.
R = gl.constexpr(64)
GROUPS = gl.constexpr(2)
# Tokens of a chunk, and numbers of each that the keys' gradients take from the read.
C = gl.constexpr(128)
LINES = gl.constexpr(3)


@gluon.jit
def load_tile(source, at, rows, slot, tile, turn, TILES: gl.constexpr):
    """Asks for a tile of a group's rows as soon as there is room."""
    tiles, full, empty = rows
    n = slot * TILES + tile
    mbarrier.wait(empty.index(n), (turn & 1) ^ 1)
    mbarrier.expect(full.index(n), source.nbytes_per_cta)
    tma.async_copy_global_to_shared(source, at, full.index(n), tiles.index(n))


@gluon.jit
def load_rows(
    q, other, q_rows, x_rows, items, chunks, GROUP: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """A group's rows of each chunk, of one array or both, of the other in one slot."""
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, chunk = item // chunks, item % chunks
        slot = turn % SLOTS * GROUPS + GROUP
        for tile in range(hidden_zero(turn), K // R):
            at = [sequence // H, chunk * C + GROUP * R, sequence % H * K + tile * R]
            load_tile(q, at, q_rows, slot, tile, turn // SLOTS, K // R)
            if BOTH:
                load_tile(other, at, x_rows, GROUP, tile, turn, K // R)
        turn += 1


@gluon.jit
def load_symmetric(states, ring, items, chunks, entries, K: gl.constexpr, RING: gl.constexpr):
    """Of matrices, so many `entries` a sequence, the tiles on and above the diagonal."""
    tiles, full, empty = ring
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = (item // chunks * entries + item % chunks) * K
        for i in range(hidden_zero(step), K // R):
            for j in range(i, K // R):
                slot = step % RING
                mbarrier.wait(empty.index(slot), (step // RING & 1) ^ 1)
                mbarrier.expect(full.index(slot), states.nbytes_per_cta)
                at = [0, row + i * R, j * R]
                tma.async_copy_global_to_shared(states, at, full.index(slot), tiles.index(slot))
                step += 1


@gluon.jit
def square(tiles, n):
    return tiles.index(n).reshape([R, R])


@gluon.jit
def with_tile(tiles, n: gl.constexpr, x):
    """A tuple with x in place of its element n."""
    result = ()
    for i in gl.static_range(len(tiles)):
        if i == n:
            result += (x,)
        else:
            result += (tiles[i],)
    return result


@gluon.jit
def wait_for(tiles, LATER: gl.constexpr):
    """Waits for the products of a tuple of tiles, but for so many later ones."""
    if len(tiles) == 1:
        return (warpgroup_mma_wait(LATER, deps=[tiles[0]]),)
    elif len(tiles) == 2:
        return warpgroup_mma_wait(LATER, deps=[tiles[0], tiles[1]])
    else:
        return warpgroup_mma_wait(LATER, deps=[tiles[0], tiles[1], tiles[2], tiles[3]])


@gluon.jit
def add_symmetric(totals, lefts, first, ring, step, RING: gl.constexpr):
    """totals + left matrix, in tiles, from the matrix's tiles in the ring."""
    tiles, full, empty = ring
    TILES: gl.constexpr = len(totals)
    # Products are waited for a tile later, where tiles enough are on their way.
    LATE: gl.constexpr = RING > 3
    for i in gl.static_range(TILES):
        for j in gl.static_range(i, TILES):
            here = step % RING
            mbarrier.wait(full.index(here), step // RING & 1)
            right = square(tiles, here)
            total = warpgroup_mma(square(lefts, first + i), right, totals[j], is_async=True)
            totals = with_tile(totals, j, total)
            if i < j:
                mirrored = right.permute((1, 0))
                total = warpgroup_mma(square(lefts, first + j), mirrored, totals[i], is_async=True)
                totals = with_tile(totals, i, total)
            if LATE and i + j > 0:
                totals = wait_for(totals, 1 if i == j else 2)
                release(empty.index((step - 1) % RING))
            if not LATE or i == TILES - 1:
                totals = wait_for(totals, 0)
                release(empty.index(here))
            step += 1
    return totals, step


@gluon.jit
def free_rows(empty, n, other_empty, other, BOTH: gl.constexpr, LATER: gl.constexpr):
    """Gives up a tile's buffers as soon as they have been written out, which so many later ones have not."""
    tma.store_wait(LATER * (2 if BOTH else 1))
    release(empty.index(n))
    if BOTH:
        mbarrier.arrive(other_empty.index(other), count=1)


@gluon.jit
def allocate_rows(like, SLOTS: gl.constexpr, TILES: gl.constexpr):
    """Buffers for the rows of all groups, and their barriers."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(like.dtype, [SLOTS * GROUPS * TILES, 1, R, R], like.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS * GROUPS * TILES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS * GROUPS * TILES, 1], bars)
    for n in gl.static_range(SLOTS * GROUPS * TILES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    return tiles, full, empty


@gluon.jit
def allocate_ring(like, RING: gl.constexpr):
    """Buffers for tiles that all groups read, and their barriers."""
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(like.dtype, [RING, 1, R, R], like.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    for slot in gl.static_range(RING):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    return tiles, full, empty
