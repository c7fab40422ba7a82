"""The decode step on GPUs, through jax-triton: a pass over CCQ's covariances, then one over the states.

The second pass reads with a query that takes all of a covariance, hence two kernels. Each reads and
writes its state once, in place: in the caller's buffer where that is donated, else in a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import triton_util
from kernels.ccq_query.state import CCQMoments
from kernels.decode_step.scan import Statistics

unavailable = triton_util.unavailable

# Elements of a tile, and warps that share it: enough in flight to keep the memory busy, few enough
# registers for several blocks on a multiprocessor.
STATISTICS_TILE, STATISTICS_WARPS = 4096, 4
MEMORY_TILE, MEMORY_WARPS = 8192, 4
# What a tile keeps however few the heads. The memory reads no less than a row of 16 elements.
FEWEST_ROWS, FEWEST_COLUMNS = 8, 16


def forward(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    log_decay: Array | None,
    beta: Float[Array, "B HV"] | None,
    state: Array,
    statistics: Statistics | None,
    layer: Int[Array, ""] | None,
    *,
    scale: float,
    centered: bool,
) -> tuple[Float[Array, "B HV V"], Array, CCQMoments | None]:
    """Output, state and statistics after one token; see `kernels.decode_step`."""
    from kernels.decode_step.triton_kernels import memory_kernel

    count: Any = q  # pointers that are not followed without statistics
    mean: Any = q
    covariance, ccq_k, ccq_log_decay = q, q, None
    if statistics is not None:
        ccq_k, ccq_log_decay = statistics.k, statistics.log_decay
        count, mean = map(triton_util.in_place, statistics.moments[:2])
        q, covariance = _condition(q, statistics, layer, centered)
    batch, heads, width, value_width = state.shape[-4:]
    columns = _tile(MEMORY_TILE, width, value_width, batch * heads, FEWEST_COLUMNS)
    updated = triton_util.in_place(state)
    out = triton_util.call(
        memory_kernel,
        *(q, k, v, _or(log_decay, q), _or(beta, q), updated),
        *(ccq_k, _or(ccq_log_decay, q), count, mean, _or(layer, q)),
        out=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scale=scale,
        grid=(batch * heads * -(-value_width // columns),),
        num_warps=MEMORY_WARPS,
        num_stages=1,
        HEADS=0 if layer is None else batch * heads,
        GROUP=heads // k.shape[1],
        K=width,
        V=value_width,
        WIDTH=_padded(width),
        COLUMNS=columns,
        DECAY=0 if log_decay is None else 1 if log_decay.size == batch * heads else 2,
        DELTA=beta is not None,
        CCQ=statistics is not None,
        CCQ_DECAY=ccq_log_decay is not None,
    )
    if statistics is None:
        return out, triton_util.after(updated), None
    moments = CCQMoments(triton_util.after(count), triton_util.after(mean), covariance)
    return out, triton_util.after(updated), moments


def _condition(
    q: Float[Array, "B H K"], statistics: Statistics, layer: Int[Array, ""] | None, centered: bool
) -> tuple[Float[Array, "B H K"], Array]:
    """The cleaned query, float32, and the covariance after this token."""
    from kernels.decode_step.triton_kernels import statistics_kernel

    k, lam, log_decay, (count, mean, covariance) = statistics
    batch, heads, width = k.shape
    rows = _tile(STATISTICS_TILE, width, width, batch * heads, FEWEST_ROWS)
    updated = triton_util.in_place(covariance)
    clean = triton_util.call(
        statistics_kernel,
        *(q, k, lam, _or(log_decay, lam), count, mean, updated, _or(layer, q)),
        out=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(batch * heads * -(-width // rows),),
        num_warps=STATISTICS_WARPS,
        num_stages=1,
        HEADS=0 if layer is None else batch * heads,
        K=width,
        WIDTH=_padded(width),
        ROWS=rows,
        DECAY=log_decay is not None,
        CENTERED=centered,
    )
    return clean, triton_util.after(updated)


def _or(x: Array | None, stand_in: Array) -> Array:
    """A kernel takes a pointer for each argument, also for those that it does not read."""
    return stand_in if x is None else x


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _tile(elements: int, width: int, length: int, heads: int, fewest: int) -> int:
    """How many of `length` vectors of `width` elements a block takes.

    No more than a tile holds, and few enough that there are blocks for all multiprocessors.
    """
    size = min(elements // _padded(width), _padded(length))
    while size > fewest and heads * -(-length // size) < 2 * triton_util.num_cores():
        size //= 2
    return size
