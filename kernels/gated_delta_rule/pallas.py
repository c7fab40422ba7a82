"""Chunks on a TPU, one after the other, with the state in vector memory. The mathematics is that of `xla.py`.

As the state is at hand, what a chunk writes is one product, u = (I + L)^-1 diag(beta) (V - diag(in) K S). The
forward leaves the state before each chunk; the backward walks from the last chunk to the first with the
state's gradient in vector memory, and recomputes all else.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import pallas_chunk, pallas_util
from kernels.pallas_chunk import Decays, Dot, row_dot, tril
from kernels.pallas_util import unavailable
from kernels.pallas_walk import Walk

CHUNK = 128

__all__ = ["backward", "forward", "primal", "unavailable"]


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
    keep: bool = True,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"], Any]:
    """Outputs, final state and, with `keep`, residuals; see `kernels.gated_delta_rule`."""
    walk = _walk(q, v, chunk_size)
    keys, values = (pallas_util.width(x) for x in initial_state.shape[2:])
    heads = walk.batch, walk.heads
    inputs = _inputs(walk, q, k, v, log_decay, beta)
    blocks, size = inputs[2][0], walk.length
    states = ((*heads, walk.chunks, keys, values), jnp.float32, walk.each(keys, values))
    (out, *kept), (final,) = walk(
        functools.partial(_forward_kernel, scale, Dot(blocks.dtype)),
        inputs,
        [(blocks.shape, blocks.dtype, walk.tokens(values)), *[states] * keep],
        [pallas_util.fill(initial_state, (*heads, keys, values))],
        name="gated_delta_rule_forward",
        flops=_flops(size, keys, values),
        exps=size * size,
    )
    out = pallas_util.from_token_blocks(out, v.shape, v.dtype)
    final = pallas_util.cut(final, initial_state.shape)
    return out, final, (q, k, v, log_decay, beta, *kept) if keep else None


primal = functools.partial(forward, keep=False)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T HV V"],
    d_state: Float[Array, "B HV K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Array, ...]:
    """Gradients of (q, k, v, log_decay, beta, initial_state)."""
    q, k, v, log_decay, beta, states = residuals
    walk = _walk(q, v, chunk_size).backwards()
    keys, values = states.shape[3:]
    inputs = _inputs(walk, q, k, v, log_decay, beta)
    blocks, numbers, size = inputs[2][0], inputs[3][0], walk.length
    # Each value head's own part of the gradients of the keys, whole where heads share them.
    of_keys = (*blocks.shape[:2], walk.heads * keys)
    exact_keys = blocks.dtype if walk.group == 1 else jnp.float32
    (d_q, d_k, d_v, d_numbers), (first,) = walk(
        functools.partial(_backward_kernel, scale, Dot(blocks.dtype)),
        [
            *inputs,
            (pallas_util.token_blocks(d_out, size), walk.tokens(values)),
            (states, walk.each(keys, values)),
        ],
        [
            (of_keys, exact_keys, walk.tokens(keys)),
            (of_keys, exact_keys, walk.tokens(keys)),
            (blocks.shape, blocks.dtype, walk.tokens(values)),
            (numbers.shape, jnp.float32, walk.rows(2)),
        ],
        [pallas_util.fill(d_state, (walk.batch, walk.heads, keys, values))],
        name="gated_delta_rule_backward",
        flops=3 * _flops(size, keys, values),
        exps=size * size,
    )
    d_log_decay, d_beta = pallas_util.from_rows(d_numbers, v.shape[1])
    return (
        _sum_of_groups(d_q, q, walk.heads),
        _sum_of_groups(d_k, k, walk.heads),
        pallas_util.from_token_blocks(d_v, v.shape, v.dtype),
        d_log_decay.astype(log_decay.dtype),
        d_beta.astype(beta.dtype),
        pallas_util.cut(first, d_state.shape),
    )


def _walk(q: Array, v: Float[Array, "B T HV V"], chunk_size: int | None) -> Walk:
    batch, tokens, heads, _ = v.shape
    length = pallas_util.chunk_length(tokens, chunk_size, CHUNK)
    return Walk(batch, heads, -(-tokens // length), length, group=heads // q.shape[2])


def _inputs(walk: Walk, q: Array, k: Array, v: Array, log_decay: Array, beta: Array) -> list[Any]:
    """The inputs of both kernels, and their blocks."""
    keys, values = (pallas_util.width(x.shape[3]) for x in (k, v))
    blocks = [pallas_util.token_blocks(x, walk.length) for x in (q, k, v)]
    specs = [walk.keys(keys), walk.keys(keys), walk.tokens(values)]
    numbers = pallas_util.rows(walk.length, log_decay, beta)
    return [*zip(blocks, specs, strict=True), (numbers, walk.rows(2))]


def _sum_of_groups(x: Float[Array, "B T HVK"], like: Float[Array, "B T H K"], heads: int) -> Array:
    """Gradients of keys from those of each value head."""
    batch, tokens, key_heads, keys = like.shape
    x = pallas_util.from_token_blocks(x, (batch, tokens, heads, keys), x.dtype)
    if heads > key_heads:
        x = x.reshape(batch, tokens, key_heads, -1, keys).sum(3)
    return x.astype(like.dtype)


def _flops(size: int, keys: int, values: int) -> int:
    """Of the forward on one chunk; float32 products count once."""
    inverse = 4 * size**3 * max(size // pallas_chunk.BLOCK, 1).bit_length()
    return 4 * size * size * (keys + values) + 6 * size * keys * values + inverse


class Chunk(NamedTuple):
    """What both directions compute of a chunk; u = write + (inverse - I) write."""

    beta: Float[Array, "C 1"]
    decays: Decays
    keys: Float[Array, "C C"]  # k_i.k_j
    inverse: Float[Array, "C C"]  # (I + L)^-1 - I
    error: Float[Array, "C V"]  # V - diag(in) K S
    u: Float[Array, "C V"]


def _chunk(dot: Dot, k: Array, v: Array, numbers: Float[Array, "2 C"], state: Array) -> Chunk:
    decays = pallas_chunk.scalar_decays(numbers[:1])
    beta = pallas_chunk.column(numbers[1:])
    keys = dot.nt(k, k)
    inverse = pallas_chunk.inverse_of_unit_lower(beta * tril(keys * decays.pairs, -1))
    error = v - decays.start * dot(k, state)
    write = beta * error
    # Without its unit diagonal the inverse may be rounded: what it adds to is not.
    return Chunk(beta, decays, keys, inverse, error, write + dot.fine(inverse, write))


def _forward_kernel(
    scale: float,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    v: Float[Array, "C V"],
    numbers: Float[Array, "2 C"],
    state: Float[Array, "K V"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    del chunk
    x = _chunk(dot, k, v.astype(jnp.float32), numbers, state)
    scores = dot.nt(q, k) * x.decays.pairs
    out = scale * (x.decays.start * dot(q, state) + dot.fine(scores, x.u))
    after = x.decays.whole * state + dot.fine.tn(k, x.decays.end * x.u)
    return (out, state), (after,)


def _backward_kernel(
    scale: float,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    v: Float[Array, "C V"],
    numbers: Float[Array, "2 C"],
    d_out: Float[Array, "C V"],
    state: Float[Array, "K V"],
    d_state: Float[Array, "K V"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    del chunk
    # Inputs go into products as they are, so that only one factor of each is rounded.
    q, k, v, d_out = (y.astype(jnp.float32) for y in (q, k, v, d_out))
    x = _chunk(dot, k, v, numbers, state)
    start, end, whole, pairs = x.decays

    scores = dot.nt(q, k)
    d_u = dot.tn(scale * scores * pairs, d_out) + end * dot(k, d_state)
    d_write = d_u + dot.tn(x.inverse, d_u)
    d_read = -x.beta * dot.nt(d_write, state)
    d_query = scale * dot.nt(d_out, state)
    d_key = dot.nt(x.u, d_state)
    # Of the scores P * Q K^T, and of L, with the decays and beta still on them.
    d_scores = scale * dot.nt(d_out, x.u) * pairs
    d_lower = -tril(dot.nt(d_write, x.u), -1) * pairs
    d_keys = x.beta * d_lower

    d_q = start * d_query + dot(d_scores, k)
    d_k = start * d_read + end * d_key + dot.tn(d_scores, q) + dot(d_keys, k) + dot.tn(d_keys, k)
    d_beta = row_dot(d_write, x.error) + row_dot(d_lower, x.keys)
    d_log_decay = pallas_chunk.log_decay_gradient(
        start * (row_dot(q, d_query) + row_dot(k, d_read)),
        end * row_dot(k, d_key),
        whole * jnp.sum(row_dot(state, d_state), axis=0, keepdims=True),
        d_scores * scores + d_keys * x.keys,
    )
    d_numbers = jnp.concatenate([d_log_decay, pallas_chunk.row(d_beta)], axis=0)
    before = whole * d_state + dot.tn(q, scale * start * d_out)
    before -= dot.tn(k, x.beta * start * d_write)
    return (d_q, d_k, x.beta * d_write, d_numbers), (before,)
