"""The recurrence, one token at a time: what every other implementation must equal, and the decode step.

A covariance is the same about any origin, while C / n - mu mu^T loses its digits when the keys share
a large component. So the sums are kept about the newest key.
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
        origin, state = carry
        q, k, lam = (x.astype(jnp.float32) for x in token[:3])
        if log_decay is not None:
            decay = jnp.exp(token[3].astype(jnp.float32))
            state = jax.tree.map(lambda x: jnp.einsum("bh,bh...->bh...", decay, x), state)
        if centered:
            # Whatever the origin, the result is the same: it has no gradient.
            new_origin = jax.lax.stop_gradient(k)
            state, origin = move_origin(state, new_origin - origin), new_origin
        delta = k - origin
        count = state.count + 1
        total = state.key_sum + delta
        outer = state.key_outer + delta[..., :, None] * delta[..., None, :]
        read = einsum("bhij,bhj->bhi", outer, q) / count[..., None]
        if centered:
            mean = total / count[..., None]
            read = read - mean * einsum("bhi,bhi->bh", mean, q)[..., None]
        return (origin, CCQState(count, total, outer)), q - lam[..., None] * read

    origin = jax.lax.full_like(initial_state.key_sum, 0)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, lam, log_decay))
    (origin, state), out = jax.lax.scan(step, (origin, initial_state), tokens)
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), move_origin(state, -origin)


def move_origin(state: CCQState, by: Float[Array, "B H K"]) -> CCQState:
    """The sums over k - by, from the sums over k."""
    count, total, outer = state
    shifted = total - count[..., None] * by
    cross = by[..., :, None] * total[..., None, :]
    outer = outer - cross - jnp.swapaxes(cross, -1, -2)
    outer = outer + count[..., None, None] * by[..., :, None] * by[..., None, :]
    return CCQState(count, shifted, outer)
