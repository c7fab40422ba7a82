"""Chunks on a TPU, one after the other, with the state in vector memory. The mathematics is that of `xla.py`.

The state is kept transposed, [V, K], so that a decay of each key channel is a row. The forward leaves the
state before each chunk; the backward walks from the last chunk to the first with the state's gradient in
vector memory, and recomputes all else.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import pallas_util
from kernels.gated_linear_attention import pallas_scores
from kernels.gated_linear_attention.pallas_scores import Scores
from kernels.pallas_chunk import Dot, tril
from kernels.pallas_util import unavailable
from kernels.pallas_walk import Walk

CHUNK = 128

__all__ = ["backward", "forward", "primal", "unavailable"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"] | Float[Array, "B T H 1"] | None,
    initial_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None,
    keep: bool = True,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Any]:
    """Outputs, final state and, with `keep`, residuals; see `kernels.gated_linear_attention`."""
    walk = _walk(v, chunk_size)
    keys, values = (pallas_util.width(x.shape[3]) for x in (k, v))
    heads = walk.batch, walk.heads
    inputs = _inputs(walk, q, k, v, log_decay)
    blocks, size = inputs[2][0], walk.length
    states = ((*heads, walk.chunks, values, keys), jnp.float32, walk.each(values, keys))
    (out, *kept), (final,) = walk(
        functools.partial(_forward_kernel, scale, Dot(blocks.dtype)),
        inputs,
        [(blocks.shape, blocks.dtype, walk.tokens(values)), *[states] * keep],
        [_transposed(initial_state, (values, keys))],
        name="gated_linear_attention_forward",
        flops=_flops(size, keys, values),
        exps=size * (keys if _by_channel(log_decay) else size),
    )
    out = pallas_util.from_token_blocks(out, v.shape, v.dtype)
    final = pallas_util.cut(final.swapaxes(2, 3), initial_state.shape)
    return out, final, (q, k, v, log_decay, *kept) if keep else None


primal = functools.partial(forward, keep=False)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T H V"],
    d_state: Float[Array, "B H K V"],
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Array | None, ...]:
    """Gradients of (q, k, v, log_decay, initial_state)."""
    q, k, v, log_decay, states = residuals
    walk = _walk(v, chunk_size).backwards()
    values, keys = states.shape[3:]
    inputs = _inputs(walk, q, k, v, log_decay)
    d_inputs = [(x.shape, x.dtype, block) for x, block in inputs]
    gradients, (first,) = walk(
        functools.partial(_backward_kernel, scale, Dot(inputs[2][0].dtype)),
        [
            *inputs,
            (pallas_util.token_blocks(d_out, walk.length), walk.tokens(values)),
            (states, walk.each(values, keys)),
        ],
        d_inputs,
        [_transposed(d_state, (values, keys))],
        name="gated_linear_attention_backward",
        flops=3 * _flops(walk.length, keys, values),
        exps=walk.length * (keys if _by_channel(log_decay) else walk.length),
    )
    d_q, d_k, d_v = (
        pallas_util.from_token_blocks(gradient, x.shape, x.dtype)
        for gradient, x in zip(gradients, (q, k, v), strict=False)
    )
    d_log_decay = _d_log_decay(gradients[3], log_decay)
    return d_q, d_k, d_v, d_log_decay, pallas_util.cut(first.swapaxes(2, 3), d_state.shape)


def _walk(v: Float[Array, "B T H V"], chunk_size: int | None) -> Walk:
    batch, tokens, heads, _ = v.shape
    length = pallas_util.chunk_length(tokens, chunk_size, CHUNK)
    return Walk(batch, heads, -(-tokens // length), length)


def _by_channel(log_decay: Array | None) -> bool:
    return log_decay is not None and log_decay.shape[3] > 1


def _inputs(walk: Walk, q: Array, k: Array, v: Array, log_decay: Array | None) -> list[Any]:
    """The inputs of both kernels and their blocks; decays by channel as tokens, by head as rows."""
    keys, values = (pallas_util.width(x.shape[3]) for x in (k, v))
    blocks = [pallas_util.token_blocks(x, walk.length) for x in (q, k, v)]
    inputs = [*zip(blocks, [walk.tokens(x) for x in (keys, keys, values)], strict=True)]
    if log_decay is not None and _by_channel(log_decay):
        decays = pallas_util.token_blocks(log_decay.astype(jnp.float32), walk.length)
        return [*inputs, (decays, walk.tokens(keys))]
    log_decay = jnp.zeros_like(q[..., :1]) if log_decay is None else log_decay
    return [*inputs, (pallas_util.rows(walk.length, log_decay[..., 0]), walk.rows(1))]


def _d_log_decay(gradient: Array, log_decay: Array | None) -> Array | None:
    if log_decay is None:
        return None
    if _by_channel(log_decay):
        return pallas_util.from_token_blocks(gradient, log_decay.shape, log_decay.dtype)
    (by_head,) = pallas_util.from_rows(gradient, log_decay.shape[1])
    return by_head[..., None].astype(log_decay.dtype)


def _transposed(state: Float[Array, "B H K V"], shape: tuple[int, int]) -> Array:
    return pallas_util.fill(state.swapaxes(2, 3), (*state.shape[:2], *shape))


def _flops(size: int, keys: int, values: int) -> int:
    """Of the forward on one chunk; float32 products count once."""
    return 2 * size * size * (3 * keys + values) + 4 * size * keys * values


def _forward_kernel(
    scale: float,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    v: Float[Array, "C V"],
    log_decay: Float[Array, "C K"] | Float[Array, "1 C"],
    state: Float[Array, "V K"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    del chunk
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = pallas_scores.scores(dot, q, k, log_decay)
    out = scale * (dot.nt(scores.start, state) + dot(scores.pairs, v))
    return (out, state), (scores.whole * state + dot.tn(v, scores.end),)


def _backward_kernel(
    scale: float,
    dot: Dot,
    chunk: Array,
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    v: Float[Array, "C V"],
    log_decay: Float[Array, "C K"] | Float[Array, "1 C"],
    d_out: Float[Array, "C V"],
    state: Float[Array, "V K"],
    d_state: Float[Array, "V K"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    del chunk
    q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    scores = pallas_scores.scores(dot, q, k, log_decay)
    d_scores = Scores(
        start=scale * dot(d_out, state),
        end=dot(v, d_state),
        whole=jnp.sum(state * d_state, axis=0, keepdims=True),
        pairs=tril(scale * dot.nt(d_out, v)),
    )
    d_v = dot.tn(scale * scores.pairs, d_out) + dot.nt(scores.end, d_state)
    before = scores.whole * d_state + dot.tn(d_out, scale * scores.start)
    d_q, d_k, d_log_decay = pallas_scores.gradients(dot, q, k, log_decay, d_scores)
    return (d_q, d_k, d_v, d_log_decay), (before,)
