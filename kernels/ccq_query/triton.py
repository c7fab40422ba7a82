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
from jaxtyping import Array, Float

from kernels import triton_util
from kernels.ccq_query.state import CCQState

unavailable = triton_util.unavailable

# Rows of 16-bit tiles: narrower ones are miscompiled, see `triton_kernels`.
NARROWEST = 64

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Residuals(NamedTuple):
    """What the backward needs. The statistics are at the chunks' starts, and last at the end."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    lam: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"] | None
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
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H K"], CCQState, Residuals]:
    """Cleaned queries and final statistics; see `kernels.ccq_query`."""
    from kernels.ccq_query import triton_kernels

    batch, length, heads, width = q.shape
    chunk, chunks = _chunks(q, log_decay, chunk_size)
    static = {"H": heads, "K": width, "C": chunk}
    static |= {"HAS_DECAY": log_decay is not None, "CENTERED": centered}
    decay = lam if log_decay is None else log_decay  # not read without decay

    config = _tiles("states", q, chunk, log_decay is not None)
    tiles = -(-width // config["BI"]) * -(-width // config["BJ"])
    counts, means, states, *final = triton_util.call(
        triton_kernels.states_kernel,
        *(k, decay, *initial_state, length),
        out=(
            f32((batch, heads, chunks + 1)),
            f32((batch, heads, chunks + 1, width)),
            like(q, (batch, heads, chunks + 1, width, width)),
            f32((batch, heads, width)),
            f32((batch, heads, width, width)),
        ),
        grid=(tiles * batch * heads,),
        **static,
        **config,
    )
    config = _tiles("read", q, chunk, log_decay is not None)
    scalar, unused = f32((batch, length, heads)), f32((1,))
    out, p, mean_q, n, *_ = triton_util.call(
        triton_kernels.read_kernel,
        *(q, k, lam, decay, q, counts, counts, means, states, length),
        out=(like(q), scalar, scalar, scalar, unused, unused, like(q, (1,)), unused, unused),
        grid=(chunk // config["R"] * chunks * batch * heads,),
        BACKWARD=False,
        **static,
        **config,
    )
    state = CCQState(counts[..., -1], *final)
    inputs = (q, k, lam, log_decay)
    return out, state, Residuals(*inputs, counts, means, states, n, p, mean_q)


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, lam, log_decay and initial_state."""
    from kernels.ccq_query import triton_gradients, triton_kernels

    q, k, lam, log_decay, counts, means, states, n, p, mean_q = residuals
    batch, length, heads, width = q.shape
    has_decay = log_decay is not None
    chunk, chunks = _chunks(q, log_decay, chunk_size)
    static = {"H": heads, "K": width, "C": chunk, "HAS_DECAY": has_decay, "CENTERED": centered}
    decay = lam if log_decay is None else log_decay
    scalar, unused = f32((batch, length, heads)), f32((1,))
    d_out = d_out.astype(q.dtype)

    config = _tiles("read", q, chunk, has_decay)
    blocks = chunk // config["R"]
    terms = batch, heads, chunks, blocks
    d_q, p_g, mean_g, _, d_lam, past, shares, h_terms, kappa_terms = triton_util.call(
        triton_kernels.read_kernel,
        *(d_out, k, lam, decay, q, p, counts, means, states, length),
        out=(
            *(like(q), scalar, scalar, unused, scalar, scalar),
            *(like(q), f32((*terms, width)), f32(terms)),
        ),
        grid=(blocks * chunks * batch * heads,),
        BACKWARD=True,
        **static,
        **config,
    )
    config = _tiles("adjoint", q, chunk, has_decay)
    parts = -(-width // config["BJ"])
    tiles = -(-width // config["BI"]) * parts
    polynomial = _polynomial(d_state, means[:, :, -1] if centered else None)
    kappas, hs, slopes, fs, crossings = triton_util.call(
        triton_gradients.adjoint_kernel,
        *(shares, d_out, decay, h_terms, kappa_terms, counts, means, states, *polynomial, length),
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
    config = _tiles("keys", q, chunk, has_decay)
    d_k, d_log_decay = triton_util.call(
        triton_gradients.keys_kernel,
        *(q, k, d_out, lam, decay, n, p, p_g, mean_q, mean_g, past, counts, means),
        *(kappas, hs, slopes, fs, crossings, length),
        out=(like(q), scalar),
        grid=(chunk // config["R"] * chunks * batch * heads,),
        TILES=tiles,
        PARTS=parts,
        **static,
        **config,
    )
    d_initial = _initial_gradient(residuals, d_out, d_state, mean_g, d_lam)
    d_lam = d_lam.astype(lam.dtype)
    if log_decay is None:
        return d_q, d_k, d_lam, None, d_initial
    return d_q, d_k, d_lam, d_log_decay.astype(log_decay.dtype), d_initial


def f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def like(x: Array, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _chunks(q: Array, log_decay: Array | None, chunk_size: int | None) -> tuple[int, int]:
    """Tokens a chunk, and chunks. Longer ones write fewer states, and take more work inside."""
    if q.dtype == jnp.float32:
        chunk = min(chunk_size or 64, 64)
    else:
        default = 128 if log_decay is None and q.shape[-1] > 128 else 64
        chunk = min(max(chunk_size or default, NARROWEST), 128)
    return chunk, -(-q.shape[1] // chunk)


def _tiles(kernel: str, q: Array, chunk: int, has_decay: bool) -> dict[str, int]:
    """Block sizes. With decays a program takes a whole chunk."""
    width = q.shape[-1]
    full = q.dtype == jnp.float32
    narrowest = 16 if full else NARROWEST
    widest = max(narrowest, 1 << (width - 1).bit_length())
    sequential = kernel in ("states", "adjoint")

    def candidate(a: int, b: int, rows: int, num_warps: int, num_stages: int) -> dict[str, int]:
        a, b, rows = min(a, widest), min(b, widest), min(rows, chunk)
        sizes = {"BI": a, "BJ": b, "S": rows} if sequential else {"BK": a, "BN": b, "R": rows}
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    if full:
        candidates = [candidate(32, 32, 32 if sequential else 64, 4, 1)]
    elif kernel == "states":
        candidates = [candidate(128, 128, 128, 8, 2), candidate(64, 64, 64, 4, 2)]
    elif kernel == "adjoint":
        candidates = [candidate(128, 64, 32, 4, 4), candidate(64, 64, 32, 4, 3)]
    else:
        # As much as stays in shared memory.
        whole = widest if widest <= (256 if kernel == "read" else 128) else 64
        candidates = [candidate(whole, 64, 64, 4, 2), candidate(64, 64, 64, 4, 2)]

    def shared(config: Mapping[str, int]) -> int:
        stages = config["num_stages"]
        if sequential:
            operands = 1 if kernel == "states" else 2
            elements = stages * operands * config["S"] * (config["BI"] + config["BJ"])
        else:
            a, b, rows = config["BK"], config["BN"], config["R"]
            kept = a if a >= width else 0
            tiles = stages * (rows + 2 * chunk) * min(a, 64)
            elements = max(rows * kept + stages * (a + 2 * chunk) * b, (rows + chunk) * kept, tiles)
        return q.dtype.itemsize * elements

    shape = triton_util.bucket(q.dtype, width) + (" decay" if has_decay else "")
    chosen = triton_util.choose(f"ccq_query.{kernel}", shape, candidates, shared)
    limits = {name: max(size, narrowest) for name, size in chosen.items() if name.startswith("B")}
    if kernel == "adjoint":
        limits["S"] = min(chosen["S"], chunk)
    elif kernel == "states":
        limits["S"] = min(max(chosen["S"], narrowest), chunk)
    else:
        limits["R"] = chunk if has_decay else min(max(chosen["R"], narrowest), chunk)
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
    d_lam: Float[Array, "B T H"],
) -> CCQState:
    """Gradient of the initial state, from its definition; unused, it is not compiled."""
    share = -residuals.lam.astype(jnp.float32) / residuals.n
    if residuals.log_decay is not None:
        total = jnp.cumsum(residuals.log_decay.astype(jnp.float32), 1)
        share = share * jnp.exp(total)
        d_state = CCQState(*(_scale(x, jnp.exp(total[:, -1])) for x in d_state))
    q, g = residuals.q.astype(jnp.float32), d_out.astype(jnp.float32)
    mean_q = residuals.mean_q
    d_count = d_state.count + jnp.sum(share * (mean_q * mean_g + d_lam), 1)
    d_sum = d_state.key_sum - einsum("bth,bthk->bhk", share * mean_q, g)
    d_sum = d_sum - einsum("bth,bthk->bhk", share * mean_g, q)
    d_outer = d_state.key_outer + einsum("bthi,bthj->bhij", share[..., None] * g, q)
    return CCQState(d_count, d_sum, d_outer)


def _scale(x: Array, by: Float[Array, "B H"]) -> Array:
    return x * by.reshape(by.shape + (1,) * (x.ndim - by.ndim))
