"""What the chunked plain-JAX implementations share: layout, precision, and decays within a chunk.

Decays are products that double a block's length, or exponentials of sums whose differences are exact. So
exp(-inf) = 0 is exact, in gradients too, and neighbours keep their digits however strong the decays
around them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import dispatch

# Elements of an array of a group's keys or values.
GROUP_ELEMENTS = {"cpu": 2**17}
GROUP_ELEMENTS_ELSEWHERE = 2**27
# Below, exp is 0 in float32.
LOG_ZERO = -104.0
# Sums of 256 multiples of 1 / GRID down to LOG_ZERO are exact in float32.
GRID = 256.0


def lengths(
    shape: tuple[int, ...], widths: tuple[int, ...], chunk_size: int | None
) -> tuple[int, int]:
    """Tokens of a chunk, and of a group of chunks that is worked on at once, for a shape [B, T, H, ...].

    The default chunk is short for narrow heads, as work in a chunk grows with its length, and work on
    the states with the width. No chunk is longer than the power of two that holds all the tokens. A group
    has chunks enough to keep the machine busy, few enough for a CPU's cache.
    """
    batch, tokens, heads, *_ = shape
    width = max(widths)
    default = 32 if width <= 64 else 64
    length = min(chunk_size or default, 1 << (tokens - 1).bit_length())
    budget = GROUP_ELEMENTS.get(dispatch.platform(), GROUP_ELEMENTS_ELSEWHERE)
    chunks = -(-tokens // length)
    at_most = max(1, budget // (batch * heads * width * length))
    groups = -(-chunks // at_most)
    return length, -(-chunks // groups) * length


def split(x: Float[Array, "B T H *D"], length: int) -> Float[Array, "N B H C *D"]:
    """Chunks in float32, chunk index first; T is a multiple of `length`."""
    batch, tokens, *rest = x.shape
    x = x.reshape(batch, tokens // length, length, *rest)
    axes = 1, 0, 3, 2, *range(4, x.ndim)
    return x.transpose(axes).astype(jnp.float32)


def join(x: Float[Array, "N B H C *D"], dtype: jnp.dtype) -> Float[Array, "B T H *D"]:
    """Undoes `split`."""
    axes = 1, 0, 3, 2, *range(4, x.ndim)
    x = x.transpose(axes)
    return x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype)


def over_groups(
    step: Callable[[Any, Any, Any], tuple[Any, tuple[Any, Any]]],
    carry: Any,
    tokens: Any,
    kept: Any = None,
    *,
    tokens_in_group: int,
    reverse: bool = False,
) -> tuple[Any, tuple[Any, Any]]:
    """Runs `step` on one group of chunks after the other, so that only a group's work is in memory.

    Args:
      step: (carry, tokens of a group, kept of a group) -> (carry, (tokens, kept)).
      carry: what goes from group to group.
      tokens: arrays [B, T, ...], zero to the step after the last token.
      kept: arrays with the group's index first.
      tokens_in_group: a multiple of the chunk's length.
      reverse: from the last group to the first.

    Returns:
      The last carry, and the step's results: arrays [B, T, ...], and arrays with the group's index first.
    """
    length = jax.tree.leaves(tokens)[0].shape[1]
    count = -(-length // tokens_in_group)
    tokens = jax.tree.map(lambda x: _pad_tokens(x, count * tokens_in_group), tokens)

    def body(carry: Any, group: Any) -> Any:
        index, kept = group
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, index * tokens_in_group, tokens_in_group, 1),
            tokens,
        )
        return step(carry, part, kept)

    groups = jnp.arange(count), kept
    carry, (outs, kept) = jax.lax.scan(body, carry, groups, reverse=reverse)

    def join_groups(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    return carry, (jax.tree.map(join_groups, outs), kept)


def _pad_tokens(x: Float[Array, "B T *D"], length: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


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
    start = jnp.cumsum(log_decay, -1)
    after = jnp.cumsum(log_decay[..., :0:-1], -1)[..., ::-1]
    end = jnp.pad(after, [(0, 0)] * (log_decay.ndim - 1) + [(0, 1)])
    # A sum from j to i is a difference of two sums, and there is no difference across a reset.
    reset = log_decay < LOG_ZERO
    finite = jnp.where(reset, 0, log_decay)
    coarse = jnp.round(finite * GRID) / GRID
    exponent = _differences(coarse) + _differences(finite - coarse)
    connected = jnp.tril(_differences(reset.astype(jnp.float32)) == 0)
    pairs = jnp.exp(jnp.where(connected, exponent, -jnp.inf))
    return Decays(jnp.exp(start)[..., None], jnp.exp(end)[..., None], pairs)


def _differences(x: Float[Array, "*N C"]) -> Float[Array, "*N C C"]:
    """At i, j the sum over j + 1 .. i, if that is below the diagonal."""
    total = jnp.cumsum(x, -1)
    return total[..., :, None] - total[..., None, :]


def no_decays(length: int) -> Decays:
    """Of chunks without decay."""
    one = jnp.ones((length, 1), jnp.float32)
    return Decays(one, one, jnp.tril(jnp.ones((length, length), jnp.float32)))


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
