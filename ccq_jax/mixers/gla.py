"""Gated linear attention (arXiv 2312.06635), as flash-linear-attention builds it."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.layers import Linear
from ccq_jax.mixers.linear import Heads, LinearMixer
from kernels import gated_linear_attention


class GLA(LinearMixer):
    """S = diag(exp(g_t)) S + k_t v_t^T;  o_t = K^-0.5 S^T q_t.

    g = logsigmoid(decay_up (decay_down x)) / gate_normalizer, for each key channel.
    """

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        rank, keys = config.gate_low_rank, config.num_heads * config.head_dim
        self.decay_down = Linear(config, config.hidden_size, rank, rngs=rngs)
        self.decay_up = Linear(config, rank, keys, rngs=rngs, use_bias=True, out_dtype="float32")

    def gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], ...]:
        """log_decay."""
        heads = self.config.num_heads, self.config.head_dim
        gate = self.decay_up(self.decay_down(x)).reshape(*x.shape[:2], *heads)
        return (jax.nn.log_sigmoid(gate) / self.config.gate_normalizer,)

    def recurrence(
        self, q: Heads, k: Heads, v: Heads, *gates: Array, **options: Any
    ) -> tuple[Heads, Float[Array, "B HV K V"]]:
        """See `kernels.gated_linear_attention`."""
        return gated_linear_attention(q, k, v, *gates, **options)
