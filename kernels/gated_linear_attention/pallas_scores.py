"""Scores of a chunk on a TPU, for decays of a head [1, C] and of each channel [C, K], at any decay.

A score sums over channels k the product of q_i, k_j and the channel's decay from j to i. Most decays are
mild: where half a chunk forgets less than e^-MILD, a product split at the chunk's middle is exact enough,
with one factor above 1 and one below. Elsewhere the chunk is halved, then its halves, and so on: a query in
a second half and a key in the first meet at the middle of their block with two factors at most 1.
On each such level a token is only a query or only a key, so one matrix serves as both sides of the product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import pallas_chunk
from kernels.chunk import LOG_ZERO
from kernels.pallas_chunk import Dot, diagonal, exact, iota, lower, row_dot, tril
from kernels.pallas_walk import least_of_heads

MILD = 30.0
# A log decay of which e^ is 0, alone and in any sum, and that stays finite in products with 0.
FORGET = -1e4


class Scores(NamedTuple):
    """All that depends on queries, keys and decays of a chunk, and on nothing else."""

    start: Float[Array, "C K"]  # queries, decayed from the chunk's start
    end: Float[Array, "C K"]  # keys, decayed to the chunk's end
    whole: Float[Array, "1 K"]  # the decay of the whole chunk; [1, 1] where it is a head's
    pairs: Float[Array, "C C"]


def scores(dot: Dot, q: Array, k: Array, log_decay: Array) -> Scores:
    """The scores of a chunk; `log_decay` is a row of a head's, or has the shape of the keys."""
    if log_decay.shape[0] == 1:
        decays = pallas_chunk.scalar_decays(log_decay)
        pairs = decays.pairs * dot.nt(q, k)
        return Scores(q * decays.start, k * decays.end, decays.whole, pairs)
    sums = _sums(log_decay)
    own = diagonal(row_dot(q, k))
    pairs = jax.lax.cond(
        sums.mild,
        lambda: tril(dot.nt(q * jnp.exp(sums.middle), k * jnp.exp(-sums.middle)), -1),
        lambda: _by_levels(dot, q, k, sums.log_decay),
    )
    return Scores(q * jnp.exp(sums.upto), k * jnp.exp(sums.after), jnp.exp(sums.whole), pairs + own)


def gradients(
    dot: Dot, q: Array, k: Array, log_decay: Array, d: Scores
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and log_decay, given those of the scores."""
    if log_decay.shape[0] == 1:
        return _gradients_by_head(dot, q, k, log_decay, d)
    sums = _sums(log_decay)
    below = tril(d.pairs, -1)

    def split_at_middle() -> tuple[Array, Array]:
        of_q, of_k = jnp.exp(sums.middle), jnp.exp(-sums.middle)
        return of_q * dot(below, k * of_k), of_k * dot.tn(below, q * of_q)

    d_q, d_k = jax.lax.cond(
        sums.mild,
        split_at_middle,
        lambda: _gradients_by_levels(dot, q, k, sums.log_decay, below),
    )
    head, tail, whole = (jnp.exp(x) for x in (sums.upto, sums.after, sums.whole))
    d_start, d_end = head * d.start, tail * d.end
    # Token l decays what passes from j < l to i >= l, from the start to i >= l, and from j < l to the end.
    ones = jnp.where(lower(q.shape[0]), 1.0, 0.0)
    d_log_decay = exact.tn(ones, q * (d_start + d_q) - k * d_k) + exact(
        ones - diagonal(ones), k * d_end
    )
    d_log_decay = jnp.where(log_decay < LOG_ZERO, 0.0, d_log_decay + whole * d.whole)
    own = jnp.sum(diagonal(d.pairs), axis=1, keepdims=True)
    return d_start + d_q + own * k, d_end + d_k + own * q, d_log_decay


def _gradients_by_head(
    dot: Dot, q: Array, k: Array, log_decay: Array, d: Scores
) -> tuple[Array, Array, Array]:
    decays = pallas_chunk.scalar_decays(log_decay)
    d_pairs = decays.pairs * d.pairs
    d_q = decays.start * d.start + dot(d_pairs, k)
    d_k = decays.end * d.end + dot.tn(d_pairs, q)
    d_log_decay = pallas_chunk.log_decay_gradient(
        decays.start * row_dot(q, d.start),
        decays.end * row_dot(k, d.end),
        decays.whole * jnp.sum(d.whole, axis=1, keepdims=True),
        d_pairs * dot.nt(q, k),
    )
    return d_q, d_k, d_log_decay


class _Sums(NamedTuple):
    """Sums of log decays, and whether a split at the middle serves the whole chunk."""

    log_decay: Float[Array, "C K"]  # finite
    upto: Float[Array, "C K"]  # up to each token
    after: Float[Array, "C K"]  # after it
    whole: Float[Array, "1 K"]
    middle: Float[
        Array, "C K"
    ]  # from the chunk's middle to a token, the negative of that backwards
    mild: Array


def _sums(log_decay: Float[Array, "C K"]) -> _Sums:
    size = log_decay.shape[0]
    finite = jnp.where(log_decay < LOG_ZERO, FORGET, log_decay)
    ones = jnp.where(lower(size), 1.0, 0.0)
    upto = exact(ones, finite)
    after = exact.tn(ones - diagonal(ones), finite)
    first, whole = upto[size // 2 - 1 : size // 2], upto[size - 1 :]
    forgotten = jnp.minimum(first, after[size // 2 - 1 : size // 2])
    # One way for all heads of the step, so that the other is not computed.
    mild = jnp.min(least_of_heads(forgotten)) > -MILD
    return _Sums(finite, upto, after, whole, upto - first, mild)


def _level(shape: tuple[int, ...], level: Array) -> tuple[Array, Array, Array]:
    """Of blocks of two halves of 2^level tokens: who is a query, whose decays it sums, and which pairs meet."""
    size = shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    same = (i >> (level + 1)) == (j >> (level + 1))
    i_query, j_query = ((x >> level) & 1 == 1 for x in (i, j))
    between = same & ((i_query & j_query & (j <= i)) | (~i_query & ~j_query & (j > i)))
    return (
        (iota(shape, 0) >> level) & 1 == 1,
        jnp.where(between, 1.0, 0.0),
        same & i_query & ~j_query,
    )


def _by_levels(dot: Dot, q: Array, k: Array, log_decay: Array) -> Float[Array, "C C"]:
    """Scores below the diagonal."""
    size = q.shape[0]

    def add(level: Array, total: Array) -> Array:
        query, between, pairs = _level(q.shape, level)
        x = jnp.where(query, q, k) * jnp.exp(exact(between, log_decay))
        return total + jnp.where(pairs, dot.nt(x, x), 0.0)

    return jax.lax.fori_loop(0, size.bit_length() - 1, add, jnp.zeros((size, size), jnp.float32))


def _gradients_by_levels(
    dot: Dot, q: Array, k: Array, log_decay: Array, d_pairs: Array
) -> tuple[Array, Array]:
    size = q.shape[0]

    def add(level: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        query, between, pairs = _level(q.shape, level)
        decay = jnp.exp(exact(between, log_decay))
        x = jnp.where(query, q, k) * decay
        d_level = jnp.where(pairs, d_pairs, 0.0)
        d_x = decay * (dot(d_level, x) + dot.tn(d_level, x))
        d_q, d_k = totals
        return d_q + jnp.where(query, d_x, 0.0), d_k + jnp.where(query, 0.0, d_x)

    zeros = jnp.zeros(q.shape, jnp.float32)
    return jax.lax.fori_loop(0, size.bit_length() - 1, add, (zeros, zeros))
