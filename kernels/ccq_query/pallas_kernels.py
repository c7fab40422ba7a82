"""The kernels of `kernels.ccq_query.pallas`: one chunk of C tokens of one head."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import pallas_chunk
from kernels.pallas_chunk import Decays, Dot, diagonal, exact, iota, row_dot, tril


class Past(NamedTuple):
    """The statistics of the keys before a chunk, and the origin of the chunk's own."""

    count: Float[Array, "1 1"]  # type: ignore[assignment]  # it hides tuple.count
    mean: Float[Array, "1 K"]
    cov: Float[Array, "K K"]
    origin: Float[Array, "1 K"]


class Weights(NamedTuple):
    """What a chunk's tokens see: w_tj for j <= t, alpha_t, and the sum n_t behind both."""

    pairs: Float[Array, "C C"]
    past: Float[Array, "C 1"]
    count: Float[Array, "C 1"]  # type: ignore[assignment]  # it hides tuple.count


class Read(NamedTuple):
    """Of vectors x_t: Sigma_t x_t, and what the gradients need of it; see `xla.Read`."""

    out: Float[Array, "C K"]
    coefficients: Float[Array, "C C"]
    deviation: Float[Array, "C C"]
    past_deviation: Float[Array, "C 1"]
    mean: Float[Array, "C 1"]


