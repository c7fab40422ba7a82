"""Chunks of tokens in parallel, in plain JAX.

With in_i, out_j and P_ij the decays, per channel, from the chunk's start to i, from j to its end, and
from j to i:

    O = scale (diag(in) Q S + A V),   A_ij = sum_k P_ij q_i k_j for i >= j
    S' = in_C S + (out * K)^T V

Only S goes from chunk to chunk, and its gradient back. The backward keeps S and recomputes the rest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import chunk


class Keys(NamedTuple):
    """Queries, keys and decays by chunk, in float32; a decay of a head has D = 1, of a channel D = K."""

    q: Float[Array, "N B H C K"]
    k: Float[Array, "N B H C K"]
    log_decay: Float[Array, "N B H C D"] | None


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
    keys, values = _chunks(*inputs, chunk_size=chunk_size)
    dot = chunk.Dot(q.dtype)
    scores = _scores(dot, keys)

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
    keys, values = _chunks(*inputs, chunk_size=chunk_size)
    dot = chunk.Dot(inputs[0].dtype)
    scores = _scores(dot, keys)
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
        whole=chunk.row_dot(states, d_states),
        pairs=jnp.tril(dot.nt(d_out, values)),
    )
    d_values = dot.tn(scores.pairs, d_out) + dot(scores.end, d_states)
    d_keys = _keys_gradients(dot, keys, d_scores)
    q, k, v, log_decay = inputs
    return (
        chunk.join(d_keys.q, q),
        chunk.join(d_keys.k, k),
        chunk.join(d_values, v),
        None if d_keys.log_decay is None else chunk.join(d_keys.log_decay, log_decay),
        d_initial,
    )


def _chunks(
    q: Array, k: Array, v: Array, log_decay: Array | None, *, chunk_size: int | None
) -> tuple[Keys, Float[Array, "N B H C V"]]:
    length = chunk.length_for(q.shape[1], chunk_size)
    keys = jax.tree.map(lambda x: chunk.split(x, length), Keys(q, k, log_decay))
    return keys, chunk.split(v, length)


def _by_channel(keys: Keys) -> bool:
    return keys.log_decay is not None and keys.log_decay.shape[-1] > 1


def _scores(dot: chunk.Dot, keys: Keys) -> Scores:
    if _by_channel(keys):
        return _channel_scores(dot, keys)
    decays = _head_decays(keys)
    pairs = decays.pairs * dot.nt(keys.q, keys.k)
    whole = jnp.broadcast_to(decays.whole, (*keys.q.shape[:-2], keys.q.shape[-1], 1))
    return Scores(keys.q * decays.start, keys.k * decays.end, whole, pairs)


def _keys_gradients(dot: chunk.Dot, keys: Keys, d: Scores) -> Keys:
    """Gradients of queries, keys and log_decay, given those of the scores."""
    if _by_channel(keys):
        return _channel_gradients(dot, keys, d)
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


def _channel_scores(dot: chunk.Dot, keys: Keys) -> Scores:
    """Scores of blocks of 1, 2, 4, ... tokens: of the two halves, and what the second reads of the first.

    A query is decayed from the middle of its block, and a key to it, so both factors are at most 1.
    """
    q, k, log_decay = keys
    levels, whole = chunk.levels(jnp.exp(jnp.asarray(log_decay)))
    pairs = chunk.row_dot(q, k)[..., None]
    for level in levels[:-1]:
        length = pairs.shape[-1]
        _, second = chunk.halves(q * level.head, length)
        first, _ = chunk.halves(k * level.tail, length)
        pairs = chunk.join_blocks(pairs, dot.nt(second, first))
    head, tail = levels[-1]
    return Scores(q * head, k * tail, jnp.swapaxes(whole, -1, -2), pairs[..., 0, :, :])


def _channel_gradients(dot: chunk.Dot, keys: Keys, d: Scores) -> Keys:
    q, k, log_decay = keys
    decay = jnp.exp(jnp.asarray(log_decay))
    levels, whole = chunk.levels(decay)
    head, tail = levels[-1]
    d_start, d_end = head * d.start, tail * d.end
    d_q, d_k = jnp.zeros_like(q), jnp.zeros_like(k)
    for i, level in enumerate(levels[:-1]):
        length = 2**i
        _, second = chunk.halves(q * level.head, length)
        first, _ = chunk.halves(k * level.tail, length)
        # Both products keep the rows of their block's other half, as zeros, to be added without a copy.
        to_q, to_k = _cross_blocks(d.pairs, length)
        d_q += level.head * dot(to_q, first).reshape(q.shape)
        d_k += level.tail * dot.tn(to_k, second).reshape(k.shape)
    d_log_decay = _suffix_sum(q * (d_start + d_q) - k * d_k) + _prefix_sum(k * d_end)
    d_log_decay += whole * jnp.swapaxes(d.whole, -1, -2)
    own = jnp.diagonal(d.pairs, axis1=-2, axis2=-1)[..., None]
    return Keys(
        d_start + d_q + own * k,
        d_end + d_k + own * q,
        jnp.where(decay > 0, d_log_decay, 0),
    )


def _cross_blocks(
    pairs: Float[Array, "*N C C"], length: int
) -> tuple[Float[Array, "*N M 2L L"], Float[Array, "*N M L 2L"]]:
    """Of each diagonal block of two times `length`: the second half's rows and the first's columns.

    Once with all the rows, zero in the first half, and once with all the columns, zero in the second.
    """
    size = 2 * length
    blocks = jnp.stack(
        [pairs[..., i : i + size, i : i + size] for i in range(0, pairs.shape[-1], size)],
        -3,
    )
    second = jnp.arange(size) >= length
    all_rows = jnp.where(second[:, None], blocks[..., :length], 0)
    all_columns = jnp.where(second, 0, blocks[..., length:, :])
    return all_rows, all_columns


def _suffix_sum(x: Float[Array, "*N C K"]) -> Float[Array, "*N C K"]:
    """At l, the sum of x_i over i >= l."""
    return _sum_where(x, jnp.greater_equal)


def _prefix_sum(x: Float[Array, "*N C K"]) -> Float[Array, "*N C K"]:
    """At l, the sum of x_j over j < l."""
    return _sum_where(x, jnp.less)


def _sum_where(x: Array, counts: Callable[[Array, Array], Array]) -> Array:
    # A matrix product is faster than a cumulative sum, if its matrix has the batch dimensions of x.
    i = jnp.arange(x.shape[-2])
    mask = counts(i, i[:, None]).astype(x.dtype)
    mask = jnp.broadcast_to(mask, (*x.shape[:-2], *mask.shape))
    return jnp.matmul(mask, x, precision=jax.lax.Precision.HIGHEST)
