"""The calls of CCQ's kernels for Hopper, which take the place of Triton's where they can.

This module imports without Triton or jax-triton installed.
"""

import math
from typing import Any, TypeAlias

from jaxtyping import Array, Float, Int

from kernels import gluon_util, triton_util
from kernels.ccq_query.state import CCQState
from kernels.gluon_util import Tiles
from kernels.triton_util import f32, like

# Counts, means, their parts and covariances at the chunks' starts.
OfKeys: TypeAlias = tuple[Array, Array, Array, Array]


def can_walk(q: Array, chunk: int, mode: str) -> bool:
    """Whether `walk` can do it: Sigma in a block's registers."""
    return q.shape[-1] == 128 and _can_run(q, chunk, mode)


def can_collect(k: Array, chunk: int, mode: str) -> bool:
    """Whether `collect` can do it: wide keys, which two blocks share."""
    return k.shape[-1] == 256 and _can_run(k, chunk, mode)


def can_read(q: Array, chunk: int, mode: str) -> bool:
    """Whether `read` and `keys` can do it: all of a chunk in shared memory."""
    return q.shape[-1] in (64, 128, 256) and _can_run(q, chunk, mode)


def _can_run(x: Array, chunk: int, mode: str) -> bool:
    """Whether keys count alike, and the kernels are for this chunk, dtype and device."""
    fits = chunk == 128 and mode != "decay" and x.dtype.itemsize == 2
    return fits and gluon_util.can_run_on(triton_util.device_kind())


def read(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    other: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    starts: Int[Array, "B T"],
    other_r: Float[Array, "B T H"],
    mean_other: Float[Array, "B T H"],
    of_keys: OfKeys,
    mode: str,
    centered: bool,
    backward: bool = False,
) -> tuple[Array, ...]:
    """The results of `read_kernel` that are not empty.

    They are out, r, q . mean and n; backward, d_q, g . mean, d_lam, shares, h_terms and lines.

    Args:
      q: queries or, backward, the gradient g of the clean ones.
      k: keys.
      other: backward, the queries.
      lam: strengths.
      starts: with mode "resets", where in its chunk each token's segment starts.
      other_r: backward, the queries' r.
      mean_other: backward, their products with the mean.
      of_keys: counts, means, their parts, and covariances at the chunks' starts.
      mode: "all" or "resets".
      centered: as in `ccq_query`.
      backward: which of both.
    """
    from kernels.ccq_query import triton_hopper
    from kernels.ccq_query import triton_hopper_tiles as tiles

    counts, _, mean_parts, states = of_keys
    batch, length, heads, width = q.shape
    rows, groups = tiles.R.value, tiles.GROUPS.value
    chunks = counts.shape[2] - 1
    items = chunks * batch * heads
    of_tokens = (batch, length, heads * width)
    tokens = lambda x, n: Tiles(x.reshape(of_tokens), (1, n, rows))
    scalar, unused = f32((batch, length, heads)), f32((1,))
    if backward:
        scalars = unused, scalar, unused, like(lam)
        rest = like(q, of_tokens), f32((batch, heads, chunks, groups, width))
        lines = f32((batch, heads, chunks, tiles.LINES.value, tiles.C.value))
    else:
        scalars = scalar, scalar, scalar, unused
        rest = like(q, (1, 1, width)), unused
        lines = unused
    out, r, mean_q, n, d_lam, shares, h_terms, lines = triton_util.call(
        triton_hopper.read_kernel,
        *(tokens(q, rows), tokens(k, groups * rows), tokens(other, rows)),
        Tiles(mean_parts.reshape(-1, width), (triton_hopper.HALF.value, rows)),
        Tiles(states.reshape(1, -1, width), (1, rows, rows)),
        *(lam, starts, other_r, mean_other, counts, length, items),
        out=(
            Tiles(like(q, of_tokens), (1, rows, rows)),
            *(*scalars, Tiles(rest[0], (1, rows, rows)), rest[1], lines),
        ),
        grid=(min(items, triton_util.num_cores()),),
        **{"H": heads, "K": width, "RESETS": mode == "resets", "CENTERED": centered},
        **{"BACKWARD": backward, "num_warps": 4, "num_stages": 1},
    )
    if backward:
        return out.reshape(q.shape), mean_q, d_lam, shares.reshape(q.shape), h_terms, lines
    return out.reshape(q.shape), r, mean_q, n


