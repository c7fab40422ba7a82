"""Scores of a chunk whose decays differ by channel, at any decay, in products of matrices.

A score sums over channels k the product of q_i, k_j and the channel's decay from j to i. Split at a token
between j and i, the decay falls into a factor of q_i and one of k_j, both at most 1. So a chunk's scores
come from its two halves, and from what the second half reads of the first, one product split at the
middle; and so on for the halves.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk


class Keys(NamedTuple):
    """Queries, keys and decays by chunk, in float32; a decay of a head has D = 1, of a channel D = K."""

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    log_decay: Float[Array, "N B H C D"] | None


class Scores(NamedTuple):
    """All that depends on queries, keys and decays of a chunk, and on nothing else."""

    start: Float[Array, "N B H C K"]  # queries, decayed from the chunk's start
    end: Float[Array, "N B H C K"]  # keys, decayed to the chunk's end
    whole: Float[Array, "N B H K 1"]  # the decay of the whole chunk
    pairs: Float[Array, "N B H C C"]


def scores(dot: chunk.Dot, q: Array, k: Array, log_decay: Array) -> Scores:
    """The scores of chunks."""
    levels, whole = chunk.levels(jnp.exp(log_decay))
    pairs = chunk.row_dot(q, k)[..., None]
    for level in levels[:-1]:
        length = pairs.shape[-1]
        _, second = chunk.halves(q * level.head, length)
        first, _ = chunk.halves(k * level.tail, length)
        pairs = chunk.join_blocks(pairs, dot.nt(second, first))
    head, tail = levels[-1]
    return Scores(q * head, k * tail, jnp.swapaxes(whole, -1, -2), pairs[..., 0, :, :])


def gradients(dot: chunk.Dot, q: Array, k: Array, log_decay: Array, d: Scores) -> Keys:
    """Gradients of queries, keys and log_decay, given those of the scores."""
    levels, whole = chunk.levels(jnp.exp(log_decay))
    d_q, d_k = jnp.zeros_like(q), jnp.zeros_like(k)
    for i, level in enumerate(levels[:-1]):
        length = 2**i
        _, second = chunk.halves(q * level.head, length)
        first, _ = chunk.halves(k * level.tail, length)
        # Both products keep the rows of their block's other half, as zeros, to be added without a copy.
        to_q, to_k = _cross_blocks(d.pairs, length)
        d_q += level.head * dot(to_q, first).reshape(q.shape)
        d_k += level.tail * dot.tn(to_k, second).reshape(k.shape)
    head, tail = levels[-1]
    d_start, d_end = head * d.start, tail * d.end
    # Token l decays what passes from j < l to i >= l, from the start to i >= l, and from j < l to the end.
    d_log_decay = _suffix_sum(q * (d_start + d_q) - k * d_k) + _prefix_sum(k * d_end)
    d_log_decay += whole * jnp.swapaxes(d.whole, -1, -2)
    own = jnp.diagonal(d.pairs, axis1=-2, axis2=-1)[..., None]
    return Keys(
        d_start + d_q + own * k,
        d_end + d_k + own * q,
        jnp.where(log_decay < chunk.LOG_ZERO, 0, d_log_decay),
    )


def _cross_blocks(
    pairs: Float[Array, "*N C C"], length: int
) -> tuple[Float[Array, "*N M 2L L"], Float[Array, "*N M L 2L"]]:
    """Of each diagonal block of two times `length`: the second half's rows and the first's columns.

    Once with all the rows, zero in the first half, and once with all the columns, zero in the second.
    """
    size = 2 * length
    blocks = jnp.stack(
        [pairs[..., i : i + size, i : i + size] for i in range(0, pairs.shape[-1], size)],
        -3,
    )
    second = jnp.arange(size) >= length
    all_rows = jnp.where(second[:, None], blocks[..., :length], 0)
    all_columns = jnp.where(second, 0, blocks[..., length:, :])
    return all_rows, all_columns


def _suffix_sum(x: Float[Array, "*N C K"]) -> Float[Array, "*N C K"]:
    """At l, the sum of x_i over i >= l."""
    size = x.shape[-2]
    return _sum_where(x, jnp.triu(jnp.ones((size, size), x.dtype)))


def _prefix_sum(x: Float[Array, "*N C K"]) -> Float[Array, "*N C K"]:
    """At l, the sum of x_j over j < l."""
    size = x.shape[-2]
    return _sum_where(x, jnp.tril(jnp.ones((size, size), x.dtype), -1))


def _sum_where(x: Float[Array, "*N C K"], mask: Float[Array, "C C"]) -> Float[Array, "*N C K"]:
    # A matrix product is faster than a cumulative sum, if its matrix has the batch dimensions of x.
    return chunk.exact(jnp.broadcast_to(mask, (*x.shape[:-2], *mask.shape)), x)
