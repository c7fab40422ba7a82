"""The recurrence, one token at a time: what every other implementation must equal, and the decode step.

A covariance is the same about any origin, while C / n - mu mu^T loses its digits when the keys share a large component.
So the sums are kept about an origin near the keys: the incoming mean, or the first key after a reset.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.ccq_query.state import CCQState

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

    def step(carry, token):
        origin, (count, total, outer) = carry
        q, k, lam = (x.astype(jnp.float32) for x in token[:3])
        if log_decay is not None:
            decay = jnp.exp(token[3].astype(jnp.float32))[..., None]
            count, total, outer = decay[..., 0] * count, decay * total, decay[..., None] * outer
            if centered:
                origin = jnp.where(decay == 0, k, origin)
        delta = k - origin
        count = count + 1
        total = total + delta
        outer = outer + delta[..., :, None] * delta[..., None, :]
        read = einsum("bhij,bhj->bhi", outer, q) / count[..., None]
        if centered:
            mean = total / count[..., None]
            read = read - mean * einsum("bhi,bhi->bh", mean, q)[..., None]
        return (origin, CCQState(count, total, outer)), q - lam[..., None] * read

    origin = jnp.zeros_like(initial_state.key_sum)
    if centered:
        count = initial_state.count[..., None]
        mean = initial_state.key_sum / jnp.where(count > 0, count, 1)
        origin = jnp.where(count > 0, mean, k[:, 0].astype(jnp.float32))
    # Whatever the origin, the result is the same: it has no gradient.
    origin = jax.lax.stop_gradient(origin)
    carry = origin, move_origin(initial_state, origin)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, lam, log_decay))
    (origin, state), out = jax.lax.scan(step, carry, tokens)
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), move_origin(state, -origin)


def move_origin(state: CCQState, by: Float[Array, "B H K"]) -> CCQState:
    """The sums over k - by, from the sums over k."""
    count, total, outer = state
    shifted = total - count[..., None] * by
    cross = by[..., :, None] * total[..., None, :]
    outer = outer - cross - jnp.swapaxes(cross, -1, -2)
    outer = outer + count[..., None, None] * by[..., :, None] * by[..., None, :]
    return CCQState(count, shifted, outer)