def keys(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    g: Float[Array, "B T H K"],
    lines: Float[Array, "B H N 3 128"],
    starts: Int[Array, "B T"],
    means: Float[Array, "B H N+1 K"],
    hs: Float[Array, "B H N K"],
    fs: Float[Array, "B H N K K"],
    mode: str,
    centered: bool,
) -> Float[Array, "B T H K"]:
    """The keys' gradients.

    Args:
      q: queries.
      k: keys.
      g: the gradient of the clean queries.
      lines: from `read`.
      starts: with mode "resets", where in its chunk each token's segment starts.
      means: at the chunks' starts; the last is the center.
      hs: from the adjoint's walk, at the chunks' ends.
      fs: likewise, of which the tiles on and above the diagonal are read.
      mode: "all" or "resets".
      centered: as in `ccq_query`.
    """
    from kernels.ccq_query import triton_hopper_keys
    from kernels.ccq_query import triton_hopper_tiles as tiles

    batch, length, heads, width = q.shape
    rows, chunk = tiles.R.value, tiles.C.value
    of_tokens = (batch, length, heads * width)
    tokens = lambda x, n: Tiles(x.reshape(of_tokens), (1, n, rows))
    items = batch * heads * hs.shape[2]
    d_k = triton_util.call(
        triton_hopper_keys.keys_kernel,
        *(tokens(q, chunk), tokens(k, rows), tokens(g, chunk)),
        Tiles(fs.reshape(1, -1, width), (1, rows, rows)),
        *(lines, starts, means, hs, length, items),
        out=Tiles(like(k, of_tokens), (1, rows, rows)),
        grid=(min(items, triton_util.num_cores()),),
        **{"H": heads, "K": width, "RESETS": mode == "resets", "CENTERED": centered},
        **{"num_warps": 4, "num_stages": 1},
    )
    return d_k.reshape(k.shape)


def walk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    starts: Int[Array, "B T"],
    initial_state: CCQState | None,
    mode: str,
    centered: bool,
    keep: bool,
) -> tuple[Array, CCQState, tuple[Array, Array, Array], OfKeys]:
    """Cleaned queries and the last state; with `keep` also r, q . mean and n, and the statistics.

    Args:
      q: queries.
      k: keys.
      lam: strengths.
      starts: with mode "resets", where in its chunk of the walk each token's segment starts.
      initial_state: None if there is none.
      mode: "all" or "resets".
      centered: as in `ccq_query`.
      keep: asks for what the backward needs, else these results are empty.
    """
    from kernels.ccq_query import triton_hopper_walk as kernel

    batch, length, heads, width = q.shape
    tile = (1, kernel.C.value, kernel.C.value)
    tokens = lambda x: Tiles(x.reshape(batch, length, heads * width), tile)
    scalar = f32((batch, length, heads) if keep else (1,))
    chunks = -(-length // (kernel.C.value * kernel.KEPT.value))
    entries = (batch, heads, chunks + 1) if keep else (1, 1, 1)
    out, r, mean_q, n, *statistics = triton_util.call(
        kernel.walk_kernel,
        *(tokens(q), tokens(k), k, lam, starts),
        *((lam,) * 3 if initial_state is None else initial_state),
        length,
        out=(
            Tiles(like(q, (batch, length, heads * width)), tile),
            *(*(scalar,) * 3, *_results(k, entries, tile)),
        ),
        grid=(batch * heads,),
        **{"H": heads, "INITIAL": initial_state is not None, "STATES": keep},
        **{"RESETS": mode == "resets", "CENTERED": centered, "num_warps": 4, "num_stages": 1},
    )
    of_keys, state = _named(statistics, entries)
    return out.reshape(q.shape), state, (r, mean_q, n), of_keys


def collect(
    k: Float[Array, "B T H K"],
    starts: Int[Array, "B T"],
    initial_state: CCQState | None,
    mode: str,
    centered: bool,
) -> tuple[OfKeys, CCQState]:
    """The statistics at the chunks' starts, the last state's covariance left out, and the last state.

    Args:
      k: keys.
      starts: with mode "resets", where in its chunk each token's segment starts.
      initial_state: None if there is none.
      mode: "all" or "resets".
      centered: as in `ccq_query`.
    """
    from kernels.ccq_query import triton_hopper_states as kernel

    batch, length, heads, width = k.shape
    chunk, side = kernel.C.value, kernel.SIDE.value
    entries = batch, heads, -(-length // chunk) + 1
    statistics = triton_util.call(
        kernel.states_kernel,
        Tiles(k.reshape(batch, length, heads * width), (1, chunk, side)),
        *(k, starts, *((starts,) * 3 if initial_state is None else initial_state), length),
        out=_results(k, entries, (1, side, side)),
        grid=(batch * heads * (kernel.TILES.value // kernel.GROUPS.value),),
        **{"H": heads, "INITIAL": initial_state is not None, "RESETS": mode == "resets"},
        **{"CENTERED": centered, "num_warps": 4, "num_stages": 1},
    )
    return _named(statistics, entries)


def _results(
    k: Float[Array, "B T H K"], entries: tuple[int, int, int], tile: tuple[int, int, int]
) -> tuple[Any, ...]:
    """What a walk writes: the last state, and statistics at so many `entries`, covariances in tiles."""
    from kernels.ccq_query.triton_kernels import MEAN_PARTS

    batch, _, heads, width = k.shape
    return (
        *(f32((batch, heads)), f32((batch, heads, width)), f32((batch, heads, width, width))),
        *(f32(entries), f32((*entries, width)), like(k, (*entries, MEAN_PARTS.value, width))),
        Tiles(like(k, (1, math.prod(entries) * width, width)), tile),
    )


def _named(results: Any, entries: tuple[int, int, int]) -> tuple[OfKeys, CCQState]:
    """A walk's statistics, and the last state."""
    *state, counts, means, mean_parts, states = results
    width = means.shape[-1]
    of_keys = counts, means, mean_parts, states.reshape(*entries, width, width)
    return of_keys, CCQState(*state)
