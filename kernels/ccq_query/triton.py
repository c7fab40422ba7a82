"""CCQ's chunked form on GPUs, through jax-triton; `triton_kernels` has the mathematics.

Forward: one pass over each sequence's chunks for the statistics at their starts, then all chunks at
once. Backward: all chunks for dq and dlam, one pass from the last chunk to the first for what later
tokens ask of a key, then all chunks for dk.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import triton_util
from kernels.ccq_query import xla
from kernels.ccq_query.state import CCQState

unavailable = triton_util.unavailable
HINTS = ("only_segments",)  # log_decay is 0, and -inf for all heads where a segment starts

# Rows of 16-bit tiles: narrower ones are miscompiled, see `triton_kernels`.
NARROWEST = 64

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Residuals(NamedTuple):
    """What the backward needs. The statistics are at the chunks' starts, and last at the end."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    lam: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"] | None
    initial_state: CCQState
    counts: Float[Array, "B H N"]
    means: Float[Array, "B H N K"]
    states: Float[Array, "B H N K K"]
    n: Float[Array, "B T H"]
    p: Float[Array, "B T H"]
    mean_q: Float[Array, "B T H"]


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    lam: Float[Array, "B T H"],
    log_decay: Float[Array, "B T H"] | None,
    initial_state: CCQState,
    *,
    centered: bool,
    only_segments: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H K"], CCQState, Residuals]:
    """Cleaned queries and final statistics; see `kernels.ccq_query`."""
    from kernels.ccq_query import triton_kernels

    batch, length, heads, width = q.shape
    mode = _mode(q, log_decay, only_segments)
    chunk, chunks = _chunks(q, mode, chunk_size)
    static = {"H": heads, "K": width, "C": chunk, "CENTERED": centered}
    static |= {"HAS_DECAY": mode == "decay", "RESETS": mode == "resets"}
    decays = (lam if log_decay is None else log_decay, _starts(log_decay, chunk, mode))

    config = _tiles("states", q, chunk, mode)
    counts, means, states, *final = triton_util.call(
        triton_kernels.states_kernel,
        *(k, *decays, *initial_state, length),
        out=(
            f32((batch, heads, chunks + 1)),
            f32((batch, heads, chunks + 1, width)),
            like(q, (batch, heads, chunks + 1, width, width)),
            f32((batch, heads, width)),
            f32((batch, heads, width, width)),
        ),
        grid=(_triangle(width, config["BT"]) * batch * heads,),
        **static,
        **config,
    )
    config = _tiles("read", q, chunk, mode)
    scalar, unused = f32((batch, length, heads)), f32((1,))
    out, p, mean_q, n, *_ = triton_util.call(
        triton_kernels.read_kernel,
        *(q, k, lam, *decays, q, counts, counts, means, states, length),
        out=(like(q), scalar, scalar, scalar, unused, unused, like(q, (1,)), unused, unused),
        grid=(chunk // config["R"] * chunks * batch * heads,),
        BACKWARD=False,
        **static,
        **config,
    )
    state = CCQState(counts[..., -1], *final)
    inputs = (q, k, lam, log_decay, initial_state)
    return out, state, Residuals(*inputs, counts, means, states, n, p, mean_q)


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    only_segments: bool = False,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, lam, log_decay and initial_state."""
    from kernels.ccq_query import triton_gradients, triton_kernels

    q, k, lam, log_decay, _, counts, means, states, n, p, mean_q = residuals
    batch, length, heads, width = q.shape
    mode = _mode(q, log_decay, only_segments)
    chunk, chunks = _chunks(q, mode, chunk_size)
    static = {"H": heads, "K": width, "C": chunk, "CENTERED": centered}
    static |= {"HAS_DECAY": mode == "decay", "RESETS": mode == "resets"}
    decays = (lam if log_decay is None else log_decay, _starts(log_decay, chunk, mode))
    scalar, unused = f32((batch, length, heads)), f32((1,))
    d_out = d_out.astype(q.dtype)

    config = _tiles("read", q, chunk, mode)
    blocks = chunk // config["R"]
    terms = batch, heads, chunks, blocks
    d_q, p_g, mean_g, _, d_lam, past, shares, h_terms, kappa_terms = triton_util.call(
        triton_kernels.read_kernel,
        *(d_out, k, lam, *decays, q, p, counts, means, states, length),
        out=(
            *(like(q), scalar, scalar, unused, scalar, scalar),
            *(like(q), f32((*terms, width)), f32(terms)),
        ),
        grid=(blocks * chunks * batch * heads,),
        BACKWARD=True,
        **static,
        **config,
    )
    config = _tiles("adjoint", q, chunk, mode)
    parts = -(-width // config["BJ"])
    tiles = -(-width // config["BI"]) * parts
    polynomial = _polynomial(d_state, means[:, :, -1] if centered else None)
    kappas, hs, slopes, fs, crossings = triton_util.call(
        triton_gradients.adjoint_kernel,
        *(shares, d_out, *decays, h_terms, kappa_terms, counts, means, states),
        *polynomial,
        length,
        out=(
            f32((batch, heads, chunks, tiles)),
            f32((batch, heads, chunks, parts, width)),
            f32((batch, heads, chunks, parts, width)),
            like(q, (batch, heads, chunks, width, width)),
            f32((batch, heads, chunks, tiles)),
        ),
        grid=(tiles * batch * heads,),
        BLOCKS=blocks,
        **static,
        **config,
    )
    config = _tiles("keys", q, chunk, mode)
    d_k, d_log_decay = triton_util.call(
        triton_gradients.keys_kernel,
        *(q, k, d_out, lam, *decays, n, p, p_g, mean_q, mean_g, past, counts, means),
        *(kappas, hs, slopes, fs, crossings, length),
        out=(like(q), scalar),
        grid=(chunk // config["R"] * chunks * batch * heads,),
        TILES=tiles,
        PARTS=parts,
        **static,
        **config,
    )
    d_initial = _initial_gradient(residuals, d_out, d_state, mean_g, centered)
    d_lam = d_lam.astype(lam.dtype)
    if log_decay is None:
        d_log_decay = None
    elif mode == "decay":
        d_log_decay = d_log_decay.astype(log_decay.dtype)
    else:  # of a constant
        d_log_decay = jnp.zeros_like(log_decay)
    return d_q, d_k, d_lam, d_log_decay, d_initial


def f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def like(x: Array, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _mode(q: Array, log_decay: Array | None, only_segments: bool) -> str:
    """Whose keys count for a token: "all", since the last of "resets", or all with "decay"."""
    if log_decay is None:
        return "all"
    return "resets" if only_segments and q.dtype != jnp.float32 else "decay"


def _chunks(q: Array, mode: str, chunk_size: int | None) -> tuple[int, int]:
    """Tokens a chunk, and chunks. Longer ones write fewer states, and take more work inside."""
    if q.dtype == jnp.float32:
        chunk = min(chunk_size or 64, 64)
    else:
        default = 128 if mode != "decay" and q.shape[-1] > 128 else 64
        chunk = min(max(chunk_size or default, NARROWEST), 128)
    return chunk, -(-q.shape[1] // chunk)


def _triangle(width: int, tile: int) -> int:
    """Tiles of a symmetric matrix on and above its diagonal."""
    n = -(-width // tile)
    return n * (n + 1) // 2


def _starts(log_decay: Array | None, chunk: int, mode: str) -> Int[Array, "B T"]:
    """Where in its chunk each token's segment starts, -1 if before it; for "resets" alone."""
    if mode != "resets" or log_decay is None:
        return jnp.zeros(1, jnp.int32)
    resets = jnp.isneginf(log_decay[..., 0])
    batch, length = resets.shape
    resets = jnp.pad(resets, ((0, 0), (0, -length % chunk))).reshape(batch, -1, 1, chunk)
    place = jnp.arange(chunk, dtype=jnp.int32)
    seen = resets & (place <= place[:, None])
    return jnp.where(seen, place, -1).max(-1).reshape(batch, -1)[:, :length]


def _tiles(kernel: str, q: Array, chunk: int, mode: str) -> dict[str, int]:
    """Block sizes. With decays a program takes a whole chunk."""
    width = q.shape[-1]
    full = q.dtype == jnp.float32
    narrowest = 16 if full else NARROWEST
    widest = max(narrowest, 1 << (width - 1).bit_length())
    sequential = kernel in ("states", "adjoint")

    def candidate(a: int, b: int, rows: int, num_warps: int, num_stages: int) -> dict[str, int]:
        a, b, rows = min(a, widest), min(b, widest), min(rows, chunk)
        if kernel == "states":
            sizes = {"BT": a, "S": rows}
        elif kernel == "adjoint":
            sizes = {"BI": a, "BJ": b, "S": rows}
        else:
            sizes = {"BK": a, "BN": b, "R": rows}
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    if full:
        candidates = [candidate(32, 32, 32 if sequential else 64, 4, 1)]
    elif kernel == "states":
        wide = [candidate(128, 128, 128, 8, 2)] if widest == 128 else []
        candidates = [*wide, candidate(64, 64, 128, 4, 2), candidate(64, 64, 64, 4, 2)]
    elif kernel == "adjoint":
        candidates = [candidate(128, 64, 32, 4, 4), candidate(64, 64, 32, 4, 3)]
    else:
        # As much as stays in shared memory.
        whole = widest if widest <= (256 if kernel == "read" else 128) else 64
        candidates = [candidate(whole, 64, 64, 4, 2), candidate(64, 64, 64, 4, 2)]

    def shared(config: Mapping[str, int]) -> int:
        stages = config["num_stages"]
        if kernel == "states":
            elements = stages * config["S"] * 2 * config["BT"]
        elif kernel == "adjoint":
            elements = stages * 2 * config["S"] * (config["BI"] + config["BJ"])
        else:
            a, b, rows = config["BK"], config["BN"], config["R"]
            kept = a if a >= width else 0
            tiles = stages * (rows + 2 * chunk) * min(a, 64)
            elements = max(rows * kept + stages * (a + 2 * chunk) * b, (rows + chunk) * kept, tiles)
        return q.dtype.itemsize * elements

    shape = triton_util.bucket(q.dtype, width) + (" decay" if mode == "decay" else "")
    chosen = triton_util.choose(f"ccq_query.{kernel}", shape, candidates, shared)
    limits = {name: max(size, narrowest) for name, size in chosen.items() if name.startswith("B")}
    if kernel == "adjoint":
        limits["S"] = min(chosen["S"], chunk)
    elif kernel == "states":
        limits["S"] = chunk if mode == "resets" else min(max(chosen["S"], narrowest), chunk)
    else:
        limits["R"] = chunk if mode == "decay" else min(max(chosen["R"], narrowest), chunk)
    return chosen | limits


def _polynomial(d_state: CCQState, origin: Float[Array, "B H K"] | None) -> tuple[Array, ...]:
    """kappa, h and F about `origin`, or 0: how the final state's gradient depends on a key."""
    d_count, d_sum, d_outer = d_state
    f = d_outer + jnp.swapaxes(d_outer, -1, -2)
    if origin is None:
        return d_count, d_sum, f
    moved = einsum("bhij,bhj->bhi", f, origin)
    return d_count + jnp.sum(origin * (d_sum + 0.5 * moved), -1), d_sum + moved, f


def _initial_gradient(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    mean_g: Float[Array, "B T H"],
    centered: bool,
) -> CCQState:
    """Gradient of the initial state, from its definition; unused, it is not compiled.

    Row by row, so that a row's bits do not depend on the others. The count's gradient nearly
    cancels: it reads the covariance again, in float32.
    """
    r = residuals
    rows = (r.q, r.k, r.lam, r.log_decay, r.initial_state, r.n, r.mean_q, mean_g, d_out, d_state)

    def of_row(row: Any) -> CCQState:
        # A loop of one row is unrolled; the barriers keep what comes before and after out of it.
        row = jax.lax.optimization_barrier(row)
        q, k, lam, log_decay, initial, n, mean_q, mean_g, g, d_state = row
        one = jax.tree.map(lambda x: x[None], (jnp.ones_like(lam), log_decay, initial))
        q, k, g = (x.astype(jnp.float32) for x in (q, k, g))
        clean = xla.forward(q[None], k[None], *one, centered=centered, chunk_size=None)[0][0]
        product = jnp.sum(g * (q - clean), -1)  # g . Sigma q
        share = -lam.astype(jnp.float32) / n
        if log_decay is not None:
            total = jnp.cumsum(log_decay.astype(jnp.float32), 0)
            share = share * jnp.exp(total)
            left = jnp.exp(total[-1])
            d_state = CCQState(*(x * left.reshape(-1, *[1] * (x.ndim - 1)) for x in d_state))
        d_count = d_state.count + jnp.sum(share * (mean_q * mean_g - product), 0)
        d_sum = d_state.key_sum - einsum("th,thk->hk", share * mean_q, g)
        d_sum = d_sum - einsum("th,thk->hk", share * mean_g, q)
        d_outer = d_state.key_outer + einsum("thi,thj->hij", share[..., None] * g, q)
        return jax.lax.optimization_barrier(CCQState(d_count, d_sum, d_outer))

    return jax.lax.map(of_row, rows)
