"""Chunks of tokens in parallel, in plain JAX.

With w_tj the weight of key j in token t's statistics, alpha_t that of all keys before the chunk, of mean
mu and covariance Sigma, and every key taken relative to an origin near the keys:

    Sigma_t q_t = alpha_t Sigma q_t + sum_j c_tj k_j,   c_tj = w_tj (q_t.k_j - mean over the weights)

From chunk to chunk go count, mean and covariance, not sums, which lose their digits when keys share a
large component. Going back, the statistics' gradient is a quadratic function of a key, which stays the
same function when the origin moves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels import chunk
from kernels.ccq_query.state import CCQState


class Chunks(NamedTuple):
    """The inputs by chunk, in float32."""

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    lam: Float[Array, "N B H C 1"]
    log_decay: Float[Array, "N B H C"] | None
    valid: Bool[Array, "N 1 1 C 1"]  # False after the last token


class Moments(NamedTuple):
    """Statistics of the keys before a chunk; not centred, `cov` is the second moment about 0."""

    count: Float[Array, "*N B H 1 1"]  # type: ignore[assignment]  # it hides tuple.count
    mean: Float[Array, "*N B H 1 K"]
    cov: Float[Array, "*N B H K K"]


class Weights(NamedTuple):
    """What a chunk's tokens see: w_tj for j <= t, alpha_t, and all counted keys n_t; and the decays."""

    pairs: Float[Array, "N B H C C"]
    past: Float[Array, "N B H C 1"]
    count: Float[Array, "N B H C 1"]  # type: ignore[assignment]  # it hides tuple.count
    decays: chunk.Decays


class Read(NamedTuple):
    """Of vectors x_t: Sigma_t x_t, and what the gradients need of it."""

    out: Float[Array, "N B H C K"]
    coefficients: Float[Array, "N B H C C"]  # c_tj
    deviation: Float[Array, "N B H C C"]  # x_t.k_j, less its mean
    past_deviation: Float[Array, "N B H C 1"]  # x_t.mu, less the mean
    mean: Float[Array, "N B H C 1"]  # relative to the origin


class Quadratic(NamedTuple):
    """constant + linear.k + k^T square k of a key k relative to an origin: the statistics' gradient."""

    constant: Float[Array, "*N B H 1 1"]
    linear: Float[Array, "*N B H 1 K"]
    square: Float[Array, "*N B H K K"]


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
    x = _chunks(*inputs, chunk_size=chunk_size)
    dot = chunk.Dot(q.dtype)
    decays = _decays(x)
    last, past = _moments(dot, x, decays, initial_state, centered)
    keys = x.k - _origins(x, past, centered)
    read = _read(dot, x.q, keys, _weights(decays, past), past.cov, centered)
    return (
        chunk.join(x.q - x.lam * read.out, q),
        _to_sums(last, centered),
        (inputs, past),
    )


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
    x = _chunks(*inputs, chunk_size=chunk_size)
    dot = chunk.Dot(inputs[0].dtype)
    weights = _weights(_decays(x), past)
    origins = _origins(x, past, centered)
    keys = x.k - origins
    d_clean = chunk.split(d_out, x.q.shape[-2])
    d_read = -x.lam * d_clean
    of_q = _read(dot, x.q, keys, weights, past.cov, centered)
    of_d = _read(dot, d_read, keys, weights, jnp.swapaxes(past.cov, -1, -2), centered)
    product = chunk.row_dot(d_read, of_q.out)

    d_initial, later = _state_gradients(
        dot, x.q, d_read, of_q, of_d, product, weights, origins, d_state
    )
    d_key = later.linear + dot(keys, later.square + jnp.swapaxes(later.square, -1, -2))
    d_key = weights.decays.end * d_key
    d_key += dot.tn(of_q.coefficients, d_read) + dot.tn(of_d.coefficients, x.q)
    d_lam = -chunk.row_dot(d_clean, of_q.out)[..., 0]
    q, k, lam, log_decay = inputs
    d_log_decay = None
    if log_decay is not None:
        gradient = _log_decay_gradient(
            dot,
            x.q,
            d_read,
            keys,
            of_q,
            of_d,
            product,
            weights,
            past,
            past.mean - origins,
            later,
        )
        d_log_decay = chunk.join(gradient, log_decay)
    return (
        chunk.join(d_clean + of_d.out, q),
        chunk.join(d_key, k),
        chunk.join(d_lam, lam),
        d_log_decay,
        d_initial,
    )


