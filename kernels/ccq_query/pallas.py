"""Chunks on a TPU, one after the other, with the keys' statistics in vector memory. The mathematics is that of
`xla.py` and `xla_state.py`.

The forward leaves the statistics before each chunk; the backward walks from the last chunk to the first with
their gradient in vector memory, and recomputes all else. A matrix `vectors` holds what has one number a
channel (rows), and the count, which fills a row.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import pallas_util
from kernels.ccq_query import pallas_kernels, xla_state
from kernels.ccq_query.state import CCQState
from kernels.ccq_query.xla_state import Moments, Quadratic
from kernels.pallas_chunk import Dot
from kernels.pallas_util import unavailable
from kernels.pallas_walk import Walk

CHUNK = 128

__all__ = ["backward", "forward", "primal", "unavailable"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    initial_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None,
    keep: bool = True,
) -> tuple[Float[Array, "B T H K"], CCQState, Any]:
    """Cleaned queries, final statistics and, with `keep`, residuals; see `kernels.ccq_query`."""
    walk = _walk(q, chunk_size)
    width, heads = pallas_util.width(q.shape[3]), (walk.batch, walk.heads)
    first = xla_state.from_sums(initial_state, centered)
    vectors, cov = _packed(first.mean, first.count, first.cov)
    inputs = _inputs(walk, q, k, lam, log_decay)
    blocks = inputs[0][0]
    kernel = functools.partial(
        pallas_kernels.forward_kernel, q.shape[1], centered, Dot(blocks.dtype)
    )
    past = [
        ((*heads, walk.chunks, *size), jnp.float32, walk.each(*size))
        for size in ((2, width), (width, width))
    ]
    (out, *kept), (vectors, cov) = walk(
        kernel,
        inputs,
        [(blocks.shape, blocks.dtype, walk.tokens(width)), *past * keep],
        [vectors, cov],
        name="ccq_query_forward",
        flops=_flops(walk.length, width),
        exps=walk.length**2,
    )
    size = q.shape[3]
    last = Moments(vectors[:, :, 1:, :1], vectors[:, :, :1, :size], cov[:, :, :size, :size])
    out = pallas_util.from_token_blocks(out, q.shape, q.dtype)
    residuals = (q, k, lam, log_decay, *kept) if keep else None
    return out, xla_state.to_sums(last, centered), residuals


primal = functools.partial(forward, keep=False)


def backward(
    residuals: Any,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None,
) -> tuple[Any, ...]:
    """Gradients of (q, k, lam, log_decay, initial_state)."""
    q, k, lam, log_decay, past_vectors, past_cov = residuals
    walk = _walk(q, chunk_size).backwards()
    width = past_cov.shape[4]
    last = xla_state.gradient_of_sums(d_state)
    vectors, square = _packed(last.linear, last.constant, last.square)
    origin = jnp.zeros_like(vectors[:, :, :1])
    inputs = _inputs(walk, q, k, lam, log_decay)
    (blocks, of_tokens), (numbers, of_numbers) = inputs[0], inputs[2]
    kernel = functools.partial(
        pallas_kernels.backward_kernel,
        q.shape[1],
        centered,
        log_decay is not None,
        Dot(blocks.dtype),
    )
    (d_q, d_k, d_numbers), (vectors, square) = walk(
        kernel,
        [
            *inputs,
            (pallas_util.token_blocks(d_out, walk.length), of_tokens),
            (past_vectors, walk.each(2, width)),
            (past_cov, walk.each(width, width)),
        ],
        [
            (blocks.shape, blocks.dtype, of_tokens),
            (blocks.shape, blocks.dtype, of_tokens),
            (numbers.shape, jnp.float32, of_numbers),
        ],
        [jnp.concatenate([vectors, origin], 2), square],
        name="ccq_query_backward",
        flops=3 * _flops(walk.length, width),
        exps=walk.length**2,
    )
    first = Quadratic(vectors[:, :, 1:2, :1], vectors[:, :, :1], square)
    first = xla_state.move(first, -vectors[:, :, 2:])
    size = q.shape[3]
    d_lam, d_log_decay = pallas_util.from_rows(d_numbers, q.shape[1])
    return (
        pallas_util.from_token_blocks(d_q, q.shape, q.dtype),
        pallas_util.from_token_blocks(d_k, k.shape, k.dtype),
        d_lam.astype(lam.dtype),
        None if log_decay is None else d_log_decay.astype(log_decay.dtype),
        CCQState(
            first.constant[..., 0, 0],
            first.linear[..., 0, :size],
            first.square[:, :, :size, :size],
        ),
    )


def _walk(q: Float[Array, "B T H K"], chunk_size: int | None) -> Walk:
    batch, tokens, heads, _ = q.shape
    length = pallas_util.chunk_length(tokens, chunk_size, CHUNK)
    return Walk(batch, heads, -(-tokens // length), length)


def _inputs(walk: Walk, q: Array, k: Array, lam: Array, log_decay: Array | None) -> list[Any]:
    """The inputs of both kernels, and their blocks."""
    width = pallas_util.width(q.shape[3])
    blocks = [(pallas_util.token_blocks(x, walk.length), walk.tokens(width)) for x in (q, k)]
    log_decay = jnp.zeros_like(lam) if log_decay is None else log_decay
    return [*blocks, (pallas_util.rows(walk.length, lam, log_decay), walk.rows(2))]


def _packed(
    vector: Float[Array, "B H 1 K"],
    number: Float[Array, "B H 1 1"],
    matrix: Float[Array, "B H K K"],
) -> tuple[Float[Array, "B H 2 W"], Float[Array, "B H W W"]]:
    """As the kernels take them, with whole registers."""
    heads, width = vector.shape[:2], pallas_util.width(vector.shape[3])
    vector = pallas_util.fill(vector, (*heads, 1, width))
    number = jnp.broadcast_to(number, vector.shape)
    return jnp.concatenate([vector, number], 2), pallas_util.fill(matrix, (*heads, width, width))


def _flops(size: int, width: int) -> int:
    """Of the forward on one chunk; float32 products count once."""
    return 4 * size * size * width + 4 * size * width * width
