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

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Residuals(NamedTuple):
    """What the backward needs. Entry c of the statistics is at the start of chunk c, the last at the end."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    lam: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"] | None
    initial_state: CCQState
    counts: Float[Array, "B H N"]
    means: Float[Array, "B H N K"]
    states: Float[Array, "B H N K K"]
    count: Float[Array, "B T H"]
    projection: Float[Array, "B T H"]


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
    from kernels.ccq_query import triton_kernels as kernels

    batch, length, heads, width = q.shape
    chunk, chunks = _chunks(q, chunk_size)
    static = {"H": heads, "K": width, "C": chunk}
    static |= {"HAS_DECAY": log_decay is not None, "CENTERED": centered}
    decay = lam if log_decay is None else log_decay  # not read without decay
    mean, sigma = _normalised(initial_state, k[:, 0], centered)

    config = _tiles("states", q, chunk)
    tiles = -(-width // config["BI"]) * -(-width // config["BJ"])
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    counts, means, states, final_sigma = triton_util.call(
        kernels.states_kernel,
        *(k, decay, initial_state.count, mean, sigma, length),
        out=(
            f32((batch, heads, chunks + 1)),
            f32((batch, heads, chunks + 1, width)),
            jax.ShapeDtypeStruct((batch, heads, chunks + 1, width, width), q.dtype),
            f32((batch, heads, width, width)),
        ),
        grid=(tiles * batch * heads,),
        **static,
        **config,
    )
    scalar = f32((batch, length, heads))
    out, projection, count, _, _ = triton_util.call(
        kernels.read_kernel,
        *(q, k, lam, decay, q, counts, means, states, length),
        out=(jax.ShapeDtypeStruct(q.shape, q.dtype), scalar, scalar, f32((1,)), f32((1,))),
        grid=(chunks * batch * heads,),
        BACKWARD=False,
        **static,
        **_tiles("read", q, chunk),
    )
    state = _raw(counts[..., -1], means[:, :, -1], final_sigma, centered)
    residuals = Residuals(
        *(q, k, lam, log_decay, initial_state),
        *(counts, means, states, count, projection),
    )
    return out, state, residuals


def backward(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    *,
    centered: bool,
    chunk_size: int | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k, lam, log_decay and initial_state."""
    from kernels.ccq_query import triton_kernels as kernels

    q, k, lam, log_decay, _, counts, means, states, count, projection = residuals
    batch, length, heads, width = q.shape
    chunk, chunks = _chunks(q, chunk_size)
    static = {"H": heads, "K": width, "C": chunk}
    static |= {"HAS_DECAY": log_decay is not None, "CENTERED": centered}
    decay = lam if log_decay is None else log_decay
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    scalar = f32((batch, length, heads))
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    d_out = d_out.astype(q.dtype)

    d_q, projection_d, _, d_lam, past = triton_util.call(
        kernels.read_kernel,
        *(d_out, k, lam, decay, q, counts, means, states, length),
        out=(like_q, scalar, f32((1,)), scalar, scalar),
        grid=(chunks * batch * heads,),
        BACKWARD=True,
        **static,
        **_tiles("read", q, chunk),
    )
    config = _tiles("adjoint", q, chunk)
    parts = -(-width // config["BJ"])
    tiles = -(-width // config["BI"]) * parts
    kappas, hs, fs, crossings = triton_util.call(
        kernels.adjoint_kernel,
        *(q, d_out, lam, decay, count, projection, projection_d, d_lam),
        *(counts, means, states, *_polynomial(d_state, _origins(means[:, :, -1], centered)), length),
        out=(
            f32((batch, heads, chunks, tiles)),
            f32((batch, heads, chunks, parts, width)),
            jax.ShapeDtypeStruct((batch, heads, chunks, width, width), q.dtype),
            f32((batch, heads, chunks, tiles)),
        ),
        grid=(tiles * batch * heads,),
        **static,
        **config,
    )
    d_k, d_log_decay = triton_util.call(
        kernels.keys_kernel,
        *(q, k, d_out, lam, decay, count, projection, projection_d, past),
        *(counts, means, kappas, hs, fs, crossings, length),
        out=(like_q, scalar),
        grid=(chunks * batch * heads,),
        TILES=tiles,
        PARTS=parts,
        **static,
        **_tiles("keys", q, chunk),
    )
    d_initial = _initial_gradient(residuals, d_out, d_state, projection_d, d_lam, chunk, centered)
    d_lam = d_lam.astype(lam.dtype)
    if log_decay is None:
        return d_q, d_k, d_lam, None, d_initial
    return d_q, d_k, d_lam, d_log_decay.astype(log_decay.dtype), d_initial


def _chunks(q: Array, chunk_size: int | None) -> tuple[int, int]:
    """Tokens a chunk and chunks. The scores of a chunk live in registers: 128 tokens at most."""
    chunk = chunk_size or (64 if q.dtype == jnp.float32 else 128)
    chunk = min(chunk, 64 if q.dtype == jnp.float32 else 128)
    return chunk, -(-q.shape[1] // chunk)


def _tiles(kernel: str, q: Array, chunk: int) -> dict[str, int]:
    width = q.shape[-1]
    widest = max(16, 1 << (width - 1).bit_length())
    sequential = kernel in ("states", "adjoint")

    def candidate(a: int, b: int, step: int, num_warps: int, num_stages: int) -> dict[str, int]:
        sizes = {"BI": a, "BJ": b, "S": min(step, chunk)} if sequential else {"BK": a, "BN": b}
        sizes = {name: min(size, widest) if name != "S" else size for name, size in sizes.items()}
        return sizes | {"num_warps": num_warps, "num_stages": num_stages}

    if q.dtype == jnp.float32:
        candidates = [candidate(32, 32, 32, 4, 1)]
    elif sequential:
        candidates = [candidate(128, 128, 64, 8, 2), candidate(64, 64, 64, 4, 2)]
    else:
        candidates = [candidate(64, 128, 0, 8, 2), candidate(32, 64, 0, 8, 2)]

    def shared(config: Mapping[str, int]) -> int:
        a, b = (config["BI"], config["BJ"]) if sequential else (config["BK"], config["BN"])
        rows = config["S"] if sequential else chunk
        return q.dtype.itemsize * config["num_stages"] * (a * b + 2 * rows * (a + b))

    shape = triton_util.bucket(q.dtype, width)
    return triton_util.choose(f"ccq_query.{kernel}", shape, candidates, shared)


def _normalised(
    state: CCQState, first_key: Float[Array, "B H K"], centered: bool
) -> tuple[Float[Array, "B H K"], Float[Array, "B H K K"]]:
    """Mean and Sigma. Of no tokens they are irrelevant, but the mean is the first chunk's origin."""
    count = state.count[..., None]
    seen = count > 0
    mean = jnp.where(seen, state.key_sum / jnp.where(seen, count, 1), first_key)
    sigma = state.key_outer / jnp.where(seen, count, 1)[..., None]
    if centered:
        sigma = sigma - mean[..., :, None] * mean[..., None, :]
    return mean, jnp.where(seen[..., None], sigma, 0)


def _raw(
    count: Float[Array, "B H"],
    mean: Float[Array, "B H K"],
    sigma: Float[Array, "B H K K"],
    centered: bool,
) -> CCQState:
    if centered:
        sigma = sigma + mean[..., :, None] * mean[..., None, :]
    return CCQState(count, count[..., None] * mean, count[..., None, None] * sigma)


def _origins(means: Array, centered: bool) -> Array:
    return means if centered else jnp.zeros_like(means)


def _polynomial(d_state: CCQState, origin: Float[Array, "B H K"]) -> tuple[Array, Array, Array]:
    """kappa, h and F about `origin`: how the final state's gradient depends on a key."""
    d_count, d_sum, d_outer = d_state
    f = d_outer + jnp.swapaxes(d_outer, -1, -2)
    moved = einsum("bhij,bhj->bhi", f, origin)
    kappa = d_count + jnp.sum(origin * (d_sum + 0.5 * moved), -1)
    return kappa, d_sum + moved, f


def _initial_gradient(
    residuals: Residuals,
    d_out: Float[Array, "B T H K"],
    d_state: CCQState,
    projection_d: Float[Array, "B T H"],
    d_lam: Float[Array, "B T H"],
    chunk: int,
    centered: bool,
) -> CCQState:
    """Gradient of the initial state, from its definition. Compiled only where someone asks for it."""
    q, _, lam, log_decay, _, _, means, _, count, projection = residuals
    share = -lam.astype(jnp.float32) / count
    if log_decay is not None:
        total = jnp.cumsum(log_decay.astype(jnp.float32), 1)
        share = share * jnp.exp(total)
        d_state = jax.tree.map(lambda x: _scale(x, jnp.exp(total[:, -1])), d_state)
    origin = _origins(jnp.moveaxis(means[:, :, :-1], 2, 1), centered)
    origin = jnp.repeat(origin, chunk, 1)[:, : q.shape[1]]
    q, g = q.astype(jnp.float32), d_out.astype(jnp.float32)
    mean_q = projection + jnp.sum(q * origin, -1)
    mean_g = projection_d + jnp.sum(g * origin, -1)
    d_count = d_state.count + jnp.sum(share * (mean_q * mean_g + d_lam), 1)
    d_sum = d_state.key_sum - einsum("bth,bthk->bhk", share * mean_q, g)
    d_sum = d_sum - einsum("bth,bthk->bhk", share * mean_g, q)
    d_outer = d_state.key_outer + einsum("bthi,bthj->bhij", share[..., None] * g, q)
    return CCQState(d_count, d_sum, d_outer)


def _scale(x: Array, by: Float[Array, "B H"]) -> Array:
    return x * by.reshape(by.shape + (1,) * (x.ndim - by.ndim))