def _chunks(
    q: Array, k: Array, lam: Array, log_decay: Array | None, *, chunk_size: int | None
) -> Chunks:
    tokens = q.shape[1]
    length = chunk.length_for(tokens, chunk_size)
    q, k, lam, log_decay = jax.tree.map(lambda y: chunk.split(y, length), (q, k, lam, log_decay))
    valid = (jnp.arange(q.shape[0] * length) < tokens).reshape(-1, 1, 1, length, 1)
    return Chunks(q, k, lam[..., None], log_decay, valid)


def _decays(x: Chunks) -> chunk.Decays:
    """Decays of the chunks; a key after the last token weighs nothing."""
    if x.log_decay is None:
        start, end, pairs = chunk.no_decays(x.k.shape[-2])
    else:
        start, end, pairs = chunk.scalar_decays(x.log_decay)
    return chunk.Decays(start, end * x.valid, pairs * jnp.swapaxes(x.valid, -1, -2))


def _moments(
    dot: chunk.Dot, x: Chunks, decays: chunk.Decays, initial: CCQState, centered: bool
) -> tuple[Moments, Moments]:
    """The statistics after the last chunk, and those before each."""
    count = decays.end.sum(-2, keepdims=True)
    share = decays.end / count
    mean = chunk.exact.tn(share, x.k)
    keys = x.k - mean if centered else x.k
    own = Moments(count, mean, dot.tn(share * keys, keys))

    def step(past, chunk_inputs):
        own, whole = chunk_inputs
        old = whole * past.count
        count = old + own.count
        new_share, old_share = own.count / count, old / count
        between = own.mean - past.mean
        mean = past.mean + new_share * between
        cov = old_share * past.cov + new_share * own.cov
        if centered:
            cov += old_share * new_share * jnp.swapaxes(between, -1, -2) * between
        return Moments(count, mean, cov), past

    own_count = jnp.broadcast_to(own.count, (*x.k.shape[:3], 1, 1))
    whole = jnp.broadcast_to(decays.whole, (*x.k.shape[:3], 1, 1))
    return jax.lax.scan(step, _from_sums(initial, centered), (own._replace(count=own_count), whole))


def _from_sums(state: CCQState, centered: bool) -> Moments:
    count = state.count[..., None, None]
    divisor = jnp.where(count > 0, count, 1)
    mean = state.key_sum[..., None, :] / divisor
    cov = state.key_outer / divisor
    return Moments(count, mean, cov - _outer(mean) if centered else cov)


def _to_sums(moments: Moments, centered: bool) -> CCQState:
    count, mean, cov = moments
    outer = cov + _outer(mean) if centered else cov
    return CCQState(count[..., 0, 0], (count * mean)[..., 0, :], count * outer)


def _outer(row: Float[Array, "*N 1 K"]) -> Float[Array, "*N K K"]:
    return jnp.swapaxes(row, -1, -2) * row


def _origins(x: Chunks, past: Moments, centered: bool) -> Float[Array, "N B H 1 K"]:
    """A point near the keys of each chunk, known before it; 0 if not centred."""
    if not centered:
        return jnp.zeros_like(past.mean)
    return jnp.where(past.count > 0, past.mean, x.k[..., :1, :])


def _weights(decays: chunk.Decays, past: Moments) -> Weights:
    old = decays.start * past.count
    count = old + decays.pairs.sum(-1, keepdims=True)
    return Weights(decays.pairs / count, old / count, count, decays)