def forward_kernel(
    tokens: int,
    centered: bool,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    numbers: Float[Array, "2 C"],
    vectors: Float[Array, "2 K"],
    cov: Float[Array, "K K"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Reads with the chunk's queries, then adds its keys. numbers: lambda, log_decay; vectors: mean, count."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    past = _past(vectors, cov, k, centered)
    decays = _decays(numbers[1:], chunk, tokens)
    read = _read(dot, q, k - past.origin, _weights(decays, past), cov, centered)
    out = q - pallas_chunk.column(numbers[:1]) * read.out
    return (out, vectors, cov), _after(dot, k, decays, past, centered)


def backward_kernel(
    tokens: int,
    centered: bool,
    has_decay: bool,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    numbers: Float[Array, "2 C"],
    d_clean: Float[Array, "C K"],
    past_vectors: Float[Array, "2 K"],
    past_cov: Float[Array, "K K"],
    vectors: Float[Array, "3 K"],
    square: Float[Array, "K K"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Gradients of a chunk, and of the statistics before it.

    Those of the statistics after it are constant + linear.k + k^T square k of a key k relative to an origin.
    vectors: linear, constant, origin.
    """
    q, k, d_clean = (x.astype(jnp.float32) for x in (q, k, d_clean))
    past = _past(past_vectors, past_cov, k, centered)
    decays = _decays(numbers[1:], chunk, tokens)
    weights = _weights(decays, past)
    keys, lam = k - past.origin, pallas_chunk.column(numbers[:1])
    d_read = -lam * d_clean
    # The gradient of the count is a sum of what nearly cancels: it shows how this read is rounded.
    of_q = _read(dot.fine, q, keys, weights, past.cov, centered)
    of_d = _read(dot, d_read, keys, weights, past.cov, centered)
    product = row_dot(d_read, of_q.out)

    constant, linear = _moved(vectors, square, past.origin)
    at_keys = linear + dot(keys, square)
    d_k = decays.end * (at_keys + dot.nt(keys, square))
    d_k += dot.tn(of_q.coefficients, d_read) + dot.tn(of_d.coefficients, q)
    d_lam = -row_dot(d_clean, of_q.out)
    d_log_decay = jnp.zeros_like(numbers[1:])
    if has_decay:
        of_past = row_dot(d_read, dot.nt(q, past.cov)) + of_q.past_deviation * of_d.past_deviation
        at_past = constant + row_dot(linear, past.mean - past.origin)
        at_past += jnp.sum(row_dot(square, past.cov), axis=0, keepdims=True)
        d_log_decay = pallas_chunk.log_decay_gradient(
            weights.past * (of_past - product),
            decays.end * (constant + row_dot(at_keys, keys)),
            decays.whole * past.count * at_past,
            weights.pairs * (of_q.deviation * of_d.deviation - product),
        )

    weight = decays.start / weights.count
    constant = decays.whole * constant + _total(weight * (of_q.mean * of_d.mean - product))
    linear = decays.whole * linear - _total(weight * (of_q.mean * d_read + of_d.mean * q))
    # Where keys crowd, the gradient of the count is what little is left of it about another origin.
    square = decays.whole * square + dot.fine.tn(weight * d_read, q)
    rows = linear, jnp.broadcast_to(constant, linear.shape), past.origin
    d_numbers = jnp.concatenate([pallas_chunk.row(d_lam), d_log_decay], axis=0)
    return (d_clean + of_d.out, d_k, d_numbers), (jnp.concatenate(rows, axis=0), square)


def _past(vectors: Array, cov: Array, k: Array, centered: bool) -> Past:
    mean, count = vectors[:1], vectors[1:, :1]
    origin = jnp.where(count > 0, mean, k[:1]) if centered else jnp.zeros_like(mean)
    return Past(count, mean, cov, origin)


def _decays(log_decay: Float[Array, "1 C"], index: Any, tokens: int) -> Decays:
    """Decays of chunk `index`; a key after the last of the sequence's tokens weighs nothing."""
    decays = pallas_chunk.scalar_decays(log_decay)
    size = log_decay.shape[1]
    is_row, is_column = (iota(shape, shape.index(size)) for shape in ((1, size), (size, 1)))
    row, column = (jnp.where(index * size + i < tokens, 1.0, 0.0) for i in (is_row, is_column))
    return decays._replace(end=decays.end * column, pairs=decays.pairs * row)


def _weights(decays: Decays, past: Past) -> Weights:
    old = decays.start * past.count
    count = old + jnp.sum(decays.pairs, axis=1, keepdims=True)
    return Weights(decays.pairs / count, old / count, count)


def _read(dot: Dot, x: Array, keys: Array, weights: Weights, cov: Array, centered: bool) -> Read:
    """Sigma_t x_t of every token, with keys relative to the origin; row t takes key t for its own origin."""
    scores = dot.nt(x, keys)
    if centered:
        own_score = row_dot(x, keys)
        below = tril(weights.pairs, -1)
        relative = scores - own_score
        mean = row_dot(below, relative) - weights.past * own_score
        deviation = relative - mean
        past_deviation = -(own_score + mean)
        coefficients = below * deviation
        # A row's coefficients sum to 0.
        rest = jnp.sum(coefficients, axis=1, keepdims=True) + weights.past * past_deviation
        coefficients -= diagonal(rest)
        mean += own_score
    else:
        deviation, coefficients = scores, weights.pairs * scores
        past_deviation = mean = jnp.zeros_like(weights.past)
    out = weights.past * dot(x, cov) + dot(coefficients, keys)
    return Read(out, coefficients, deviation, past_deviation, mean)


def _after(dot: Dot, k: Array, decays: Decays, past: Past, centered: bool) -> tuple[Array, Array]:
    """The statistics after a chunk: those of its own keys, about their mean, joined to those before."""
    own = jnp.sum(decays.end, axis=0, keepdims=True)
    weight = decays.end / own
    own_mean = _total(weight * k)
    keys = k - own_mean if centered else k
    old = decays.whole * past.count
    count = old + own
    keep, share = old / count, own / count
    between = own_mean - past.mean
    mean = past.mean + share * between
    cov = keep * past.cov + share * dot.tn(weight * keys, keys)
    if centered:
        cov += keep * share * pallas_chunk.outer(between)
    return jnp.concatenate([mean, jnp.broadcast_to(count, mean.shape)], axis=0), cov


def _moved(vectors: Array, square: Array, origin: Array) -> tuple[Array, Array]:
    """(constant, linear) about another origin."""
    linear, constant, by = vectors[:1], vectors[1:2, :1], origin - vectors[2:]
    by_eight = jnp.broadcast_to(by, (8, by.shape[1]))
    half, other = exact(by_eight, square)[:1], exact.nt(by_eight, square)[:1]
    return constant + row_dot(linear + half, by), linear + half + other


def _total(x: Float[Array, "C D"]) -> Float[Array, "1 D"]:
    return jnp.sum(x, axis=0, keepdims=True)
