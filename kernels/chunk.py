"""What the chunked plain-JAX implementations share: layout, precision, and decays within a chunk.

A chunk's decays are products of exp(log_decay) <= 1, built by doubling a block's length. Nothing is
divided and no sums are subtracted: a decay of exp(-inf) = 0 is exact, in gradients too, and neighbours
keep their digits however strong the decay around them.
"""

import functools
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


class Block(NamedTuple):
    """Products of decays in blocks of L tokens: `head[i]` of tokens 0..i, `tail[j]` of j+1..L-1."""

    head: Float[Array, "*N L D"]
    tail: Float[Array, "*N L D"]


def blocks(decay: Float[Array, "*N C D"]) -> list[Block]:
    """Products of decays in blocks of 1, 2, 4, ... C tokens."""
    head = decay[..., None, :]
    found = [Block(head, jnp.ones_like(head))]
    while head.shape[-3] > 1:
        (first, second), (left, right) = halves(head), halves(found[-1].tail)
        whole = first[..., -1:, :]
        head = jnp.concatenate([first, whole * second], -2)
        tail = jnp.concatenate([left * second[..., -1:, :], right], -2)
        found.append(Block(head, tail))
    return found


def halves(x: Float[Array, "*N M L D"]) -> tuple[Float[Array, "*N M/2 L D"], ...]:
    """The even and the odd of M blocks: the halves of blocks twice as long."""
    x = x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def join_halves(
    first: Float[Array, "*N L L"], second: Float[Array, "*N L L"], cross: Float[Array, "*N L L"]
) -> Float[Array, "*N 2L 2L"]:
    """The lower triangular [[first, 0], [cross, second]]."""
    top = jnp.concatenate([first, jnp.zeros_like(cross)], -1)
    return jnp.concatenate([top, jnp.concatenate([cross, second], -1)], -2)


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
    levels = blocks(jnp.exp(log_decay)[..., None])
    pairs = jnp.ones_like(levels[0].head)
    for block in levels[:-1]:
        cross = halves(block.head)[1] * jnp.swapaxes(halves(block.tail)[0], -1, -2)
        pairs = join_halves(*halves(pairs), cross)
    block = levels[-1]
    return Decays(block.head[..., 0, :, :], block.tail[..., 0, :, :], pairs[..., 0, :, :])


def log_decay_gradient(
    start: Float[Array, "*N C"],
    end: Float[Array, "*N C"],
    pairs: Float[Array, "*N C C"],
) -> Float[Array, "*N C"]:
    """Gradient of log_decay from the products of each of `Decays` with its own gradient.

    Token l decays what passes from the start to i >= l, from j < l to the end, and from j < l to i >= l.
    Only such terms are summed, so none cancel; at a reset all of them, and so the gradient, are 0.
    """
    size = pairs.shape[-1]
    reached = jnp.tril(jnp.ones((size, size), pairs.dtype))
    passed = jnp.tril(reached, -1)
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    later = dot("il,...ij->...lj", reached, pairs * passed)
    return (
        (later * passed).sum(-1)
        + dot("il,...i->...l", reached, start)
        + dot("lj,...j->...l", passed, end)
    )
