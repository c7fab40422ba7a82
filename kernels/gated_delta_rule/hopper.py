"""The calls of the kernels for Hopper, which take the place of `triton_kernels`' where they can.

This module imports without Triton or jax-triton installed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import gluon_util, triton_util
from kernels.gluon_util import Tiles
from kernels.triton_util import f32, like

TILE = 64


def can_prepare(k: Float[Array, "B T H K"], chunk: int) -> bool:
    """Whether `prepare` can do it: whole tiles, in 16 bits."""
    return k.shape[3] in (TILE, 2 * TILE, 4 * TILE) and _runs(k, chunk)


def can_walk(k: Float[Array, "B T H K"], value_dim: int, chunk: int) -> bool:
    """Whether `walk` and `walk_back` can do it: whole tiles and pairs of them, in 16 bits."""
    whole = k.shape[3] in (2 * TILE, 4 * TILE) and value_dim % (2 * TILE) == 0
    return whole and _runs(k, chunk)


def can_differentiate(k: Float[Array, "B T H K"], v: Float[Array, "B T HV V"], chunk: int) -> bool:
    """Whether `gradient` can do it: whole tiles, and gradients of each head in 16 bits."""
    (heads, key_dim), (value_heads, value_dim) = k.shape[2:], v.shape[2:]
    whole = key_dim in (2 * TILE, 4 * TILE) and value_dim % TILE == 0
    return whole and heads == value_heads and _runs(k, chunk)


def _runs(k: Array, chunk: int) -> bool:
    fits = chunk == TILE and k.dtype.itemsize == 2
    return fits and gluon_util.can_run_on(triton_util.device_kind())


def prepare(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    scale: float,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Gates [B, HV, N, 5, C], and corrections and scores [B, HV, N, C, C] in `dtype`."""
    from kernels.gated_delta_rule import triton_hopper_prepare

    (_, length, heads, width), value_heads = k.shape, beta.shape[2]
    shape = (k.shape[0], value_heads, -(-length // TILE))
    items = shape[0] * shape[1] * shape[2]
    square = Tiles(jax.ShapeDtypeStruct((1, items * TILE, TILE), dtype), (1, TILE, TILE))
    gates, corrections, scores = triton_util.call(
        triton_hopper_prepare.prepare_kernel,
        *(_tokens(q, width), _tokens(k, width), log_decay, beta, length),
        out=(f32((*shape, triton_hopper_prepare.GATE_ROWS.value, TILE)), square, square),
        grid=(items,),
        scale=float(scale),
        **{"H": heads, "HV": value_heads, "K": width, "num_warps": 4, "num_stages": 1},
    )
    squares = (x.reshape(*shape, TILE, TILE) for x in (corrections, scores))
    return gates, *squares


def walk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV W"],
    beta: Float[Array, "B T HV"],
    gates: Float[Array, "B HV N 5 C"],
    corrections: Float[Array, "B HV N C C"],
    scores: Float[Array, "B HV N C C"],
    starts: Float[Array, "B HV K V"],
    scale: float,
    values: bool,
    output: bool,
    states: bool,
) -> tuple[Array | None, Array | None, Array | None, Array]:
    """Out, beta u [B, HV, N, V, C], the states that enter the chunks [.., V, K], and the last; None if not asked for.

    Args:
      q: queries.
      k: keys.
      v: values, W being V; without `values` they are taken as zero.
      beta: write strengths.
      gates: from `prepare`.
      corrections: from `prepare`.
      scores: from `prepare`.
      starts: the states at the start.
      scale: of the queries.
      values: whether there are values.
      output: asks for out; not at once with `states`.
      states: asks for beta u and the states.
    """
    from kernels.gated_delta_rule import triton_hopper_walk

    heads, width, value_dim = k.shape[2], k.shape[3], starts.shape[3]
    tiles = gates.shape[:3]
    rows = tiles[0] * tiles[1] * tiles[2] * value_dim
    unused = like(q, (1, TILE, TILE))
    out = like(v, (*v.shape[:2], v.shape[2] * v.shape[3])) if output else unused
    u = like(q, (1, rows, TILE)) if states else unused
    kept = like(q, (1, rows, width)) if states else unused
    walks, blocks, there = _teams(starts)
    _, out, u, kept, last = triton_util.call(
        triton_hopper_walk.forward_kernel,
        *_sources(q, k, v, corrections, scores),
        *(gates, beta, starts, k.shape[1], walks),
        out=(
            there,
            *(Tiles(x, (1, TILE, TILE)) for x in (out, u)),
            Tiles(kept, (1, TILE, width if states else TILE)),
            f32(starts.shape),
        ),
        grid=(blocks,),
        scale=float(scale),
        **{"H": heads, "HV": v.shape[2], "K": width, "V": value_dim},
        **{"VALUES": values, "OUTPUT": output, "STATES": states},
        **{"num_warps": 4, "num_stages": 1},
    )
    if states:
        u, kept = u.reshape(*tiles, value_dim, TILE), kept.reshape(*tiles, value_dim, width)
    return out.reshape(v.shape) if output else None, *((u, kept) if states else (None, None)), last


def walk_back(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    d_out: Float[Array, "B T HV V"],
    gates: Float[Array, "B HV N 5 C"],
    corrections: Float[Array, "B HV N C C"],
    scores: Float[Array, "B HV N C C"],
    d_ends: Float[Array, "B HV K V"],
    scale: float,
    states: bool,
) -> tuple[Array | None, Array | None, Array]:
    """Dv and the gradients of the states that leave the chunks, None without `states`; and the first state's."""
    from kernels.gated_delta_rule import triton_hopper_walk

    (batch, length, heads, width), (value_heads, value_dim) = k.shape, d_out.shape[2:]
    tiles = gates.shape[:3]
    rows = tiles[0] * tiles[1] * tiles[2] * value_dim
    unused = like(q, (1, TILE, TILE))
    d_v = like(q, (batch, length, value_heads * value_dim)) if states else unused
    d_states = like(q, (1, rows, width)) if states else unused
    walks, blocks, there = _teams(d_ends)
    _, d_v, d_states, d_starts = triton_util.call(
        triton_hopper_walk.reverse_kernel,
        *_sources(q, k, d_out, corrections, scores),
        *(gates, d_ends, length, walks),
        out=(
            there,
            Tiles(d_v, (1, TILE, TILE)),
            Tiles(d_states, (1, TILE, width if states else TILE)),
            f32(d_ends.shape),
        ),
        grid=(blocks,),
        scale=float(scale),
        **{"H": heads, "HV": value_heads, "K": width, "V": value_dim, "STATES": states},
        **{"num_warps": 4, "num_stages": 1},
    )
    if not states:
        return None, None, d_starts
    return d_v.reshape(d_out.shape), d_states.reshape(*tiles, value_dim, width), d_starts


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
    from kernels.gated_delta_rule import triton_hopper_gradient

    batch, length, heads, width = k.shape
    of_chunks = lambda x: Tiles(x.reshape(1, -1, x.shape[-1]), (1, TILE, TILE))
    items = gates.shape[2] * batch * heads * (width // (2 * TILE))
    keys = Tiles(like(k, (batch, length, heads * width)), (1, TILE, TILE))
    parts = f32((width // TILE, batch, length, heads))
    d_q, d_k, d_decay, d_beta = triton_util.call(
        triton_hopper_gradient.gradient_kernel,
        *(_tokens(x, TILE) for x in (q, k, d_out, d_v)),
        *(of_chunks(x) for x in (u, states, d_states)),
        *(log_decay, beta, gates, length, items),
        out=(keys, keys, parts, parts),
        grid=(min(items, triton_util.num_cores()),),
        scale=float(scale),
        **{"H": heads, "K": width, "V": d_v.shape[3], "num_warps": 4, "num_stages": 1},
    )
    return d_q.reshape(k.shape), d_k.reshape(k.shape), d_decay, d_beta


def _teams(state: Float[Array, "B HV K V"]) -> tuple[int, int, Array]:
    """Heads of all rows, blocks to walk them, and zeros where their groups say that a state is there to go on from."""
    heads, team = state.shape[0] * state.shape[1], state.shape[3] // (2 * TILE)
    teams = max(1, min(heads, triton_util.num_cores() // team))
    return heads, teams * team, jnp.zeros((heads * team * 2,), jnp.int32)


def _tokens(x: Float[Array, "B T H D"], width: int) -> Tiles:
    """A chunk's rows of `width` columns of all heads'."""
    return Tiles(x.reshape(*x.shape[:2], -1), (1, TILE, width))


def _sources(q: Array, k: Array, v: Array, corrections: Array, scores: Array) -> tuple[Tiles, ...]:
    squares = (Tiles(x.reshape(1, -1, TILE), (1, TILE, TILE)) for x in (corrections, scores))
    return _tokens(q, k.shape[3]), _tokens(k, k.shape[3]), _tokens(v, TILE), *squares
