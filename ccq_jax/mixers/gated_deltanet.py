"""Gated DeltaNet (arXiv 2412.06464), as flash-linear-attention builds it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.cache import Segments
from ccq_jax.ccq import operator_options
from ccq_jax.layers import Linear, l2_norm
from ccq_jax.mixers.linear import LinearCache, LinearMixer
from ccq_jax.sharding import batch_parallel
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

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Segments,
        cache: LinearCache | None = None,
        diagnostics: bool = False,
    ) -> tuple[Float[Array, "B T D"], LinearCache | None, dict[str, Float[Array, " H"]]]:
        """See `ccq_jax.mixers`."""
        q, k, v, tails = self.project(x, segments, cache)
        if not tails:  # without a convolution, which ends in one, the SiLU stands alone
            q, k, v = jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v)
        q, k = l2_norm(q), l2_norm(k)
        dt = jax.nn.softplus(self.a_proj(x) + self.dt_bias[...])
        log_decay = -jnp.exp(self.A_log[...]) * dt
        beta = jax.nn.sigmoid(self.b_proj(x))
        q, statistics, described = self.condition(q, k, log_decay, segments, cache, diagnostics)

        def remember(q, k, v, log_decay, beta, segment_ids, state):
            return gated_delta_rule(
                q,
                k,
                v,
                log_decay,
                beta,
                segment_ids=segment_ids,
                initial_state=state,
                **operator_options(self.config),
            )

        state = None if cache is None else segments.carry(cache.state)
        inputs = (q, k, v, log_decay, beta, segments.ids, state)
        o, state = batch_parallel(remember)(*inputs)
        y = self.read_out(o, x)
        return y, None if cache is None else LinearCache(tails, statistics, state), described
