"""Chunks of tokens in parallel, in plain JAX.

With w_tj the weight of key j in token t's statistics, alpha_t that of all keys before the chunk, of mean
mu and covariance Sigma, and every key taken relative to an origin near the keys:

    Sigma_t q_t = alpha_t Sigma q_t + sum_j c_tj k_j,   c_tj = w_tj (q_t.k_j - its mean over the weights)

The covariance is symmetric, so the gradients read it once more, with the output's gradient in q's place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk
from kernels.ccq_query import xla_state
from kernels.ccq_query.state import CCQState
from kernels.ccq_query.xla_state import Moments, Quadratic


class Chunks(NamedTuple):
    """The inputs by chunk, in float32."""

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    lam: Float[Array, "N B H C 1"]
    log_decay: Float[Array, "N B H C"] | None
    counted: Float[Array, "N B H C 1"]  # 1, and 0 after the last token


class Weights(NamedTuple):
    """What a chunk's tokens see: w_tj for j <= t, alpha_t, the sum n_t behind both; and the decays."""

    pairs: Float[Array, "N B H C C"]
    past: Float[Array, "N B H C 1"]
    count: Float[Array, "N B H C 1"]  # type: ignore[assignment]  # it hides tuple.count
    decays: chunk.Decays


class Read(NamedTuple):
    """Of vectors x_t: Sigma_t x_t, and what the gradients need of it."""

    out: Float[Array, "N B H C K"]
    coefficients: Float[Array, "N B H C C"]  # c_tj
    deviation: Float[Array, "N B H C C"]  # x_t.k_j less its mean
    past_deviation: Float[Array, "N B H C 1"]  # x_t.mu less the mean
    mean: Float[Array, "N B H C 1"]


class Reads(NamedTuple):
    """What the backward reads: Sigma_t q_t, its gradient d_t, and Sigma_t d_t."""

    d_clean: Float[Array, "N B H C K"]
    d_read: Float[Array, "N B H C K"]
    keys: Float[Array, "N B H C K"]  # relative to the origin
    past_mean: Float[Array, "N B H 1 K"]  # relative to the origin
    of_q: Read
    of_d: Read
    product: Float[Array, "N B H C 1"]  # d_t.Sigma_t q_t


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    initial_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None,
) -> tuple[Float[Array, "B T H K"], CCQState, Any]:
    """Cleaned queries, final statistics and residuals; see `kernels.ccq_query`."""
    inputs = (q, k, lam, log_decay)
    length, tokens_in_group = chunk.lengths(q.shape, q.shape[3:], chunk_size)
    dot = chunk.Dot(q.dtype)

    def group(moments, tokens, _):
        x = _chunks(*tokens, length)
        decays = _decays(x)
        moments, past = xla_state.after_chunks(dot, x.k, decays, moments, centered)
        keys = x.k - _origins(x, past, centered)
        read = _read(dot, x.q, keys, _weights(decays, past), past.cov, centered)
        return moments, (chunk.join(x.q - x.lam * read.out, q.dtype), past)

    moments, (out, past) = chunk.over_groups(
        group,
        xla_state.from_sums(initial_state, centered),
        _with_counted(inputs),
        tokens_in_group=tokens_in_group,
    )
    return out, xla_state.to_sums(moments, centered), (inputs, past)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None,
) -> tuple[Any, ...]:
    """Gradients of (q, k, lam, log_decay, initial_state)."""
    inputs, past = residuals
    shape = inputs[0].shape
    length, tokens_in_group = chunk.lengths(shape, shape[3:], chunk_size)
    dot = chunk.Dot(inputs[0].dtype)

    def group(carry, tokens, past):
        tokens, d_out = tokens
        x = _chunks(*tokens, length)
        weights = _weights(_decays(x), past)
        origins = _origins(x, past, centered)
        reads = _reads(dot, x, chunk.split(d_out, length), origins, weights, past, centered)
        inside = _past_gradients(dot, x, reads, weights)
        whole = jnp.broadcast_to(weights.decays.whole, inside.constant.shape)
        carry, later = xla_state.before_chunks(inside, whole, origins, carry)
        gradients = _token_gradients(dot, x, reads, weights, past, later)
        gradients = jax.tree.map(lambda g, y: chunk.join(g, y.dtype), gradients, tokens[:4])
        return carry, (gradients, None)

    last = xla_state.gradient_of_sums(d_state)
    (first, origin), (gradients, _) = chunk.over_groups(
        group,
        (last, jax.lax.full_like(last.linear, 0)),
        (_with_counted(inputs), d_out),
        past,
        tokens_in_group=tokens_in_group,
        reverse=True,
    )
    first = xla_state.move(first, -origin)
    d_initial = CCQState(first.constant[..., 0, 0], first.linear[..., 0, :], first.square)
    return *gradients, d_initial


