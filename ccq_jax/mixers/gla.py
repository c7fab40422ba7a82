"""Gated linear attention (arXiv 2312.06635), as flash-linear-attention builds it."""

import jax
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.cache import Segments
from ccq_jax.ccq import operator_options
from ccq_jax.layers import Linear
from ccq_jax.mixers.linear import LinearCache, LinearMixer
from ccq_jax.sharding import batch_parallel
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

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Segments,
        cache: LinearCache | None = None,
        diagnostics: bool = False,
    ) -> tuple[Float[Array, "B T D"], LinearCache | None, dict[str, Float[Array, " H"]]]:
        """See `ccq_jax.mixers`."""
        q, k, v, tails = self.project(x, segments, cache)
        gate = self.decay_up(self.decay_down(x)).reshape(q.shape)
        log_decay = jax.nn.log_sigmoid(gate) / self.config.gate_normalizer
        q, statistics, described = self.condition(q, k, None, segments, cache, diagnostics)

        def remember(q, k, v, log_decay, segment_ids, state):
            return gated_linear_attention(
                q,
                k,
                v,
                log_decay,
                segment_ids=segment_ids,
                initial_state=state,
                **operator_options(self.config),
            )

        state = None if cache is None else segments.carry(cache.state)
        inputs = (q, k, v, log_decay, segments.ids, state)
        o, state = batch_parallel(remember)(*inputs)
        y = self.read_out(o, x)
        return y, None if cache is None else LinearCache(tails, statistics, state), described
