"""Gated delta rule on GPUs: chunked Triton kernels, called through jax-triton.

Forward: `prepare` (what the tokens of a chunk do to each other, all chunks at once), then
`forward`, which walks the sequence. Backward: `states` walks it again and keeps the state that
enters each chunk, `reverse` walks back with the state's gradient, `gradient` finishes all chunks at
once. Nothing of the size of the chunks' states outlives a call. On Hopper `hopper` has others for most
shapes.

Few heads and a long sequence would leave most of the GPU idle. Then the sequence is cut into parts
that are walked at once, after a first walk has found how each part maps the state that enters it to
the one that leaves it: S' = transition S + written.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import triton_util
from kernels.gated_delta_rule import hopper

NAME = "gated_delta_rule"
GATE_ROWS = 5
# Shorter sequences are one part. The batch has no say: its rows must not depend on its size.
LONG = 16384
SHORTEST_PART = 2048
Config = dict[str, int]

unavailable = triton_util.unavailable


class Inputs(NamedTuple):
    """The arrays of a call that have a time axis, cut into parts along it."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T HV V"]
    log_decay: Float[Array, "B T HV"]
    beta: Float[Array, "B T HV"]


class Prepared(NamedTuple):
    """What the tokens of a chunk do to each other."""

    gates: Float[Array, "B HV chunks 5 C"]
    corrections: Float[Array, "B HV chunks C C"]
    scores: Float[Array, "B HV chunks C C"]


def forward(q, k, v, log_decay, beta, initial_state, *, scale, chunk_size=None):
    """See `kernels.dispatch`; chunks of up to 64 tokens."""
    inputs = Inputs(q, k, v, log_decay, beta)
    parts = _parts(v)
    cut = _cut(inputs, parts)
    chunk = _chunk("forward", q, v, chunk_size)
    # Float16 keeps three more bits than bfloat16.
    prepared = _prepare(cut, scale, chunk, jnp.float32 if q.dtype == jnp.float32 else jnp.float16)
    starts, transitions = initial_state, None
    if parts > 1:
        starts, transitions = _starts(cut, prepared, initial_state, parts)
    out, _, _, last = _walk(cut, prepared, starts, scale=scale, output=True)
    state = last.reshape(-1, parts, *last.shape[1:])[:, -1]
    # The terms are small; only where the backward's chunk is another are they computed again.
    kept = prepared if chunk == _chunk("backward", q, v, chunk_size) else None
    return out.reshape(v.shape), state, (inputs, kept, starts, transitions)


def backward(residuals, d_out, d_state, *, scale, chunk_size=None):
    """See `kernels.dispatch`."""
    inputs, kept, starts, transitions = residuals
    batch = inputs.q.shape[0]
    parts = starts.shape[0] // batch
    cut = _cut(inputs, parts)
    d_out = d_out.reshape(cut.v.shape)
    chunk = _chunk("backward", inputs.q, inputs.v, chunk_size)
    prepared = kept or _prepare(cut, scale, chunk, inputs.q.dtype)
    _, u, states, _ = _walk(cut, prepared, starts, scale=scale, states=True)
    d_ends = d_state
    if parts > 1:
        d_ends = _ends(cut, prepared, d_out, d_state, transitions, scale)
    d_v, d_states, d_starts = _walk_back(cut, prepared, d_out, d_ends, scale, states=True)
    d_q, d_k, d_decay, d_beta = _gradient(
        cut, prepared.gates, d_out, d_v, u, states, d_states, scale
    )
    gradients = (d_q, d_k, d_v, d_decay, d_beta)
    d_initial = d_starts.reshape(batch, parts, *d_starts.shape[1:])[:, 0]
    return *(x.reshape(y.shape) for x, y in zip(gradients, inputs, strict=True)), d_initial