def _with_counted(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """With an array that is 1 for every token, and so 0 where the last chunk is filled up."""
    return *inputs, jax.lax.full_like(inputs[2], 1)


def _chunks(
    q: Array, k: Array, lam: Array, log_decay: Array | None, counted: Array, length: int
) -> Chunks:
    split = jax.tree.map(lambda y: chunk.split(y, length), (q, k, lam, log_decay, counted))
    q, k, lam, log_decay, counted = split
    return Chunks(q, k, lam[..., None], log_decay, counted[..., None])


def _decays(x: Chunks) -> chunk.Decays:
    """Decays of the chunks; a key after the last token weighs nothing."""
    if x.log_decay is None:
        start, end, pairs = chunk.no_decays(x.k.shape[-2])
    else:
        start, end, pairs = chunk.scalar_decays(x.log_decay)
    return chunk.Decays(start, end * x.counted, pairs * jnp.swapaxes(x.counted, -1, -2))


def _origins(x: Chunks, past: Moments, centered: bool) -> Float[Array, "N B H 1 K"]:
    """A point near the keys of each chunk, known before it; 0 if not centred."""
    if not centered:
        return jax.lax.full_like(past.mean, 0)
    return jnp.where(past.count > 0, past.mean, x.k[..., :1, :])


def _weights(decays: chunk.Decays, past: Moments) -> Weights:
    old = decays.start * past.count
    count = old + decays.pairs.sum(-1, keepdims=True)
    return Weights(decays.pairs / count, old / count, count, decays)


def _read(
    dot: chunk.Dot, x: Array, keys: Array, weights: Weights, cov: Array, centered: bool
) -> Read:
    """Sigma_t x_t of every token, with keys relative to the origin.

    Row t takes key t for its origin, so that its sums are over j < t only: they keep their digits where a
    strong decay leaves little but key t itself. A row's coefficients sum to 0, which gives key t's own.
    """
    scores = dot.nt(x, keys)
    if centered:
        own_score = chunk.row_dot(x, keys)
        below = jnp.tril(weights.pairs, -1)
        relative = scores - own_score
        mean = chunk.row_dot(below, relative) - weights.past * own_score
        deviation = relative - mean
        past_deviation = -(own_score + mean)
        coefficients = below * deviation
        own = -(coefficients.sum(-1, keepdims=True) + weights.past * past_deviation)
        coefficients += own * jnp.eye(scores.shape[-1], dtype=scores.dtype)
        mean += own_score
    else:
        deviation = scores
        coefficients = weights.pairs * scores
        past_deviation = mean = jnp.zeros_like(weights.past)
    out = weights.past * dot.nt(x, cov) + dot(coefficients, keys)
    return Read(out, coefficients, deviation, past_deviation, mean)


def _reads(
    dot: chunk.Dot,
    x: Chunks,
    d_clean: Array,
    origins: Array,
    weights: Weights,
    past: Moments,
    centered: bool,
) -> Reads:
    keys = x.k - origins
    d_read = -x.lam * d_clean
    of_q = _read(dot, x.q, keys, weights, past.cov, centered)
    of_d = _read(dot, d_read, keys, weights, jnp.swapaxes(past.cov, -1, -2), centered)
    product = chunk.row_dot(d_read, of_q.out)
    return Reads(d_clean, d_read, keys, past.mean - origins, of_q, of_d, product)


def _past_gradients(dot: chunk.Dot, x: Chunks, r: Reads, weights: Weights) -> Quadratic:
    """Gradients of the statistics before each chunk, through the chunk's own reads."""
    weight = weights.decays.start / weights.count
    total = chunk.exact.tn
    return Quadratic(
        total(weight, r.of_q.mean * r.of_d.mean - r.product),
        -total(weight, r.of_q.mean * r.d_read + r.of_d.mean * x.q),
        dot.tn(weight * r.d_read, x.q),
    )


def _token_gradients(
    dot: chunk.Dot,
    x: Chunks,
    r: Reads,
    weights: Weights,
    past: Moments,
    later: Quadratic,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of (q, k, lam, log_decay)."""
    both = later.square + jnp.swapaxes(later.square, -1, -2)
    d_key = weights.decays.end * (later.linear + dot(r.keys, both))
    d_key += dot.tn(r.of_q.coefficients, r.d_read) + dot.tn(r.of_d.coefficients, x.q)
    d_lam = -chunk.row_dot(r.d_clean, r.of_q.out)[..., 0]
    d_log_decay = None
    if x.log_decay is not None:
        d_log_decay = _log_decay_gradient(dot, x, r, weights, past, later)
    return r.d_clean + r.of_d.out, d_key, d_lam, d_log_decay


def _log_decay_gradient(
    dot: chunk.Dot,
    x: Chunks,
    r: Reads,
    weights: Weights,
    past: Moments,
    later: Quadratic,
) -> Float[Array, "N B H C"]:
    pairs = weights.pairs * (r.of_q.deviation * r.of_d.deviation - r.product)
    of_past = chunk.row_dot(r.d_read, dot.nt(x.q, past.cov))
    of_past += r.of_q.past_deviation * r.of_d.past_deviation
    start = weights.past * (of_past - r.product)
    at_keys = later.constant + chunk.row_dot(later.linear + dot(r.keys, later.square), r.keys)
    at_past = later.constant + chunk.row_dot(later.linear, r.past_mean)
    at_past += chunk.row_dot(later.square, past.cov).sum(-2, keepdims=True)
    whole = weights.decays.whole * past.count * at_past
    return chunk.log_decay_gradient(start, weights.decays.end * at_keys, whole, pairs)
