"""Chunks of tokens in parallel, in plain JAX. Every product below is a matrix product of a chunk.

With in_i, out_j and P_ij the decays from the chunk's start to i, from j to its end, and from j to i:

    u = (I + L)^-1 diag(beta) (V - diag(in) K S),   L_ij = beta_i P_ij k_i.k_j for i > j
    O = scale (diag(in) Q S + (P * Q K^T) u)
    S' = in_C S + K^T diag(out) u

Only S goes from chunk to chunk, and its gradient back. The backward keeps S and the inverse, which is the
size of the keys, and recomputes the rest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk


class Chunks(NamedTuple):
    """The inputs by chunk, in float32; G = HV / H value heads share a key head."""

    q: Float[Array, "N B H 1 C K"]
    k: Float[Array, "N B H 1 C K"]
    v: Float[Array, "N B H G C V"]
    log_decay: Float[Array, "N B H G C"]
    beta: Float[Array, "N B H G C 1"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    log_decay: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"], Any]:
    """Outputs, final state and residuals; see `kernels.gated_delta_rule`."""
    inputs = (q, k, v, log_decay, beta)
    length, tokens_in_group = chunk.lengths(v.shape, (q.shape[3], v.shape[3]), chunk_size)
    dot = chunk.Dot(q.dtype)

    def step(state, x):
        read, write, k_end, whole = x
        u = write - dot(read, state)
        return whole * state + dot.tn(k_end, u), (state, u)

    def group(state, tokens, _):
        x = _chunks(*tokens, length)
        decays = chunk.scalar_decays(x.log_decay)
        lower = x.beta * jnp.tril(dot.nt(x.k, x.k) * decays.pairs, -1)
        inverse = inverse_of_unit_lower(lower)
        write = dot(inverse, x.beta * x.v)
        xs = _reads(dot, x, decays, inverse), write, x.k * decays.end, decays.whole
        state, (states, u) = jax.lax.scan(step, state, xs)
        out = dot(x.q * decays.start, states) + dot(dot.nt(x.q, x.k) * decays.pairs, u)
        return state, (
            chunk.join(_merge_heads(scale * out), v.dtype),
            (states, inverse),
        )

    state, (out, kept) = chunk.over_groups(
        group, _split_state(initial_state, q), inputs, tokens_in_group=tokens_in_group
    )
    return out, state.reshape(initial_state.shape), (inputs, kept)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T HV V"],
    d_state: Float[Array, "B HV K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Array, ...]:
    """Gradients of (q, k, v, log_decay, beta, initial_state)."""
    inputs, kept = residuals
    q, _, v, *_ = inputs
    length, tokens_in_group = chunk.lengths(v.shape, (q.shape[3], v.shape[3]), chunk_size)
    dot = chunk.Dot(q.dtype)

    def step(d_state, x):
        read, k_end, whole, d_u_inside, d_state_inside = x
        d_u = d_u_inside + dot(k_end, d_state)
        return whole * d_state + d_state_inside - dot.tn(read, d_u), (d_state, d_u)

    def group(d_state, tokens, kept):
        inputs, d_out = tokens
        states, inverse = kept
        x = _chunks(*inputs, length)
        decays = chunk.scalar_decays(x.log_decay)
        d_out = scale * _split_heads(chunk.split(d_out, length), q.shape[2])
        scores = dot.nt(x.q, x.k)
        d_u_inside = dot.tn(scores * decays.pairs, d_out)
        d_state_inside = dot.tn(x.q * decays.start, d_out)
        read = _reads(dot, x, decays, inverse)
        xs = read, x.k * decays.end, decays.whole, d_u_inside, d_state_inside
        d_state, (d_states, d_u) = jax.lax.scan(step, d_state, xs, reverse=True)
        gradients = _inner_gradients(dot, x, decays, inverse, scores, states, d_out, d_u, d_states)
        gradients = tuple(
            chunk.join(_merge_heads(gradient), given.dtype)
            for gradient, given in zip(gradients, inputs, strict=True)
        )
        return d_state, (gradients, None)

    d_initial, (gradients, _) = chunk.over_groups(
        group,
        _split_state(d_state, q),
        (inputs, d_out),
        kept,
        tokens_in_group=tokens_in_group,
        reverse=True,
    )
    return *gradients, d_initial.reshape(d_state.shape)


def _inner_gradients(
    dot: chunk.Dot,
    x: Chunks,
    decays: chunk.Decays,
    inverse: Array,
    scores: Array,
    states: Array,
    d_out: Array,
    d_u: Array,
    d_states: Array,
) -> tuple[Array, ...]:
    """Gradients of `Chunks`, given those of each chunk's output, writes and final state."""
    keys = dot.nt(x.k, x.k)
    error = x.v - decays.start * dot(x.k, states)
    u = dot(inverse, x.beta * error)
    d_write = dot.tn(inverse, d_u)
    d_read = -x.beta * dot.nt(d_write, states)
    d_query = dot.nt(d_out, states)
    d_key = dot.nt(u, d_states)

    # Of the scores P * Q K^T, and of L, with the decays and beta still on them.
    d_scores = dot.nt(d_out, u) * decays.pairs
    d_lower = -jnp.tril(dot.nt(d_write, u), -1) * decays.pairs
    d_keys = x.beta * d_lower
    d_q = decays.start * d_query + dot(d_scores, x.k)
    d_k = decays.start * d_read + decays.end * d_key
    d_k = d_k + dot.tn(d_scores, x.q) + dot(d_keys + jnp.swapaxes(d_keys, -1, -2), x.k)
    row_dot = chunk.row_dot
    d_beta = row_dot(d_write, error) + row_dot(d_lower, keys)

    start = decays.start * (row_dot(x.q, d_query) + row_dot(x.k, d_read))
    through = decays.whole * row_dot(states, d_states).sum(-2, keepdims=True)
    end = decays.end * row_dot(x.k, d_key)
    pairs = d_scores * scores + d_keys * keys
    d_log_decay = chunk.log_decay_gradient(start, end, through, pairs)
    d_q, d_k = (y.sum(3, keepdims=True) for y in (d_q, d_k))
    return d_q, d_k, x.beta * d_write, d_log_decay, d_beta[..., 0]


