"""The recurrence, one token at a time: what every other implementation must equal, and the decode step.

The statistics are carried as count, mean and covariance. Of sums, C / n - mu mu^T would lose its digits
when keys share a large component. Only the first token works on sums, as a caller's state is sums, whose
gradient exists where the count, by which a mean is divided, is still 0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.ccq_query.state import CCQMoments, CCQState

differentiable = True
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    initial_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H K"], CCQState]:
    """Cleaned queries and final statistics; see `kernels.ccq_query`."""
    del chunk_size
    if log_decay is None:
        log_decay = jax.lax.full_like(lam, 0)

    def step(moments, token):
        q, k, lam, log_decay = token
        moments = update(moments, k, log_decay, centered)
        return moments, clean(moments, q, lam)

    tokens = tuple(jnp.moveaxis(x, 1, 0).astype(jnp.float32) for x in (q, k, lam, log_decay))
    (first_q, first_k, first_lam, first_decay), rest = (
        tuple(x[i] for x in tokens) for i in (0, slice(1, None))
    )
    moments = _first_moments(initial_state, first_k, first_decay, centered)
    first = clean(moments, first_q, first_lam)[None]
    moments, out = jax.lax.scan(step, moments, rest)
    out = jnp.moveaxis(jnp.concatenate([first, out]), 0, 1).astype(q.dtype)
    return out, moments.sums(centered)


def update(
    moments: CCQMoments,
    k: Float[Array, "B H K"],
    log_decay: Float[Array, "B H"] | None,
    centered: bool,
) -> CCQMoments:
    """Moments after one more key."""
    past = moments.count if log_decay is None else jnp.exp(log_decay) * moments.count
    count = past + 1
    # Over 10^4 tokens what rounds `keep` adds up. A difference rounds to either side; a GPU's quotient need not.
    keep = jnp.where(past > 1, 1 - 1 / count, past / count)[..., None]
    share = (1 / count)[..., None]
    delta = k - moments.mean
    # The sum would keep what rounding leaves of a mean that is forgotten.
    mean = jnp.where(past[..., None] > 0, moments.mean + share * delta, k)
    added = keep * share * delta if centered else share * k
    # A fused multiply-add rounds the old covariance once a token; over 10^4 tokens roundings add up.
    covariance = keep[..., None] * moments.covariance + _outer(added, delta if centered else k)
    return CCQMoments(count, mean, covariance)


def clean(
    moments: CCQMoments, q: Float[Array, "B H K"], lam: Float[Array, "B H"]
) -> Float[Array, "B H K"]:
    """q - lam Sigma q."""
    return q - lam[..., None] * einsum("bhij,bhj->bhi", moments.covariance, q)


def _first_moments(state: CCQState, k: Array, log_decay: Array, centered: bool) -> CCQMoments:
    """Moments after the first key, from the sums before it."""
    decay = jnp.exp(log_decay)
    # The result is the same about any origin, which therefore has no gradient.
    origin = jax.lax.stop_gradient(k) if centered else jax.lax.full_like(k, 0)
    past = _move_origin(state, origin)
    count = decay * past.count + 1
    mean = (decay[..., None] * past.key_sum + (k - origin)) / count[..., None]
    outer = decay[..., None, None] * past.key_outer + _outer(k - origin, k - origin)
    cov = outer / count[..., None, None]
    return CCQMoments(count, mean + origin, cov - _outer(mean, mean) if centered else cov)


def _move_origin(state: CCQState, origin: Float[Array, "B H K"]) -> CCQState:
    """Sums of k - origin, from sums of k."""
    count, total, outer = state
    cross = origin[..., :, None] * total[..., None, :]
    outer = outer - cross - jnp.swapaxes(cross, -1, -2)
    outer = outer + count[..., None, None] * _outer(origin, origin)
    return CCQState(count, total - count[..., None] * origin, outer)


def _outer(x: Float[Array, "*N K"], y: Float[Array, "*N K"]) -> Float[Array, "*N K K"]:
    return x[..., :, None] * y[..., None, :]
