"""Pieces of the TPU kernels: products, and decays within a chunk of C tokens.

Everything is a matrix [rows, lanes] in float32. A number a token is a column [C, 1] where it scales rows, and
a row [1, C] where it comes from memory. TPUs have no cumulative sum: sums over tokens are products with
triangles of ones.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from kernels.chunk import GRID, LOG_ZERO

BLOCK = 16


class Dot:
    """Products on the matrix unit, with sums in float32.

    Of float32 inputs in as many passes as carry all their bits, of shorter ones in one pass of bfloat16.
    With `fine`, intermediate results of shorter inputs keep 16 bits: in two bfloat16 parts, three passes.
    """

    def __init__(self, dtype: jnp.dtype, fine: bool = False):
        self.wide, self._fine = dtype == jnp.float32, fine

    @property
    def fine(self) -> "Dot":
        """The same for intermediate results whose rounding would show."""
        return Dot(jnp.dtype("float32" if self.wide else "bfloat16"), fine=True)

    def __call__(self, a: Array, b: Array) -> Array:
        """a b"""
        return self._contract(a, b, 1, 0)

    def nt(self, a: Array, b: Array) -> Array:
        """a b^T"""
        return self._contract(a, b, 1, 1)

    def tn(self, a: Array, b: Array) -> Array:
        """a^T b"""
        return self._contract(a, b, 0, 0)

    def _contract(self, a: Array, b: Array, of_a: int, of_b: int) -> Array:
        if self.wide:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            return _pass(a, b, of_a, of_b, jax.lax.Precision.HIGHEST)
        if not self._fine:
            return _pass(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), of_a, of_b)
        (a, *rest_a), (b, *rest_b) = _parts(a), _parts(b)
        total = _pass(a, b, of_a, of_b)
        for rest in rest_a:
            total += _pass(rest, b, of_a, of_b)
        for rest in rest_b:
            total += _pass(a, rest, of_a, of_b)
        return total


def _pass(
    a: Array, b: Array, of_a: int, of_b: int, precision: Any = jax.lax.Precision.DEFAULT
) -> Array:
    contract = (((of_a,), (of_b,)), ((), ()))
    return jax.lax.dot_general(
        a, b, contract, precision=precision, preferred_element_type=jnp.float32
    )


def _parts(x: Array) -> list[Array]:
    """bfloat16 parts whose sum is x to 16 bits; x itself where it has no more."""
    if x.dtype == jnp.bfloat16:
        return [x]
    # By its bits: a compiler may take a conversion there and back for none.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -(2**16)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


exact = Dot(jnp.dtype("float32"))


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """The index along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def lower(size: int, offset: int = 0) -> Array:
    """True at i, j where j <= i + offset."""
    return iota((size, size), 1) <= iota((size, size), 0) + offset


def tril(x: Float[Array, "C C"], offset: int = 0) -> Float[Array, "C C"]:
    """x below its diagonal and on it; below it alone with offset -1."""
    return jnp.where(lower(x.shape[0], offset), x, 0.0)


def row_dot(a: Float[Array, "C K"], b: Float[Array, "C K"]) -> Float[Array, "C 1"]:
    """The product of each row of a with that of b."""
    return jnp.sum(a * b, axis=1, keepdims=True)


def column(row: Float[Array, "1 C"]) -> Float[Array, "C 1"]:
    """A row as a column."""
    return jnp.sum(diagonal(row), axis=1, keepdims=True)


def row(column: Float[Array, "C 1"]) -> Float[Array, "1 C"]:
    """A column as a row."""
    return jnp.sum(diagonal(column), axis=0, keepdims=True)


def diagonal(numbers: Array) -> Float[Array, "C C"]:
    """A matrix with a row, a column, or a matrix's own diagonal on the diagonal, and 0 elsewhere."""
    size = max(numbers.shape)
    return jnp.where(iota((size, size), 0) == iota((size, size), 1), numbers, 0.0)


def outer(row: Float[Array, "1 K"]) -> Float[Array, "K K"]:
    """The outer product of a row with itself."""
    size = row.shape[1]
    # A column of a wide row would take size^2 selections; a product takes a pass of 8 rows.
    first = jnp.where(iota((8, size), 0) == 0, row, 0.0)
    return exact.tn(first, first)


class Decays(NamedTuple):
    """Scalar decays of a chunk: from its start to a token, from a token to its end, of it all, and in pairs.

    pairs[i, j] is the product of the decays of tokens j+1..i, and 0 above the diagonal.
    """

    start: Float[Array, "C 1"]
    end: Float[Array, "C 1"]
    whole: Float[Array, "1 1"]
    pairs: Float[Array, "C C"]