def _chunks(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, length: int) -> Chunks:
    def split(x: Array) -> Array:
        return _split_heads(chunk.split(x, length), q.shape[2])

    return Chunks(split(q), split(k), split(v), split(log_decay), split(beta)[..., None])


def _split_state(x: Float[Array, "B HV K V"], q: Array) -> Float[Array, "B H G K V"]:
    return x.reshape(x.shape[0], q.shape[2], -1, *x.shape[2:])


def _split_heads(x: Float[Array, "N B HV *C"], key_heads: int) -> Float[Array, "N B H G *C"]:
    return x.reshape(*x.shape[:2], key_heads, -1, *x.shape[3:])


def _merge_heads(x: Float[Array, "N B H G *C"]) -> Float[Array, "N B HV *C"]:
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _reads(dot: chunk.Dot, x: Chunks, decays: chunk.Decays, inverse: Array) -> Array:
    """(I + L)^-1 diag(beta) diag(in) K, through which the writes u read the state."""
    return dot(inverse, x.beta * decays.start * x.k)


def inverse_of_unit_lower(lower: Float[Array, "*N C C"]) -> Float[Array, "*N C C"]:
    """(I + lower)^-1 of strictly lower triangular matrices, C a power of two, in log2(C) steps.

    Each joins the inverses of pairs of diagonal blocks: [[A, 0], [-B M A, B]]. Unlike a product of
    powers of `lower`, no intermediate is larger than the result, also where keys are nearly parallel.
    """
    size = lower.shape[-1]
    inverse = jnp.ones((*lower.shape[:-1], 1, 1), jnp.float32)
    while inverse.shape[-1] < size:
        length = inverse.shape[-1]
        below = jnp.stack(
            [
                lower[..., i + length : i + 2 * length, i : i + length]
                for i in range(0, size, 2 * length)
            ],
            -3,
        )
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = chunk.join_blocks(inverse, -chunk.exact(second, chunk.exact(below, first)))
    return inverse[..., 0, :, :]
