"""What goes from chunk to chunk: the keys' statistics and, going back, the statistics' gradient.

Count, mean and covariance are carried, not sums, which lose their digits when keys share a large
component. Their gradient is a quadratic function of a key: what one more key before the chunk would
change. It stays the same function when the origin of the keys moves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk
from kernels.ccq_query.state import CCQState


class Moments(NamedTuple):
    """Statistics of the keys before a chunk; not centred, `cov` is the second moment about 0."""

    count: Float[Array, "*N B H 1 1"]  # type: ignore[assignment]  # it hides tuple.count
    mean: Float[Array, "*N B H 1 K"]
    cov: Float[Array, "*N B H K K"]


class Quadratic(NamedTuple):
    """constant + linear.k + k^T square k, of a key k relative to an origin."""

    constant: Float[Array, "*N B H 1 1"]
    linear: Float[Array, "*N B H 1 K"]
    square: Float[Array, "*N B H K K"]


def from_sums(state: CCQState, centered: bool) -> Moments:
    """Moments of the sums that a caller holds."""
    count = state.count[..., None, None]
    divisor = jnp.where(count > 0, count, 1)
    mean = state.key_sum[..., None, :] / divisor
    cov = state.key_outer / divisor
    return Moments(count, mean, cov - _outer(mean) if centered else cov)


def to_sums(moments: Moments, centered: bool) -> CCQState:
    """Undoes `from_sums`."""
    count, mean, cov = moments
    outer = cov + _outer(mean) if centered else cov
    return CCQState(count[..., 0, 0], (count * mean)[..., 0, :], count * outer)


def after_chunks(
    dot: chunk.Dot,
    k: Float[Array, "N B H C K"],
    decays: chunk.Decays,
    first: Moments,
    centered: bool,
) -> tuple[Moments, Moments]:
    """Moments after the last chunk, and those before each, given those before the first."""
    count = decays.end.sum(-2, keepdims=True)
    share = decays.end / jnp.where(count > 0, count, 1)  # a chunk of padding has no keys
    mean = chunk.exact.tn(share, k)
    keys = k - mean if centered else k
    inside = Moments(count, mean, dot.tn(share * keys, keys))

    def step(past, chunk_inputs):
        inside, whole = chunk_inputs
        old = whole * past.count
        count = old + inside.count
        keep, share = old / count, inside.count / count
        between = inside.mean - past.mean
        mean = past.mean + share * between
        cov = keep * past.cov + share * inside.cov
        if centered:
            cov += keep * share * _outer(between)
        return Moments(count, mean, cov), past

    whole = jnp.broadcast_to(decays.whole, count.shape)
    return jax.lax.scan(step, first, (inside, whole))


def gradient_of_sums(d_state: CCQState) -> Quadratic:
    """The gradient of sums as a function of a key, about the origin 0."""
    count, total, outer = d_state
    return Quadratic(count[..., None, None], total[..., None, :], outer)


def before_chunks(
    inside: Quadratic,
    whole: Float[Array, "N B H 1 1"],
    origins: Float[Array, "N B H 1 K"],
    last: tuple[Quadratic, Array],
) -> tuple[tuple[Quadratic, Array], Quadratic]:
    """Gradients of the statistics before the first chunk, with its origin, and of those after each.

    Args:
      inside: gradients of the statistics before each chunk, through its own outputs alone.
      whole: decays of the chunks.
      origins: of the chunks' keys; the results for each chunk are about its own.
      last: gradient of the statistics after the last chunk, and its origin.
    """

    def step(carry, chunk_inputs):
        later, from_origin = carry
        inside, whole, origin = chunk_inputs
        later = move(later, origin - from_origin)
        before = jax.tree.map(lambda a, b: whole * a + b, later, inside)
        return (before, origin), later

    return jax.lax.scan(step, last, (inside, whole, origins), reverse=True)


def move(f: Quadratic, by: Float[Array, "B H 1 K"]) -> Quadratic:
    """The same function of the key, about an origin moved by `by`."""
    half = chunk.exact(by, f.square)
    constant = f.constant + chunk.row_dot(f.linear + half, by)
    return Quadratic(constant, f.linear + half + chunk.exact.nt(by, f.square), f.square)


def _outer(row: Float[Array, "*N 1 K"]) -> Float[Array, "*N K K"]:
    return jnp.swapaxes(row, -1, -2) * row