def scalar_decays(log_decay: Float[Array, "1 C"]) -> Decays:
    """Decays of a chunk, from the natural logs of its tokens' decays.

    A decay in pairs is e^ of a difference of two sums. There is no difference across a reset; elsewhere the
    sums are of multiples of 1 / GRID, which are exact, and of the small rest.
    """
    size = log_decay.shape[1]
    reset = log_decay < LOG_ZERO
    finite = jnp.where(reset, 0.0, log_decay)
    coarse = jnp.round(finite * GRID) / GRID
    which = iota((8, size), 0)
    terms = jnp.where(which == 0, coarse, jnp.where(which == 1, finite - coarse, 0.0))
    terms = jnp.where(which == 2, jnp.where(reset, 1.0, 0.0), terms)
    ones = jnp.where(lower(size), 1.0, 0.0)
    upto_rows = exact.nt(terms, ones)
    upto_columns = upto_rows.T
    coarse_i, fine_i, resets_i = (upto_columns[:, i : i + 1] for i in range(3))
    coarse_j, fine_j, resets_j = (upto_rows[i : i + 1] for i in range(3))
    coarse_all, fine_all, resets_all = (x[:, size - 1 :] for x in (coarse_j, fine_j, resets_j))

    def decay(exponent: Array, connected: Array) -> Array:
        return jnp.exp(jnp.where(connected, exponent, -jnp.inf))

    exponent = (coarse_i - coarse_j) + (fine_i - fine_j)
    return Decays(
        start=decay(coarse_i + fine_i, resets_i == 0),
        end=decay((coarse_all - coarse_i) + (fine_all - fine_i), resets_i == resets_all),
        whole=decay(coarse_all + fine_all, resets_all == 0),
        pairs=decay(exponent, lower(size) & (resets_i == resets_j)),
    )


def log_decay_gradient(
    start: Float[Array, "C 1"],
    end: Float[Array, "C 1"],
    whole: Float[Array, "1 1"],
    pairs: Float[Array, "C C"],
) -> Float[Array, "1 C"]:
    """Gradient of log_decay from the products of each of `Decays` with its own gradient.

    Token l decays what passes from the start to i >= l, from j < l to the end, from the start to the end,
    and from j < l to i >= l. Only such terms are summed, so none cancel; at a reset all of them are 0.
    """
    size = pairs.shape[0]
    until = lower(size)
    before = jnp.where(until, 0.0, 1.0)  # j < l
    crossing = jnp.where(until, exact(pairs, before) + start, 0.0) + before * end
    return jnp.sum(crossing, axis=0, keepdims=True) + whole


def inverse_of_unit_lower(below: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """(I + below)^-1 - I of a strictly lower triangular matrix; C is BLOCK times a power of two.

    The blocks on the diagonal by substitution, all at once; then pairs of blocks are joined by products:
    [[A, 0], [-B M A, B]] is X - X M X of X = [[A, 0], [0, B]] and M alone. No intermediate is larger than the
    result, also where keys are nearly parallel.
    """
    size = below.shape[0]
    same = iota((size, size), 0) // BLOCK == iota((size, size), 1) // BLOCK
    found = _invert_blocks(jnp.where(same, below, 0.0))
    found = jnp.where(same, jnp.concatenate([found] * (size // BLOCK), axis=0), 0.0)
    length = BLOCK
    while length < size:
        found = _join_pairs(below, found, length)
        length *= 2
    return found - diagonal(jnp.ones((1, size), jnp.float32))


def _join_pairs(
    below: Float[Array, "C C"], found: Float[Array, "C C"], length: int
) -> Float[Array, "C C"]:
    """Inverses of blocks of two times `length` from those of `length`: second blocks' rows alone change."""
    size = below.shape[0]
    firsts, seconds = _alternate(found, length)
    rows = jnp.concatenate(_alternate(below, length)[1], axis=0)
    pair, column = (iota(rows.shape, axis) // length for axis in (0, 1))
    cross = exact(jnp.where(column == 2 * pair, rows, 0.0), found)
    nothing = [jnp.zeros((length, size), jnp.float32)] * len(firsts)
    second = jnp.concatenate(seconds, axis=0)
    second -= exact(second, _interleave(nothing, _cut(cross, length)))
    return _interleave(firsts, _cut(second, length))


def _cut(x: Float[Array, "R C"], length: int) -> list[Float[Array, "L C"]]:
    return [x[i : i + length] for i in range(0, x.shape[0], length)]


def _alternate(x: Float[Array, "C C"], length: int) -> tuple[list[Array], list[Array]]:
    """Rows of the first blocks of each pair, and of the second ones."""
    blocks = _cut(x, length)
    return blocks[0::2], blocks[1::2]


def _interleave(firsts: list[Array], seconds: list[Array]) -> Float[Array, "C C"]:
    """Undoes `_alternate`."""
    pairs = zip(firsts, seconds, strict=True)
    return jnp.concatenate([block for pair in pairs for block in pair], axis=0)


def _invert_blocks(below: Float[Array, "C C"]) -> Float[Array, "L C"]:
    """Inverses of the diagonal blocks I + below of L tokens, side by side; nothing else is in `below`."""
    size = below.shape[0]
    lane = iota((BLOCK, size), 1) % BLOCK
    packed = below[:BLOCK]
    for start in range(BLOCK, size, BLOCK):
        packed += below[start : start + BLOCK]
    found = jnp.where(lane == iota((BLOCK, size), 0), 1.0, 0.0)
    for i in range(BLOCK - 1):
        # Column i of each block in all columns before it. Those after it get another block's, times 0.
        factor = jnp.where(lane == i, packed, 0.0)
        for step in (1, 2, 4, 8):
            factor += _roll_left(factor, step)
        found -= factor * found[i : i + 1]
    return found


def _roll_left(x: Float[Array, "L C"], step: int) -> Float[Array, "L C"]:
    """Each column takes that of `step` places later, around the end. Pallas's own has no batching rule."""
    size = x.shape[1]

    def rolled(x: Array) -> Array:
        return pltpu.roll(x, (size - step) % size, x.ndim - 1)

    roll = jax.custom_batching.custom_vmap(rolled)
    roll.def_vmap(lambda axis_size, in_batched, x: (rolled(x), True))
    return roll(x)