def _read(
    dot: chunk.Dot, x: Array, keys: Array, weights: Weights, cov: Array, centered: bool
) -> Read:
    """Sigma_t x_t of every token, with `keys` relative to the origin.

    The origin of row t is moved on to key t, so that sums are over j < t only, and keep their digits where
    a strong decay leaves little but key t itself. The coefficients of a row sum to 0, which gives key t's.
    """
    scores = dot.nt(x, keys)
    if centered:
        self_score = chunk.row_dot(x, keys)
        below = jnp.tril(weights.pairs, -1)
        relative = scores - self_score
        mean = chunk.row_dot(below, relative) - weights.past * self_score
        deviation = relative - mean
        past_deviation = -(self_score + mean)
        coefficients = below * deviation
        own = -(coefficients.sum(-1, keepdims=True) + weights.past * past_deviation)
        coefficients += own * jnp.eye(scores.shape[-1])
        mean += self_score
    else:
        deviation = scores
        coefficients = weights.pairs * scores
        past_deviation = mean = jnp.zeros_like(weights.past)
    out = weights.past * dot.nt(x, cov) + dot(coefficients, keys)
    return Read(out, coefficients, deviation, past_deviation, mean)


def _state_gradients(
    dot: chunk.Dot,
    q: Array,
    d_read: Array,
    of_q: Read,
    of_d: Read,
    product: Float[Array, "N B H C 1"],
    weights: Weights,
    origins: Array,
    d_state: CCQState,
) -> tuple[CCQState, Quadratic]:
    """Gradients of the initial state, and of the state after each chunk about the chunk's origin."""
    weight = weights.decays.start / weights.count

    def total(x):
        return chunk.exact.tn(weight, x)

    inside = Quadratic(
        total(of_q.mean * of_d.mean - product),
        -total(of_q.mean * d_read + of_d.mean * q),
        dot.tn(weight * d_read, q),
    )

    def step(later, chunk_inputs):
        inside, whole, to_previous = chunk_inputs
        before = jax.tree.map(lambda a, b: whole * a + b, later, inside)
        return _move(before, to_previous), later

    last = Quadratic(
        d_state.count[..., None, None], d_state.key_sum[..., None, :], d_state.key_outer
    )
    whole = jnp.broadcast_to(weights.decays.whole, (*q.shape[:3], 1, 1))
    # The first chunk's gradient goes on to the origin 0 of the sums that a caller holds.
    previous = jnp.concatenate([jnp.zeros_like(origins[:1]), origins[:-1]])
    first, later = jax.lax.scan(
        step,
        _move(last, origins[-1]),
        (inside, whole, previous - origins),
        reverse=True,
    )
    state = CCQState(first.constant[..., 0, 0], first.linear[..., 0, :], first.square)
    return state, later


def _move(f: Quadratic, by: Float[Array, "B H 1 K"]) -> Quadratic:
    """The same function of the key, about an origin moved by `by`."""
    half = chunk.exact(by, f.square)
    constant = f.constant + chunk.row_dot(f.linear + half, by)
    return Quadratic(constant, f.linear + half + chunk.exact.nt(by, f.square), f.square)


def _log_decay_gradient(
    dot: chunk.Dot,
    q: Array,
    d_read: Array,
    keys: Array,
    of_q: Read,
    of_d: Read,
    product: Float[Array, "N B H C 1"],
    weights: Weights,
    past: Moments,
    past_mean: Float[Array, "N B H 1 K"],
    later: Quadratic,
) -> Float[Array, "N B H C"]:
    pairs = weights.pairs * (of_q.deviation * of_d.deviation - product)
    of_cov = chunk.row_dot(d_read, dot.nt(q, past.cov))
    start = weights.past * (of_cov + of_q.past_deviation * of_d.past_deviation - product)
    at_keys = later.constant + chunk.row_dot(later.linear + dot(keys, later.square), keys)
    at_past = later.constant + chunk.row_dot(later.linear, past_mean)
    at_past += chunk.row_dot(later.square, past.cov).sum(-2, keepdims=True)
    whole = weights.decays.whole * past.count * at_past
    return chunk.log_decay_gradient(start, weights.decays.end * at_keys, whole, pairs)
