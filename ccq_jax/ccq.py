"""Curvature-Conditioned Query (arXiv 2606.01294): it sits in front of any linear mixer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import FrozenConfigDict

from ccq_jax.cache import LayerCache, Segments
from ccq_jax.layers import l2_norm, normal
from ccq_jax.sharding import batch_parallel
from kernels import CCQMoments, ccq_query, gated_linear_attention

POWER_ITERATIONS = 10
# With trace_norm, Sigma is divided by tr Sigma + TRACE_FLOOR E|k|^2. Where the keys are nearly
# equal, tr Sigma is a difference of two float32 numbers that agree in most digits, and its rounding
# must not set the scale. SMALLEST keeps keys that are all zero, and their gradients, finite.
TRACE_FLOOR, SMALLEST = 1e-4, 1e-12
TINY = float(jnp.finfo(jnp.float32).tiny)


class CCQ(nnx.Module):
    """Contracts the query along the running covariance of the keys before it reads the memory:

        q_clean_t = q_t - lambda_t Sigma_t q_t,   lambda_t = lambda_max sigmoid(w_h . q_t + b_h)

    `config.ccq.fixed_lambda` >= 0 takes the place of the learned lambda, and needs no parameters.
    """

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        self.config = config
        self.lambda_proj = LambdaProj(config, rngs=rngs) if config.ccq.enabled else None

    def __call__(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        log_decay: Float[Array, "B T H"] | None,
        segments: Segments,
        moments: CCQMoments | None,
        diagnostics: bool = False,
    ) -> tuple[Float[Array, "B T H K"], CCQMoments, dict[str, Float[Array, " H"]]]:
        """The contracted query, the statistics after the last token, and what `diagnose` says.

        Args:
          q: queries as the mixer would read with them.
          k: keys as the mixer stores them.
          log_decay: the mixer's scalar gate; used with the option `decay` only.
          segments: where the tokens stand; statistics start afresh with each segment.
          moments: the statistics before the first token, if this continues a call.
          diagnostics: also describe the curvature; otherwise the dictionary is empty.
        """
        options = self.config.ccq
        moments = None if moments is None else segments.carry(moments)
        k, lam, scaled, log_decay = self._inputs(q, k, log_decay, segments, moments)

        def query(q, k, lam, log_decay, segment_ids, moments):
            cleaned, state = ccq_query(
                q,
                k,
                lam,
                log_decay=log_decay,
                segment_ids=segment_ids,
                initial_state=None if moments is None else moments.sums(options.centered),
                centered=options.centered,
                **operator_options(self.config),
            )
            return cleaned, state.moments(options.centered)

        inputs = (q, k, scaled, log_decay, segments.ids, moments)
        cleaned, moments = batch_parallel(query)(*inputs)
        described = diagnose(q, cleaned, lam, moments, options) if diagnostics else {}
        return cleaned, moments, described

    def step(
        self,
        q: Float[Array, "B 1 H K"],
        k: Float[Array, "B 1 H K"],
        log_decay: Float[Array, "B 1 H"],
        segments: Segments,
        cache: LayerCache,
    ) -> dict[str, Array | None]:
        """What `kernels.decode_step` takes, beside the moments in `cache`, to do the same with one token."""
        moments = segments.carry(cache.read())
        k, _, lam, decay = self._inputs(q, k, log_decay, segments, moments)
        if segments.restart is not None:
            decay = segments.forget(jnp.zeros_like(lam) if decay is None else decay)
        token = {"ccq_k": k, "lam": lam, "ccq_log_decay": decay}
        return jax.tree.map(lambda x: x[:, 0], token)

    def _inputs(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        log_decay: Float[Array, "B T H"] | None,
        segments: Segments,
        moments: CCQMoments | None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """The keys, lambda, lambda over the trace if that is asked for, and the decays that CCQ uses."""
        options = self.config.ccq
        k = l2_norm(k) if options.key_norm else k
        log_decay = log_decay if options.decay else None
        lam = self.strength(q)
        trace = self._trace(k, log_decay, segments, moments) if options.trace_norm else 1
        return k, lam, lam / trace, log_decay

    def strength(self, q: Float[Array, "B T H K"]) -> Float[Array, "B T H"]:
        """lambda, float32."""
        options = self.config.ccq
        if options.fixed_lambda >= 0 or self.lambda_proj is None:
            return jnp.full(q.shape[:-1], options.fixed_lambda, jnp.float32)
        return options.lambda_max * jax.nn.sigmoid(self.lambda_proj(q))

    def _trace(self, k, log_decay, segments, moments) -> Float[Array, "B T H"]:
        """tr Sigma_t for every token, from prefix sums: linear attention with q = k = 1."""
        k = k.astype(jnp.float32)
        ones = jnp.ones((*k.shape[:3], 1), jnp.float32)
        squares = jnp.sum(k * k, axis=-1, keepdims=True)
        if log_decay is not None:
            log_decay = log_decay[..., None]
        sums, norms = None, None
        if moments is not None:
            count = moments.count
            second = second_moment(moments, self.config.ccq.centered)
            norms = (count[..., None] * jnp.stack([second, jnp.ones_like(count)], -1))[:, :, None]
            sums = (count[..., None] * moments.mean)[:, :, None]

        def prefix_sum(ones, values, log_decay, segment_ids, state):
            return gated_linear_attention(
                ones,
                ones,
                values,
                log_decay,
                scale=1.0,
                segment_ids=segment_ids,
                initial_state=state,
                **operator_options(self.config),
            )

        run = batch_parallel(prefix_sum)
        totals = run(ones, jnp.concatenate([squares, ones], -1), log_decay, segments.ids, norms)[0]
        second, count = totals[..., 0] / totals[..., 1], totals[..., 1:]
        if not self.config.ccq.centered:
            return _with_floor(second, second)
        mean = run(ones, k, log_decay, segments.ids, sums)[0] / count
        return _with_floor(second - jnp.sum(mean * mean, axis=-1), second)

    def init_cache(self, batch_size: int) -> CCQMoments:
        """The statistics before the first token."""
        shape, width = (batch_size, self.config.num_heads), self.config.head_dim
        sizes = (shape, (*shape, width), (*shape, width, width))
        return CCQMoments(*(jnp.zeros(size, jnp.float32) for size in sizes))


def _with_floor(trace: Array, second: Array) -> Array:
    return jnp.maximum(trace, 0) + TRACE_FLOOR * second + SMALLEST


class LambdaProj(nnx.Module):
    """w_h . q + b_h for each head h, in float32."""

    def __init__(self, config: FrozenConfigDict, *, rngs: nnx.Rngs):
        shape = (config.num_heads, config.head_dim)
        self.kernel = normal(rngs, shape, config.initializer_range)
        self.bias = nnx.Param(jnp.full(config.num_heads, config.ccq.bias_init, jnp.float32))

    def __call__(self, q: Float[Array, "B T H K"]) -> Float[Array, "B T H"]:
        """Head by head."""
        return jnp.sum(q.astype(jnp.float32) * self.kernel[...], axis=-1) + self.bias[...]


def operator_options(config: FrozenConfigDict) -> dict:
    """The keyword arguments that every operator takes from the configuration."""
    implementation = None if config.implementation == "auto" else config.implementation
    return {"implementation": implementation, "chunk_size": config.chunk_size or None}


def step_options(config: FrozenConfigDict) -> dict:
    """The same for `kernels.decode_step`, whose plain form serves all but its one kernel."""
    implementation = {"auto": None, "triton": "triton"}.get(config.implementation, "scan")
    return {"implementation": implementation}


def diagnose(
    q: Float[Array, "B T H K"],
    cleaned: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    moments: CCQMoments,
    options: FrozenConfigDict,
) -> dict[str, Float[Array, " H"]]:
    """What CCQ does, head by head, averaged over the batch. Sigma is that of the last token.

    Returns:
      lambda_mean, lambda_std: of lambda over all tokens.
      lambda_sigma_max: mean lambda times Sigma's largest eigenvalue. Above 2 the query is no longer
        contracted.
      effective_rank: (tr Sigma)^2 / |Sigma|_F^2, between 1 and K; 0 where Sigma is 0.
      query_moved: |q_clean - q| / |q|, averaged over all tokens.
    """
    q, cleaned, lam, moments = jax.lax.stop_gradient((q, cleaned, lam, moments))
    q = q.astype(jnp.float32)
    sigma = moments.covariance
    trace = jnp.trace(sigma, axis1=-2, axis2=-1)
    frobenius = jnp.sum(sigma * sigma, axis=(-2, -1))
    largest = largest_eigenvalue(sigma)
    if options.trace_norm:
        largest = largest / _with_floor(trace, second_moment(moments, options.centered))
    moved = jnp.linalg.norm(cleaned.astype(jnp.float32) - q, axis=-1)
    return {
        "lambda_mean": jnp.mean(lam, axis=(0, 1)),
        "lambda_std": jnp.std(lam, axis=(0, 1)),
        "lambda_sigma_max": jnp.mean(lam.mean(axis=1) * largest, axis=0),
        "effective_rank": jnp.mean(trace**2 / jnp.maximum(frobenius, TINY), axis=0),
        "query_moved": jnp.mean(
            moved / jnp.maximum(jnp.linalg.norm(q, axis=-1), TINY), axis=(0, 1)
        ),
    }


def second_moment(moments: CCQMoments, centered: bool) -> Float[Array, "B H"]:
    """E |k|^2; `centered` says what the moments' covariance is about."""
    second = jnp.trace(moments.covariance, axis1=-2, axis2=-1)
    return second + jnp.sum(moments.mean**2, axis=-1) if centered else second


def largest_eigenvalue(sigma: Float[Array, "*batch K K"]) -> Float[Array, "*batch"]:
    """Of positive semidefinite matrices, by power iteration: from below, within a few per cent."""
    start = jax.random.normal(jax.random.key(0), sigma.shape[-1:])
    vector = jnp.broadcast_to(start, sigma.shape[:-1])
    for _ in range(POWER_ITERATIONS):
        vector = vector / jnp.maximum(jnp.linalg.norm(vector, axis=-1, keepdims=True), TINY)
        image = jnp.einsum("...ij,...j->...i", sigma, vector)
        value = jnp.sum(vector * image, axis=-1)
        vector = image
    return value
