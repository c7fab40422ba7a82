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
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"] | Float[Array, "B T H 1"] | None,
    initial_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Outputs and final state; see `kernels.gated_linear_attention`."""
    del chunk_size

    def advance(state, token):
        return step(state, *token, scale=scale)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay))
    state, out = jax.lax.scan(advance, initial_state, tokens)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"] | Float[Array, "B H 1"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """The state after one token, and its output, float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if log_decay is not None:
        state = jnp.exp(log_decay.astype(jnp.float32))[..., None] * state
    state = state + einsum("bhk,bhv->bhkv", k, v)
    return state, scale * einsum("bhkv,bhk->bhv", state, q)
