"""What the chunked plain-JAX implementations share: layout, precision, and decays within a chunk.

A chunk's decays are products of exp(log_decay) <= 1, built by doubling a block's length. Nothing is
divided and no sums are subtracted: a decay of exp(-inf) = 0 is exact, in gradients too, and neighbours
keep their digits however strong the decay around them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DEFAULT_CHUNK = 64


def length_for(tokens: int, chunk_size: int | None) -> int:
    """Chunk length: as asked, but no longer than the power of two that holds all the tokens."""
    return min(chunk_size or DEFAULT_CHUNK, 1 << (tokens - 1).bit_length())


def split(x: Float[Array, "B T H *D"], length: int) -> Float[Array, "N B H C *D"]:
    """Chunks in float32, chunk index first, zero after the last token."""
    batch, tokens, *rest = x.shape
    pad = -tokens % length
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * len(rest))
    x = x.reshape(batch, (tokens + pad) // length, length, *rest)
    axes = 1, 0, 3, 2, *range(4, x.ndim)
    return x.transpose(axes).astype(jnp.float32)


def join(x: Float[Array, "N B H C *D"], like: Array) -> Array:
    """Undoes `split`, to the length and dtype of the array `like`."""
    axes = 1, 0, 3, 2, *range(4, x.ndim)
    x = x.transpose(axes)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : like.shape[1]].astype(like.dtype)


class Dot:
    """Products of float32 matrices that hold values of a shorter dtype.

    Exact for float32; for shorter inputs at the hardware's default precision, which never is below theirs.
    """

    def __init__(self, dtype: jnp.dtype):
        short = dtype != jnp.float32
        self.precision = jax.lax.Precision.DEFAULT if short else jax.lax.Precision.HIGHEST

    def __call__(self, a: Array, b: Array) -> Array:
        """a b"""
        return jnp.matmul(a, b, precision=self.precision)

    def nt(self, a: Array, b: Array) -> Array:
        """a b^T"""
        return self(a, jnp.swapaxes(b, -1, -2))

    def tn(self, a: Array, b: Array) -> Array:
        """a^T b"""
        return self(jnp.swapaxes(a, -1, -2), b)


exact = Dot(jnp.dtype("float32"))


def row_dot(a: Float[Array, "*N C K"], b: Float[Array, "*N C K"]) -> Float[Array, "*N C 1"]:
    """The product of each row of a with that of b."""
    # On CPU several times faster than to multiply and sum.
    product = jnp.einsum("...ck,...ck->...c", a, b, precision=jax.lax.Precision.HIGHEST)
    return product[..., None]


class Level(NamedTuple):
    """Products of decays within blocks: `head` of a block's first token to i, `tail` of j + 1 to its last."""

    head: Float[Array, "*N C D"]
    tail: Float[Array, "*N C D"]


def levels(decay: Float[Array, "*N C D"]) -> tuple[list[Level], Float[Array, "*N 1 D"]]:
    """Products of decays in blocks of 1, 2, 4, ... C tokens, and of the whole chunk."""
    *outer, size, width = decay.shape
    found = [Level(decay, jnp.ones_like(decay))]
    whole = decay[..., None, :]
    length = 1
    while length < size:
        first, second = whole[..., 0::2, None, :, :], whole[..., 1::2, None, :, :]
        split = *outer, size // (2 * length), 2, length, width
        in_second = jnp.arange(2).reshape(2, 1, 1) == 1
        head, tail = (x.reshape(split) for x in found[-1])
        head, tail = (
            head * jnp.where(in_second, first, 1),
            tail * jnp.where(in_second, 1, second),
        )
        found.append(Level(head.reshape(decay.shape), tail.reshape(decay.shape)))
        whole = (first * second)[..., 0, :, :]
        length *= 2
    return found, whole[..., 0, :, :]


def halves(x: Float[Array, "*N C D"], length: int) -> tuple[Float[Array, "*N M L D"], ...]:
    """The first and the second halves of each block of two times `length` tokens."""
    *outer, size, width = x.shape
    x = x.reshape(*outer, size // (2 * length), 2, length, width)
    return x[..., 0, :, :], x[..., 1, :, :]


def join_blocks(
    blocks: Float[Array, "*N 2M L L"], cross: Float[Array, "*N M L L"]
) -> Float[Array, "*N M 2L 2L"]:
    """The lower triangular [[first, 0], [cross, second]] of each two blocks."""
    top = jnp.concatenate([blocks[..., 0::2, :, :], jnp.zeros_like(cross)], -1)
    return jnp.concatenate([top, jnp.concatenate([cross, blocks[..., 1::2, :, :]], -1)], -2)


class Decays(NamedTuple):
    """Scalar decays of a chunk: from its start to a token, from a token to its end, and in pairs.

    pairs[i, j] is the product of the decays of tokens j+1..i, and 0 above the diagonal.
    """

    start: Float[Array, "*N C 1"]
    end: Float[Array, "*N C 1"]
    pairs: Float[Array, "*N C C"]

    @property
    def whole(self) -> Float[Array, "*N 1 1"]:
        """The decay of the whole chunk."""
        return self.start[..., -1:, :]


def scalar_decays(log_decay: Float[Array, "*N C"]) -> Decays:
    """Decays of a chunk, from the natural logs of its tokens' decays."""
    found, _ = levels(jnp.exp(log_decay)[..., None])
    pairs = jnp.ones_like(log_decay)[..., None, None]
    for level in found[:-1]:
        length = pairs.shape[-1]
        head, tail = halves(level.head, length)[1], halves(level.tail, length)[0]
        pairs = join_blocks(pairs, head * jnp.swapaxes(tail, -1, -2))
    return Decays(*found[-1], pairs[..., 0, :, :])


def no_decays(length: int) -> Decays:
    """Of chunks without decay."""
    one = jnp.ones((length, 1))
    return Decays(one, one, jnp.tril(jnp.ones((length, length))))


def log_decay_gradient(
    start: Float[Array, "*N C 1"],
    end: Float[Array, "*N C 1"],
    whole: Float[Array, "*N 1 1"],
    pairs: Float[Array, "*N C C"],
) -> Float[Array, "*N C"]:
    """Gradient of log_decay from the products of each of `Decays` with its own gradient.

    Token l decays what passes from the start to i >= l, from j < l to the end, from the start to the end,
    and from j < l to i >= l. Only such terms are summed, so none cancel; at a reset all of them are 0.
    """
    index = jnp.arange(pairs.shape[-1])
    before = (index[:, None] < index).astype(pairs.dtype)
    until = 1 - before
    crossing = (exact(pairs, before) * until).sum(-2)
    return crossing + exact(start[..., 0], until) + exact(end[..., 0], before) + whole[..., 0]
