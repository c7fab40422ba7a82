"""The call of `triton_hopper`'s kernel, which takes the place of `triton_kernels.gradient_kernel` where it can.

This module imports without Triton or jax-triton installed.
"""

from jaxtyping import Array, Float

from kernels import gluon_util, triton_util
from kernels.gluon_util import Tiles
from kernels.triton_util import f32, like

TILE = 64


def suits(k: Float[Array, "B T H K"], v: Float[Array, "B T HV V"], chunk: int) -> bool:
    """Whether the kernel can do it: whole tiles, and gradients of each head in 16 bits."""
    (heads, width), (value_heads, value_width) = k.shape[2:], v.shape[2:]
    whole = chunk == TILE and width in (2 * TILE, 4 * TILE) and value_width % TILE == 0
    fits = whole and heads == value_heads and k.dtype.itemsize == 2
    return fits and gluon_util.can_run_on(triton_util.device_kind())


def gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    gates: Float[Array, "B H N 5 C"],
    d_out: Float[Array, "B T H V"],
    d_v: Float[Array, "B T H V"],
    u: Float[Array, "B H N V C"],
    states: Float[Array, "B H N V K"],
    d_states: Float[Array, "B H N V K"],
    scale: float,
) -> tuple[Array, Array, Array, Array]:
    """dq, dk, and the parts of dlog_decay and dbeta [column blocks, B, T, H]."""
    from kernels.gated_delta_rule import triton_hopper

    batch, length, heads, width = k.shape
    value_width = d_v.shape[3]
    tiles = lambda x, *shape: Tiles(x.reshape(*shape), (1, TILE, TILE))
    tokens = lambda x: tiles(x, batch, length, -1)
    of_chunks = lambda x: tiles(x, 1, -1, x.shape[-1])
    items = gates.shape[2] * batch * heads * (width // (2 * TILE))
    keys = Tiles(like(k, (batch, length, heads * width)), (1, TILE, TILE))
    parts = f32((width // TILE, batch, length, heads))
    d_q, d_k, d_decay, d_beta = triton_util.call(
        triton_hopper.gradient_kernel,
        *(tokens(q), tokens(k), tokens(d_out), tokens(d_v)),
        *(of_chunks(u), of_chunks(states), of_chunks(d_states)),
        *(log_decay, beta, gates, length, items),
        out=(keys, keys, parts, parts),
        grid=(min(items, triton_util.num_cores()),),
        scale=float(scale),
        **{"H": heads, "K": width, "V": value_width, "num_warps": 4, "num_stages": 1},
    )
    return d_q.reshape(k.shape), d_k.reshape(k.shape), d_decay, d_beta
