"""CCQ's chunked form on GPUs, through jax-triton; `triton_kernels` has the mathematics.

Forward: one walk over each sequence's chunks for the statistics at their starts, then all chunks at
once; Hopper does both in the walk where it can. Backward: all chunks for dq and dlam, one walk from the
last chunk to the first for what later tokens ask of a key, then all chunks for dk.

Few heads and a long sequence would leave most of the GPU idle. Then the walks are cut into parts,
which are walked at once, twice: each from nothing, then from what the others add up to.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import triton_util
from kernels.ccq_query import hopper, triton_tiles
from kernels.ccq_query.state import CCQState
from kernels.triton_util import f32, like

unavailable = triton_util.unavailable
HINTS = (
    "only_segments",  # log_decay is 0, and -inf for all heads where a segment starts
    "has_initial_state",
)

# Shorter sequences are one part. The batch has no say: its rows must not depend on its size.
LONG = 16384
SHORTEST_PART = 2048


class Residuals(NamedTuple):
    """What the backward needs. The statistics are at the chunks' starts; the last of the means is the center."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    lam: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"] | None
    initial_state: CCQState
    counts: Float[Array, "B H N"]
    means: Float[Array, "B H N K"]
    mean_parts: Float[Array, "B H N 3 K"]
    states: Float[Array, "B H N K K"]
    n: Float[Array, "B T H"]
    p: Float[Array, "B T H"]  # with decays
    r: Float[Array, "B T H"]
    mean_q: Float[Array, "B T H"]
    decays: tuple[Array, ...]  # coarse, fine, starts, to_end, factors
    part_counts: Float[Array, "B H parts 2"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    initial_state: CCQState,
    *,
    centered: bool,
    only_segments: bool = False,
    has_initial_state: bool = True,
    chunk_size: int | None = None,
    keep: bool = True,
) -> tuple[Float[Array, "B T H K"], CCQState, Residuals | None]:
    """Cleaned queries and final statistics; see `kernels.ccq_query`. Without `keep`, Hopper's walk keeps no more."""
    from kernels.ccq_query import triton_kernels

    batch, length, heads, width = q.shape
    mode = _mode(q, log_decay, only_segments)
    chunk, chunks = _chunks(q, chunk_size, mode)
    inputs = (q, k, lam, log_decay, initial_state)
    initial = initial_state if has_initial_state else None
    if hopper.can_walk(q, chunk, mode) and _parts(q) == 1:
        from kernels.ccq_query import triton_hopper_walk

        chunk_of_walk = triton_hopper_walk.C.value
        starts = lam if log_decay is None else _starts(log_decay, chunk_of_walk)
        out, state, (r, mean_q, n), of_keys = hopper.walk(
            q, k, lam, starts, initial, mode, centered, keep
        )
        if not keep:
            return out, state, None
        decays = _weigh(k, lam, log_decay, chunk, mode, centered)[2:]
        return out, state, Residuals(*inputs, *of_keys, n, lam, r, mean_q, decays, lam)
    static = {"H": heads, "K": width, "C": chunk, "CENTERED": centered}
    static |= {"HAS_DECAY": mode == "decay", "RESETS": mode == "resets"}
    weighed = _weigh(k, lam, log_decay, chunk, mode, centered)
    _, _, coarse, fine, starts, *_ = weighed
    of_keys, state, part_counts = _states(k, weighed, initial, chunk, mode, centered)
    scalar, unused = f32((batch, length, heads)), f32((1,))
    if hopper.can_read(q, chunk, mode):
        out, r, mean_q, n = hopper.read(q, k, q, lam, starts, lam, lam, of_keys, mode, centered)
        p = lam
    else:
        config = triton_tiles.of("read", q, chunk, mode)
        out, p, r, mean_q, n, *_ = triton_util.call(
            triton_kernels.read_kernel,
            *(q, k, lam, coarse, fine, starts, q, of_keys[0], *of_keys, length),
            out=(
                *(like(q), scalar if mode == "decay" else unused, scalar, scalar, scalar),
                *(unused, unused, like(q, (1,)), unused, unused),
            ),
            grid=(chunk // config["R"] * chunks * batch * heads,),
            BACKWARD=False,
            **static,
            **config,
        )
    statistics = (*of_keys, n, p, r, mean_q)
    return out, state, Residuals(*inputs, *statistics, weighed[2:], part_counts)


primal = functools.partial(forward, keep=False)
REFS = True


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    only_segments: bool = False,
    has_initial_state: bool = True,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, lam, log_decay and initial_state."""
    from kernels.ccq_query import triton_adjoint, triton_gradients, triton_kernels

    q, k, lam, log_decay = residuals[:4]
    counts, means, mean_parts, states, n, p, r, mean_q, decays, part_counts = residuals[5:]
    batch, length, heads, width = q.shape
    mode = _mode(q, log_decay, only_segments)
    chunk, chunks = _chunks(q, chunk_size, mode)
    static = {"H": heads, "K": width, "C": chunk, "CENTERED": centered}
    static |= {"HAS_DECAY": mode == "decay", "RESETS": mode == "resets"}
    coarse, fine, starts, to_end, factors = decays
    scalar, unused = f32((batch, length, heads)), f32((1,))
    d_out = d_out.astype(q.dtype)

    if_decays = lambda shape: f32(shape) if mode == "decay" else unused
    if hopper.can_read(q, chunk, mode):
        of_keys = (counts, means, mean_parts, states)
        d_q, mean_g, d_lam, shares, h_terms, lines = hopper.read(
            d_out, k, q, lam, starts, r, mean_q, of_keys, mode, centered, backward=True
        )
        p_g = past = kappa_terms = lam
        blocks = h_terms.shape[3]
    else:
        config = triton_tiles.of("read_backward", q, chunk, mode)
        blocks = chunk // config["R"]
        terms = batch, heads, chunks, blocks
        d_q, p_g, _, mean_g, _, d_lam, past, shares, h_terms, kappa_terms = triton_util.call(
            triton_kernels.read_kernel,
            *(d_out, k, lam, coarse, fine, starts, q, r, counts, means, mean_parts, states, length),
            out=(
                *(like(q), if_decays(scalar.shape), unused, scalar, unused),
                scalar if mode == "decay" else like(lam),
                *(if_decays(scalar.shape), like(q), f32((*terms, width)), if_decays(terms)),
            ),
            grid=(blocks * chunks * batch * heads,),
            BACKWARD=True,
            **static,
            **config,
        )
    config = triton_tiles.of("adjoint", q, chunk, mode)
    rows, tiles = -(-width // config["BT"]), _triangle(width, config["BT"])
    parts = _parts(q)
    walk = functools.partial(
        triton_util.call,
        triton_adjoint.adjoint_kernel,
        *(shares, d_out, factors, starts, h_terms, kappa_terms, means, states),
        *d_state,
        grid=(tiles * parts * batch * heads,),
        BLOCKS=blocks,
        PARTS=parts,
        MIRRORED=not hopper.can_read(q, chunk, mode),
        **static,
        **config,
    )
    of_parts = (part_counts,) * 3
    if parts > 1:
        each = batch, heads, parts
        *of_parts, _ = walk(
            *(part_counts, *of_parts, length),
            out=(f32((*each, rows)), f32((*each, width)), f32((*each, width, width)), unused),
            FIRST_WALK=True,
        )
    each = batch, heads, chunks
    kappas, hs, fs, crossings = walk(
        *(part_counts, *of_parts, length),
        out=(
            *(if_decays((*each, rows)), f32((*each, width))),
            *(like(q, (*each, width, width)), if_decays((*each, tiles))),
        ),
        FIRST_WALK=False,
    )
    if hopper.can_read(q, chunk, mode):
        d_k = hopper.keys(q, k, d_out, lines, starts, means, hs, fs, mode, centered)
    else:
        config = triton_tiles.of("keys", q, chunk, mode)
        d_k, polynomials = triton_util.call(
            triton_gradients.keys_kernel,
            *(q, k, d_out, lam, coarse, fine, starts, to_end, n, mean_q, mean_g, means),
            *(hs, fs, length),
            out=(like(q), if_decays(scalar.shape)),
            grid=(chunk // config["R"] * chunks * batch * heads,),
            **static,
            **config,
        )
    if log_decay is None:
        d_log_decay = None
    elif mode == "resets":
        d_log_decay = jnp.zeros_like(log_decay)  # of a constant
    else:
        d_log_decay = triton_util.call(
            triton_gradients.log_decay_kernel,
            *(q, k, d_out, lam, coarse, fine, starts, to_end, factors, n, p, p_g, mean_q, mean_g),
            *(past, d_lam, counts, polynomials, kappas, crossings, length),
            out=scalar,
            grid=(chunks * batch * heads,),
            **{"H": heads, "K": width, "C": chunk, "ROWS": rows, "TILES": tiles},
            **triton_tiles.of("log_decay", q, chunk, mode),
        ).astype(log_decay.dtype)
    if has_initial_state:
        d_initial = _initial_gradient(residuals, d_out, d_state, mean_g, centered)
    else:
        d_initial = jax.tree.map(jnp.zeros_like, residuals.initial_state)  # of a constant
    d_lam = d_lam.astype(lam.dtype)
    return d_q, d_k, d_lam, d_log_decay, d_initial


def _mode(q: Array, log_decay: Array | None, only_segments: bool) -> str:
    """Whose keys count for a token: "all", since the last of "resets", or all with "decay"."""
    if log_decay is None:
        return "all"
    return "resets" if only_segments and q.dtype != jnp.float32 else "decay"


def _chunks(q: Array, chunk_size: int | None, mode: str) -> tuple[int, int]:
    """Tokens a chunk, and chunks. Longer ones write fewer states, and take more work inside."""
    width = q.shape[-1]
    if q.dtype == jnp.float32:
        chunk = min(chunk_size or 64, 64)
    else:
        best = 128 if width > 128 or hopper.can_read(q, 128, mode) else 64
        chunk = min(max(chunk_size or best, triton_tiles.NARROWEST), 128)
    return chunk, -(-q.shape[1] // chunk)


def _parts(q: Array) -> int:
    """Into how many parts a sequence's walks are cut: a power of two."""
    _, length, heads, width = q.shape
    if length < LONG:
        return 1
    blocks = heads * _triangle(width, 128)
    wanted = min(2 * triton_util.num_cores() // blocks, length // SHORTEST_PART)
    return 1 << max(wanted, 1).bit_length() - 1


def _triangle(width: int, tile: int) -> int:
    """Tiles of a symmetric matrix on and above its diagonal."""
    n = -(-width // tile)
    return n * (n + 1) // 2


def _weigh(
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    chunk: int,
    mode: str,
    centered: bool,
) -> tuple[Array, ...]:
    """What `weigh_kernel` writes; in its place what is never read, and with "resets" the starts."""
    from kernels.ccq_query import triton_kernels

    if mode != "decay" and k.dtype != jnp.float32:
        starts = lam if log_decay is None else _starts(log_decay, chunk)
        return k, lam, lam, lam, starts, lam, lam
    batch, length, heads, width = k.shape
    chunks = -(-length // chunk)
    scalar = f32((batch, heads, length) if mode == "decay" else (1,))
    places = jax.ShapeDtypeStruct(scalar.shape, jnp.int32)
    return triton_util.call(
        triton_kernels.weigh_kernel,
        *(k, lam if log_decay is None else log_decay, length),
        out=(
            *(like(k), f32((batch, heads, chunks, width))),
            *(scalar, scalar, places, scalar, f32((batch, heads, chunks, 2))),
        ),
        grid=(chunks * batch * heads,),
        **{"H": heads, "K": width, "C": chunk, "BK": 64, "num_warps": 4, "num_stages": 2},
        **{"HAS_DECAY": mode == "decay", "CENTERED": centered},
    )


def _states(
    k: Float[Array, "B T H K"],
    weighed: tuple[Array, ...],
    initial_state: CCQState | None,
    chunk: int,
    mode: str,
    centered: bool,
) -> tuple[hopper.OfKeys, CCQState, Array]:
    """Counts, means, their parts and covariances at the chunks' starts, the last state, and counts of parts."""
    from kernels.ccq_query import triton_kernels, triton_states

    batch, length, heads, width = k.shape
    entries = batch, heads, -(-length // chunk) + 1
    weighted, chunk_means, _, unused, starts, _, factors = weighed
    parts = _parts(k)
    if parts == 1 and hopper.can_collect(k, chunk, mode):
        return *hopper.collect(k, starts, initial_state, mode, centered), unused
    config = triton_tiles.of("states", k, chunk, mode)
    walk = functools.partial(
        triton_util.call,
        triton_states.states_kernel,
        *(k, weighted, chunk_means, factors, starts),
        *((unused,) * 3 if initial_state is None else initial_state),
        grid=(_triangle(width, config["BT"]) * parts * batch * heads,),
        **{"H": heads, "K": width, "C": chunk, "PARTS": parts, "RESETS": mode == "resets"},
        **{"INITIAL": initial_state is not None, "CENTERED": centered},
        RAW=mode != "decay" and k.dtype != jnp.float32,
        **config,
    )
    of_parts = (unused,) * 3
    if parts > 1:
        each = batch, heads, parts
        counts, means, _, states, *_ = walk(
            *(*of_parts, length),
            out=(
                *(f32((*each, 2)), f32((*each, width)), like(k, (1,))),
                *(f32((*each, width, width)), *(f32((1,)),) * 3),
            ),
            FIRST_WALK=True,
        )
        of_parts = counts, means, states
    counts, means, mean_parts, states, *state = walk(
        *(*of_parts, length),
        out=(
            *(f32(entries), f32((*entries, width))),
            like(k, (*entries, triton_kernels.MEAN_PARTS.value, width)),
            like(k, (*entries, width, width)),
            *(f32((batch, heads)), f32((batch, heads, width))),
            f32((batch, heads, width, width)),
        ),
        FIRST_WALK=False,
    )
    return (counts, means, mean_parts, states), CCQState(*state), of_parts[0]


def _starts(log_decay: Float[Array, "B T H"], chunk: int) -> Int[Array, "B T"]:
    """Where in its chunk each token's segment starts, -1 if before it."""
    resets = jnp.isneginf(log_decay[..., 0])
    batch, length = resets.shape
    resets = jnp.pad(resets, ((0, 0), (0, -length % chunk))).reshape(batch, -1, 1, chunk)
    place = jnp.arange(chunk, dtype=jnp.int32)
    seen = resets & (place <= place[:, None])
    return jnp.where(seen, place, -1).max(-1).reshape(batch, -1)[:, :length]


def _initial_gradient(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    mean_g: Float[Array, "B T H"],
    centered: bool,
) -> CCQState:
    """Gradient of the initial state. That of its count nearly cancels: it reads q again, in float32."""
    from kernels.ccq_query import triton_initial

    r = residuals
    batch, length, heads, width = r.q.shape
    q, k = r.q.astype(jnp.float32), r.k.astype(jnp.float32)
    ones = jnp.ones(r.lam.shape, jnp.float32)
    clean = forward(q, k, ones, r.log_decay, r.initial_state, centered=centered)[0]
    log_decay = r.lam if r.log_decay is None else r.log_decay
    static = {"H": heads, "K": width, "HAS_DECAY": r.log_decay is not None}
    static |= {"num_warps": 4, "num_stages": 1}
    count, key_sum = triton_util.call(
        triton_initial.initial_sums_kernel,
        *(r.q, d_out, clean, r.lam, log_decay, r.n, r.mean_q, mean_g, *d_state[:2], length),
        out=(f32((batch, heads)), f32((batch, heads, width))),
        grid=(batch * heads,),
        S=16,
        **static,
    )
    key_outer = triton_util.call(
        triton_initial.initial_outer_kernel,
        *(r.q, d_out, r.lam, log_decay, r.n, d_state.key_outer, length),
        out=f32((batch, heads, width, width)),
        grid=((-(-width // 32)) ** 2 * batch * heads,),
        **{"S": 32, "BT": 32},
        **static,
    )
    return CCQState(count, key_sum, key_outer)
