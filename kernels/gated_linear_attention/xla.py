"""Chunks of tokens in parallel, in plain JAX.

With in_i, out_j and P_ij the decays, per channel, from the chunk's start to i, from j to its end, and
from j to i:

    O = scale (diag(in) Q S + A V),   A_ij = sum_k P_ij q_i k_j for i >= j
    S' = in_C S + (out * K)^T V

Only S goes from chunk to chunk, and its gradient back. The backward keeps S and recomputes the rest.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk
from kernels.gated_linear_attention import channels
from kernels.gated_linear_attention.channels import Keys, Scores


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"] | Float[Array, "B T H 1"] | None,
    initial_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Any]:
    """Outputs, final state and residuals; see `kernels.gated_linear_attention`."""
    inputs = (q, k, v, log_decay)
    length, tokens_in_group = chunk.lengths(q.shape, (q.shape[3], v.shape[3]), chunk_size)
    dot = chunk.Dot(q.dtype)

    def group(state, tokens, _):
        keys, values = _chunks(*tokens, length)
        scores = _scores(dot, keys)
        state, states = jax.lax.scan(
            lambda state, x: (x[0] * state + x[1], state),
            state,
            (scores.whole, dot.tn(scores.end, values)),
        )
        out = scale * (dot(scores.start, states) + dot(scores.pairs, values))
        return state, (chunk.join(out, v.dtype), states)

    state, (out, states) = chunk.over_groups(
        group, initial_state, inputs, tokens_in_group=tokens_in_group
    )
    return out, state, (inputs, states)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Array | None, ...]:
    """Gradients of (q, k, v, log_decay, initial_state)."""
    inputs, states = residuals
    q, _, v, _ = inputs
    length, tokens_in_group = chunk.lengths(q.shape, (q.shape[3], v.shape[3]), chunk_size)
    dot = chunk.Dot(q.dtype)

    def group(d_state, tokens, states):
        inputs, d_out = tokens
        d_out = scale * chunk.split(d_out, length)
        keys, values = _chunks(*inputs, length)
        scores = _scores(dot, keys)
        d_state, d_states = jax.lax.scan(
            lambda d_state, x: (x[0] * d_state + x[1], d_state),
            d_state,
            (scores.whole, dot.tn(scores.start, d_out)),
            reverse=True,
        )
        d_scores = Scores(
            start=dot.nt(d_out, states),
            end=dot.nt(values, d_states),
            whole=chunk.row_dot(states, d_states),
            pairs=jnp.tril(dot.nt(d_out, values)),
        )
        d_values = dot.tn(scores.pairs, d_out) + dot(scores.end, d_states)
        d_keys = _keys_gradients(dot, keys, d_scores)
        gradients = d_keys.q, d_keys.k, d_values, d_keys.log_decay
        return d_state, (
            jax.tree.map(lambda x, y: chunk.join(x, y.dtype), gradients, inputs),
            None,
        )

    d_initial, (gradients, _) = chunk.over_groups(
        group,
        d_state,
        (inputs, d_out),
        states,
        tokens_in_group=tokens_in_group,
        reverse=True,
    )
    return *gradients, d_initial


def _chunks(
    q: Array, k: Array, v: Array, log_decay: Array | None, length: int
) -> tuple[Keys, Float[Array, "N B H C V"]]:
    keys = jax.tree.map(lambda x: chunk.split(x, length), Keys(q, k, log_decay))
    return keys, chunk.split(v, length)


def _scores(dot: chunk.Dot, keys: Keys) -> Scores:
    if keys.log_decay is not None and keys.log_decay.shape[-1] > 1:
        return channels.scores(dot, keys.q, keys.k, keys.log_decay)
    decays = _head_decays(keys)
    pairs = decays.pairs * dot.nt(keys.q, keys.k)
    whole = jnp.broadcast_to(decays.whole, (*keys.q.shape[:-2], keys.q.shape[-1], 1))
    return Scores(keys.q * decays.start, keys.k * decays.end, whole, pairs)


def _keys_gradients(dot: chunk.Dot, keys: Keys, d: Scores) -> Keys:
    """Gradients of queries, keys and log_decay, given those of the scores."""
    if keys.log_decay is not None and keys.log_decay.shape[-1] > 1:
        return channels.gradients(dot, keys.q, keys.k, keys.log_decay, d)
    decays = _head_decays(keys)
    d_pairs = decays.pairs * d.pairs
    d_q = decays.start * d.start + dot(d_pairs, keys.k)
    d_k = decays.end * d.end + dot.tn(d_pairs, keys.q)
    if keys.log_decay is None:
        return Keys(d_q, d_k, None)
    start = decays.start * chunk.row_dot(keys.q, d.start)
    end = decays.end * chunk.row_dot(keys.k, d.end)
    whole = decays.whole * d.whole.sum(-2, keepdims=True)
    pairs = d_pairs * dot.nt(keys.q, keys.k)
    return Keys(d_q, d_k, chunk.log_decay_gradient(start, end, whole, pairs)[..., None])


def _head_decays(keys: Keys) -> chunk.Decays:
    if keys.log_decay is None:
        return chunk.no_decays(keys.q.shape[-2])
    return chunk.scalar_decays(keys.log_decay[..., 0])
