"""The operators' own steps, one after the other: plain JAX, for any platform."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.ccq_query import scan as ccq_query
from kernels.ccq_query.state import CCQMoments
from kernels.gated_delta_rule import scan as gated_delta_rule
from kernels.gated_linear_attention import scan as gated_linear_attention


class Statistics(NamedTuple):
    """CCQ's inputs of one token; the moments are stacked over layers where the state is."""

    k: Float[Array, "B H K"]
    lam: Float[Array, "B H"]
    log_decay: Float[Array, "B H"] | None
    moments: CCQMoments


def forward(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    log_decay: Array | None,
    beta: Float[Array, "B HV"] | None,
    state: Array,
    statistics: Statistics | None,
    layer: Int[Array, ""] | None,
    *,
    scale: float,
    centered: bool,
) -> tuple[Float[Array, "B HV V"], Array, CCQMoments | None]:
    """Output, state and statistics after one token; see `kernels.decode_step`."""
    stacked = state, None if statistics is None else statistics.moments
    if layer is not None:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=layer, keepdims=False)
        state, moments = jax.tree.map(take, stacked)
        statistics = statistics and statistics._replace(moments=moments)
    moments = None
    if statistics is not None:
        float32 = jax.tree.map(lambda x: x.astype(jnp.float32), statistics)
        moments = ccq_query.update(float32.moments, float32.k, float32.log_decay, centered)
        q = ccq_query.clean(moments, q.astype(jnp.float32), float32.lam)
    if beta is None:
        state, out = gated_linear_attention.step(state, q, k, v, log_decay, scale=scale)
    else:
        assert log_decay is not None
        state, out = gated_delta_rule.step(state, q, k, v, log_decay, beta, scale=scale)
    if layer is not None:
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
        state, moments = jax.tree.map(put, stacked, (state, moments))
    return out, state, moments
