"""The recurrence, one token at a time: what every other implementation must equal, and the decode step."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

differentiable = True
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    log_decay: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"],
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Outputs and final state; see `kernels.gated_delta_rule`."""
    del chunk_size

    def advance(state, token):
        return step(state, *token, scale=scale)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta))
    state, out = jax.lax.scan(advance, initial_state, tokens)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    log_decay: Float[Array, "B HV"],
    beta: Float[Array, "B HV"],
    *,
    scale: float,
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """The state after one token, and its output, float32."""
    group = v.shape[1] // q.shape[1]
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    state = jnp.exp(log_decay)[..., None, None] * state
    error = v - einsum("bhkv,bhk->bhv", state, k)
    state = state + einsum("bhk,bhv->bhkv", k, beta[..., None] * error)
    return state, scale * einsum("bhkv,bhk->bhv", state, q)