def _parts(v: Float[Array, "B T HV V"]) -> int:
    """Into how many parts a sequence is cut: a power of two that divides it."""
    _, length, heads, value_dim = v.shape
    if length < LONG:
        return 1
    blocks = heads * -(-value_dim // 64)
    wanted = min(2 * triton_util.num_cores() // blocks, length // SHORTEST_PART)
    parts = 1
    while 2 * parts <= wanted and length % (2 * parts) == 0:
        parts *= 2
    return parts


def _cut(inputs: Inputs, parts: int) -> Inputs:
    """Makes every part a row of the batch."""
    batch, length = inputs.q.shape[:2]
    shape = (batch * parts, length // parts)
    return Inputs(*(x.reshape(*shape, *x.shape[2:]) for x in inputs))


def _starts(cut: Inputs, prepared: Prepared, initial_state: Array, parts: int) -> Any:
    """The state that enters each part, and each part's transition."""
    rows, _, heads, key_dim = (*cut.v.shape[:3], cut.k.shape[3])
    zeros = jnp.zeros((rows, *initial_state.shape[1:]), jnp.float32)
    written = _walk(cut, prepared, zeros)[3]
    identity = jnp.broadcast_to(jnp.eye(key_dim), (rows, heads, key_dim, key_dim))
    transitions = _walk(cut, prepared, identity, values=False)[3]

    def step(state: Array, part: Any) -> Any:
        transition, written = part
        product = jnp.einsum("bhkj,bhjv->bhkv", transition, state, precision="highest")
        return product + written, state

    by_part = functools.partial(_by_part, parts=parts)
    _, starts = jax.lax.scan(step, initial_state, (by_part(transitions), by_part(written)))
    return starts.swapaxes(0, 1).reshape(zeros.shape), transitions


def _ends(cut, prepared, d_out, d_state, transitions, scale):
    """The gradient of the state that leaves each part."""
    parts = transitions.shape[0] // d_state.shape[0]
    zeros = jnp.zeros((transitions.shape[0], *d_state.shape[1:]), jnp.float32)
    read = _walk_back(cut, prepared, d_out, zeros, scale)[2]

    def step(d_end: Array, part: Any) -> Any:
        transition, read = part
        product = jnp.einsum("bhjk,bhjv->bhkv", transition, d_end, precision="highest")
        return product + read, d_end

    by_part = functools.partial(_by_part, parts=parts)
    terms = (by_part(transitions), by_part(read))
    _, ends = jax.lax.scan(step, d_state, terms, reverse=True)
    return ends.swapaxes(0, 1).reshape(zeros.shape)


def _by_part(x: Array, parts: int) -> Array:
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)


def _prepare(inputs: Inputs, scale: float, chunk: int, dtype: Any) -> Prepared:
    from kernels.gated_delta_rule import triton_kernels

    q, k, v, log_decay, beta = inputs
    if hopper.can_prepare(k, chunk):
        return Prepared(*hopper.prepare(q, k, log_decay, beta, scale, dtype))
    tiles = (q.shape[0], v.shape[2], -(-q.shape[1] // chunk))
    squares = (jax.ShapeDtypeStruct((*tiles, chunk, chunk), dtype) for _ in range(2))
    rows = (jax.ShapeDtypeStruct((*tiles, x, chunk), jnp.float32) for x in (GATE_ROWS, 16))
    gates, scratch = rows
    *prepared, _ = triton_util.call(
        triton_kernels.prepare_kernel,
        *(q, k, log_decay, beta),
        out=(gates, *squares, scratch),
        grid=(tiles[0] * tiles[1] * tiles[2],),
        T=q.shape[1],
        scale=scale,
        INVERSE_PRECISION="ieee" if q.dtype == jnp.float32 else "tf32x3",
        **_static(inputs, chunk),
        **_config("prepare", inputs, chunk),
    )
    return Prepared(*prepared)


def _walk(inputs, prepared, starts, *, scale=1.0, values=True, output=False, states=False):
    """(out, beta u of each chunk, state that enters each chunk, final state), as asked for."""
    from kernels.gated_delta_rule import triton_kernels

    q, k, v, _, beta = inputs
    gates, corrections, scores = prepared
    tiles, chunk = gates.shape[:3], gates.shape[-1]
    key_dim, value_dim = starts.shape[2:]
    if hopper.can_walk(k, value_dim, chunk):
        return hopper.walk(
            *(q, k, v, beta, *prepared, starts, scale), values=values, output=output, states=states
        )
    config = _config("states" if states else "forward", inputs, chunk)
    unwritten = jax.ShapeDtypeStruct((1,), q.dtype)
    return triton_util.call(
        triton_kernels.forward_kernel,
        *(q, k, v, beta, gates, corrections, scores, starts),
        out=(
            jax.ShapeDtypeStruct(v.shape, v.dtype) if output else unwritten,
            jax.ShapeDtypeStruct((*tiles, value_dim, chunk), q.dtype) if states else unwritten,
            jax.ShapeDtypeStruct((*tiles, value_dim, key_dim), q.dtype) if states else unwritten,
            jax.ShapeDtypeStruct(starts.shape, jnp.float32),
        ),
        grid=(_blocks(value_dim, config["BLOCK_V"]) * tiles[0] * tiles[1],),
        T=q.shape[1],
        scale=scale,
        V=value_dim,
        VALUES=values,
        OUTPUT=output,
        STATES=states,
        **_static(inputs, chunk),
        **config,
    )


def _walk_back(inputs, prepared, d_out, d_ends, scale, *, states=False):
    """(dv, gradient of the state that leaves each chunk, gradient of the state at the start)."""
    from kernels.gated_delta_rule import triton_kernels

    q, k, v, _, _ = inputs
    gates, corrections, scores = prepared
    tiles, chunk = gates.shape[:3], gates.shape[-1]
    key_dim, value_dim = d_ends.shape[2:]
    if hopper.can_walk(k, value_dim, chunk):
        return hopper.walk_back(q, k, d_out, *prepared, d_ends, scale, states=states)
    config = _config("reverse", inputs, chunk)
    unwritten = jax.ShapeDtypeStruct((1,), q.dtype)
    return triton_util.call(
        triton_kernels.reverse_kernel,
        *(q, k, gates, corrections, scores, d_out, d_ends),
        out=(
            jax.ShapeDtypeStruct(v.shape, v.dtype) if states else unwritten,
            jax.ShapeDtypeStruct((*tiles, value_dim, key_dim), q.dtype) if states else unwritten,
            jax.ShapeDtypeStruct(d_ends.shape, jnp.float32),
        ),
        grid=(_blocks(value_dim, config["BLOCK_V"]) * tiles[0] * tiles[1],),
        T=q.shape[1],
        scale=scale,
        V=value_dim,
        STATES=states,
        **_static(inputs, chunk),
        **config,
    )


def _gradient(inputs, gates, d_out, d_v, u, states, d_states, scale):
    """(dq, dk, dlog_decay, dbeta)."""
    from kernels.gated_delta_rule import triton_kernels

    q, k, v, log_decay, beta = inputs
    batch, length, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    chunk = gates.shape[-1]
    if hopper.can_differentiate(k, v, chunk):
        d_q, d_k, d_decay, d_beta = hopper.gradient(
            *(q, k, log_decay, beta, gates, d_out, d_v, u, states, d_states, scale)
        )
    else:
        config = _config("gradient", inputs, chunk)
        # Value heads that share a key head add up in float32.
        per_head = q.dtype if value_heads == heads else jnp.float32
        columns = _blocks(key_dim, config["BLOCK_K"])
        keys = jax.ShapeDtypeStruct((batch, length, value_heads, key_dim), per_head)
        gate_parts = jax.ShapeDtypeStruct((columns, batch, length, value_heads), jnp.float32)
        d_q, d_k, d_decay, d_beta = triton_util.call(
            triton_kernels.gradient_kernel,
            *(q, k, log_decay, beta, gates, d_out, d_v, u, states, d_states),
            out=(keys, keys, gate_parts, gate_parts),
            grid=(columns * batch * value_heads * gates.shape[2],),
            T=length,
            scale=scale,
            V=value_dim,
            **_static(inputs, chunk),
            **config,
        )
    if value_heads != heads:
        shape = (batch, length, heads, value_heads // heads, key_dim)
        d_q, d_k = (
            _total(jnp.moveaxis(x.reshape(shape), 3, 0)).astype(q.dtype) for x in (d_q, d_k)
        )
    return d_q, d_k, _total(d_decay).astype(log_decay.dtype), _total(d_beta).astype(beta.dtype)


def _total(parts: Array) -> Array:
    """The sum over the first axis, one after the other: XLA would choose an order by the batch's size."""
    return functools.reduce(jnp.add, parts)


def _static(inputs: Inputs, chunk: int) -> dict[str, Any]:
    heads, key_dim = inputs.k.shape[2:]
    value_heads = inputs.v.shape[2]
    return {"H": heads, "HV": value_heads, "K": key_dim, "C": chunk, "PRECISION": "ieee"}


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _chunk(direction: str, q: Array, v: Array, chunk_size: int | None) -> int:
    """Tokens of a chunk: as asked for up to 64, or less where shared memory is small.

    Wide keys leave the forward's walk short of registers, so that it takes shorter chunks, but for
    Hopper's; the backward keeps a state for each chunk, so that it takes longer ones.
    """
    longest = min(chunk_size or 64, 64)
    if hopper.can_walk(q, v.shape[3], longest):
        return longest
    key_dim = q.shape[3]
    short = q.dtype == jnp.float32 or (direction == "forward" and key_dim > 128)
    chunk = min(longest, 32) if short and chunk_size is None else longest
    limit = triton_util.shared_memory(triton_util.device_kind())
    smallest = _candidates(direction, q.dtype, key_dim, 16)[-1]
    while chunk > 16 and _shared(direction, smallest, q.dtype, chunk, key_dim) > limit:
        chunk //= 2
    return chunk


def _config(kernel: str, inputs: Inputs, chunk: int) -> Config:
    dtype, key_dim, value_dim = inputs.q.dtype, inputs.k.shape[3], inputs.v.shape[3]
    return triton_util.choose(
        f"{NAME}.{kernel}",
        triton_util.bucket(dtype, key_dim, value_dim),
        _candidates(kernel, dtype, key_dim, value_dim),
        lambda config: _shared(kernel, config, dtype, chunk, key_dim),
    )


def _candidates(kernel: str, dtype: Any, key_dim: int, value_dim: int) -> list[Config]:
    """Block sizes to try, best first, for a device that the tuned table does not know."""

    def config(block_k: int, block_v: int, num_warps: int, num_stages: int) -> Config:
        blocks = {"BLOCK_K": min(block_k, _round(key_dim)), "num_warps": num_warps}
        if kernel != "prepare":
            blocks["BLOCK_V"] = min(block_v, _round(value_dim))
        return {**blocks, "num_stages": num_stages}

    if dtype == jnp.float32:  # without tensor cores a matmul unrolls into one instruction a term
        return [config(32 if kernel == "prepare" else 64, 16, 4, 1)]
    if kernel == "prepare":
        return [config(64, 0, 4, 1), config(32, 0, 4, 1)]
    if kernel == "gradient":
        return [config(64, 64, 4, 2), config(64, 32, 4, 1), config(32, 32, 4, 1)]
    if key_dim > 256:
        return [config(64, 32, 4, 1), config(64, 16, 4, 1)]
    return [config(64, 64, 4, 2), config(64, 64, 4, 1), config(64, 32, 4, 1)]


def _shared(kernel: str, config: Mapping[str, int], dtype: Any, chunk: int, key_dim: int) -> int:
    """An upper estimate of a block's shared memory in bytes: its tiles, once a stage."""
    block_k, block_v = config["BLOCK_K"], config.get("BLOCK_V", 0)
    if kernel == "prepare":
        tiles = 2 * chunk * block_k
    elif kernel == "gradient":
        tiles = (3 * chunk + 2 * block_k) * block_v
    else:
        tiles = 2 * chunk * (_blocks(key_dim, block_k) * block_k + block_v + chunk)
    rest = 2 * chunk * max(chunk, block_k)
    return (config["num_stages"] * tiles + rest) * jnp.dtype(dtype).itemsize


def _round(dim: int) -> int:
    """The smallest block that holds `dim`: a power of two, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())
