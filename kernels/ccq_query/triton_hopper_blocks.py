"""What CCQ's walks for Hopper are made of, besides `gluon_blocks`; `triton_hopper_walk` says how they work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from kernels.ccq_query.triton_kernels import MEAN_PARTS
from kernels.gluon_blocks import hidden_zero

# Rows of a group, and a tile's rows and columns.
SIDE = gl.constexpr(64)
# Rows of a tile of parts, of two vectors: six of each half, and two more for what else there is.
ROWS = gl.constexpr(16)
HALF = gl.constexpr(8)
# Tiles of a group that are on their way out.
LEAVING = gl.constexpr(2)


@gluon.jit
def load_last_start(starts, chunk, length, C: gl.constexpr):
    """Where in a chunk, or the sequence's last, the segment of the last token starts, or -1."""
    return gl.load(starts + gl.minimum((chunk + 1) * C, length) - 1)


@gluon.jit
def step_of(last_start, left, n, C: gl.constexpr, RESETS: gl.constexpr):
    """How many keys of a chunk count at its end, and the weight left of those before it."""
    new = gl.minimum(left, C)
    if RESETS:
        new -= gl.maximum(last_start, 0)
        n = gl.where(last_start < 0, n, 0.0)
    return new.to(gl.float32), n


@gluon.jit
def square(tiles, n):
    return tiles.index(n).reshape([SIDE, SIDE])


@gluon.jit
def store_ones(ones, row, token, last_start, TILES: gl.constexpr):
    """In the row of a tile's number, ones for the keys that count at the chunk's end."""
    zero = hidden_zero(last_start)
    for tile in gl.static_range(TILES):
        counts = (row == tile) & (token >= last_start)[None, :]
        ones[tile].index(zero).store(counts.to(gl.float32).to(ones[tile].dtype))


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x.to(dtype), in pairs also where the result is read as float32 again, which the compiler takes apart."""
    if dtype == gl.bfloat16:
        code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(
            code, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        code: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(
            code, "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def parts_of(x, dtype: gl.constexpr):
    first = rounded(x, dtype)
    x -= first.to(gl.float32)
    second = rounded(x, dtype)
    return first, second, rounded(x - second.to(gl.float32), dtype)


@gluon.jit
def left_rows(row, x, dtype: gl.constexpr):
    """Parts of x in such rows that products with `right_rows` add up; zeros in a half's last two."""
    first, second, third = parts_of(x, dtype)
    row = row % HALF
    rows = gl.where(row < 3, first, gl.where(row < 5, second, third))
    return gl.where(row < 6, rows, gl.zeros_like(rows))


@gluon.jit
def right_rows(row, x, rest, dtype: gl.constexpr):
    """As `left_rows`, with `rest` in a half's last two rows."""
    first, second, third = parts_of(x, dtype)
    row = row % HALF
    rows = gl.where((row == 1) | (row == 4), second, gl.where(row == 2, third, first))
    return gl.where(row < 6, rows, rest)


@gluon.jit
def keep_mean(means, mean_parts, entry, mean, column, K: gl.constexpr):
    """Writes a mean and its parts as `triton_states.states_kernel` does."""
    for tile in gl.static_range(K // SIDE):
        gl.store(means + entry.to(gl.int64) * K + tile * SIDE + column, mean[tile])
        parts = parts_of(mean[tile], mean_parts.dtype.element_ty)
        for part in gl.static_range(MEAN_PARTS):
            at = (entry.to(gl.int64) * MEAN_PARTS + part) * K + tile * SIDE + column
            gl.store(mean_parts + at, parts[part])


@gluon.jit
def send(x, target, at, slots, turn):
    """Has a tile on its way out, as soon as there is a place for it."""
    tma.store_wait(LEAVING - 1)
    gl.barrier()
    tile = slots.index(turn % LEAVING)
    square(slots, turn % LEAVING).store(x)
    fence_async_shared()
    gl.barrier()
    tma.async_copy_shared_to_global(target, at, tile)
    return turn + 1


@gluon.jit
def first_means(
    keys, first_key, key_sum, of_head, n, column, K: gl.constexpr, INITIAL: gl.constexpr
):
    """Of each tile's channels. No tokens have no mean: the first key stands for it."""
    mean = ()
    for tile in gl.static_range(K // SIDE):
        origin = gl.load(keys + first_key + tile * SIDE + column).to(gl.float32)
        if INITIAL:
            incoming = gl.load(key_sum + of_head + tile * SIDE + column)
            if n > 0:
                origin = incoming * (1.0 / n)
        mean += (origin,)
    return mean


@gluon.jit
def move_mean(mean, s, n, kept, new):
    """How far a chunk's keys, `new` ones whose sum is s, are from the mean in all, and the mean after them."""
    e = s - (kept * new) * mean
    return e, kept * mean + e * (1.0 / n)


@gluon.jit
def first_rows(
    key_sum, key_outer, of_head, n, row, column, layout: gl.constexpr,
    K: gl.constexpr, INITIAL: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """A group's rows of n Sigma at the start, in tiles."""
    place = row[:, None] * K + column[None, :]
    state = ()
    for tile in gl.static_range(K // SIDE):
        x = gl.zeros([SIDE, SIDE], gl.float32, layout)
        if INITIAL:
            x = gl.load(key_outer + of_head * K + place + tile * SIDE)
            if CENTERED and n > 0:
                of_rows = gl.load(key_sum + of_head + row) * (1.0 / n)
                of_columns = gl.load(key_sum + of_head + tile * SIDE + column)
                x -= of_rows[:, None] * of_columns[None, :]
        state += (x,)
    return state


@gluon.jit
def store_last_rows(
    key_outer, of_head, state, means, n, block, row, column, layout: gl.constexpr,
    K: gl.constexpr, CENTERED: gl.constexpr,
):  # fmt: skip
    """Writes a group's rows of the sum of k k^T, from those of n Sigma and the mean."""
    place = row[:, None] * K + column[None, :]
    for tile in gl.static_range(K // SIDE):
        x = state[tile]
        if CENTERED:
            of_rows = n * means.index(block).load(gl.SliceLayout(1, layout))
            of_columns = means.index(tile).load(gl.SliceLayout(0, layout))
            x += of_rows[:, None] * of_columns[None, :]
        gl.store(key_outer + of_head * K + place + tile * SIDE, x)
