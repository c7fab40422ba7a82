"""Gated DeltaNet (arXiv 2412.06464), as flash-linear-attention builds it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.layers import Linear, l2_norm
from ccq_jax.mixers.linear import Heads, LinearMixer
from kernels import gated_delta_rule


class GatedDeltaNet(LinearMixer):
    """S = exp(g_t) S;  S += beta_t k_t (v_t - S^T k_t)^T;  o_t = K^-0.5 S^T q_t, with unit q and k.

    g = -exp(A_log) softplus(a_proj x + dt_bias) and beta = sigmoid(b_proj x): scalars, for each
    value head.
    """

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        hidden, heads = config.hidden_size, config.num_v_heads
        self.a_proj = Linear(config, hidden, heads, rngs=rngs, out_dtype="float32")
        self.b_proj = Linear(config, hidden, heads, rngs=rngs, out_dtype="float32")
        # A ~ U(0, 16), and dt = softplus(dt_bias) log-uniform in [1e-3, 0.1].
        key = rngs.params()
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(key, (heads,), minval=1e-6, maxval=16.0)))
        log_dt = jax.random.uniform(
            rngs.params(), (heads,), minval=jnp.log(1e-3), maxval=jnp.log(0.1)
        )
        dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))

    def activate(self, q: Heads, k: Heads, v: Heads) -> tuple[Heads, Heads, Heads]:
        """Unit queries and keys."""
        if not self.config.conv_size:  # whose output has its SiLU already
            q, k, v = jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v)
        return l2_norm(q), l2_norm(k), v

    def gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T HV"], ...]:
        """log_decay and beta."""
        dt = jax.nn.softplus(self.a_proj(x) + self.dt_bias[...])
        return -jnp.exp(self.A_log[...]) * dt, jax.nn.sigmoid(self.b_proj(x))

    def recurrence(
        self, q: Heads, k: Heads, v: Heads, *gates: Array, **options: Any
    ) -> tuple[Heads, Float[Array, "B HV K V"]]:
        """See `kernels.gated_delta_rule`."""
        return gated_delta_rule(q, k, v, *gates, **options)
