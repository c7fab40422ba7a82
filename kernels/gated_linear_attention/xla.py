"""Chunks of tokens in parallel, in plain JAX.

With in_i, out_j and P_ij the decays, per channel, from the chunk's start to i, from j to its end, and
from j to i:

    O = scale (diag(in) Q S + A V),   A_ij = sum_k P_ij q_i k_j for i >= j
    S' = in_C S + (out * K)^T V

Only S goes from chunk to chunk, and its gradient back. The backward keeps S and recomputes the rest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk


class Scores(NamedTuple):
    """All that depends on queries, keys and decays of a chunk, and on nothing else."""

    start: Float[Array, "N B H C K"]  # queries, decayed from the chunk's start
    end: Float[Array, "N B H C K"]  # keys, decayed to the chunk's end
    whole: Float[Array, "N B H K 1"]  # the decay of the whole chunk
    pairs: Float[Array, "N B H C C"]


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
    *keys, values = _chunks(*inputs, chunk_size)
    dot = chunk.Dot(q.dtype)
    scores = _scores(dot, *keys)

    def step(state, chunk_inputs):
        whole, written = chunk_inputs
        return whole * state + written, state

    state, states = jax.lax.scan(step, initial_state, (scores.whole, dot.tn(scores.end, values)))
    out = scale * (dot(scores.start, states) + dot(scores.pairs, values))
    return chunk.join(out, v), state, (inputs, states)


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
    *keys, values = _chunks(*inputs, chunk_size)
    dot = chunk.Dot(inputs[0].dtype)
    scores, pull_back = jax.vjp(lambda *keys: _scores(dot, *keys), *keys)
    d_out = scale * chunk.split(d_out, values.shape[-2])

    def step(d_state, chunk_inputs):
        whole, read = chunk_inputs
        return whole * d_state + read, d_state

    d_initial, d_states = jax.lax.scan(
        step, d_state, (scores.whole, dot.tn(scores.start, d_out)), reverse=True
    )
    d_scores = Scores(
        start=dot.nt(d_out, states),
        end=dot.nt(values, d_states),
        whole=(states * d_states).sum(-1, keepdims=True),
        pairs=jnp.tril(dot.nt(d_out, values)),
    )
    d_values = dot.tn(scores.pairs, d_out) + dot(scores.end, d_states)
    d_q, d_k, d_log_decay = pull_back(d_scores)
    gradients = (d_q, d_k, d_values, d_log_decay)
    q, k, v, log_decay = inputs
    return (
        chunk.join(d_q, q),
        chunk.join(d_k, k),
        chunk.join(d_values, v),
        None if log_decay is None else chunk.join(d_log_decay, log_decay),
        d_initial,
    )


def _chunks(q: Array, k: Array, v: Array, log_decay: Array | None, chunk_size: int | None) -> Any:
    length = chunk.length_for(q.shape[1], chunk_size)
    q, k, v, log_decay = jax.tree.map(lambda x: chunk.split(x, length), (q, k, v, log_decay))
    return q, k, log_decay, v


def _scores(dot: chunk.Dot, q: Array, k: Array, log_decay: Array | None) -> Scores:
    if log_decay is not None and log_decay.shape[-1] > 1:
        return _channel_scores(dot, q, k, log_decay)
    width = (*q.shape[:-2], q.shape[-1], 1)
    if log_decay is None:
        whole = jax.lax.full_like(q, 1, shape=width)
        return Scores(q, k, whole, jnp.tril(dot.nt(q, k)))
    decays = chunk.scalar_decays(log_decay[..., 0])
    whole = jnp.broadcast_to(decays.whole, width)
    return Scores(q * decays.start, k * decays.end, whole, decays.pairs * dot.nt(q, k))


def _channel_scores(
    dot: chunk.Dot,
    q: Float[Array, "N B H C K"],
    k: Float[Array, "N B H C K"],
    log_decay: Float[Array, "N B H C K"],
) -> Scores:
    """Scores of blocks of 1, 2, 4, ... tokens, each from its two halves and what the second reads of the first.

    A query is decayed from the middle to its token, and a key from its token to the middle, so both
    factors are at most 1, at any decay.
    """
    levels = chunk.blocks(jnp.exp(log_decay))
    pairs = (q * k).sum(-1)[..., None, None]
    q_blocks, k_blocks = q[..., None, :], k[..., None, :]
    for block in levels[:-1]:
        shape = block.head.shape
        _, queries = chunk.halves(q.reshape(shape) * block.head)
        keys, _ = chunk.halves(k.reshape(shape) * block.tail)
        pairs = chunk.join_halves(*chunk.halves(pairs), dot.nt(queries, keys))
    head, tail = (x[..., 0, :, :] for x in levels[-1])
    whole = jnp.swapaxes(head[..., -1:, :], -1, -2)
    return Scores(q * head, k * tail, whole, pairs[..., 0, :, :])
