"""What the Triton implementations share: availability, the kernel call, tuned block sizes.

Triton kernels themselves live beside each operator in modules that import nothing but Triton.
This module imports without Triton or jax-triton installed.
"""

import contextlib
import functools
import importlib
import json
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels import gluon_util

TABLE = pathlib.Path(__file__).with_name("tuned.json")
MINIMUM = {"triton": (3, 7, 1), "jax_triton": (0, 4)}
# Opt-in shared memory of one block, in bytes, for devices that do not say it themselves.
SHARED_MEMORY = {
    gluon_util.HOPPER: 232448,
    r"\b(B200|GB200|B300|GB300)\b": 232448,
    r"\bA(100|30)\b": 166912,
}
SMALLEST_SHARED_MEMORY = 101376

# What `choose` chose last for each kernel and bucket, and after it what else fits: where `tune` starts.
CHOSEN: dict[tuple[str, str], list[dict[str, int]]] = {}
_poison = False


def missing_packages() -> str | None:
    """Says which package the Triton implementations lack, or None when all are there."""
    for name, minimum in MINIMUM.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error}); pip install 'ccq_jax[gpu]'"
        found = tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:3])
        if found < minimum:
            need = ".".join(map(str, minimum))
            return f"{name} is {module.__version__}, and {need} or later is needed"
    return None


def unavailable() -> str | None:
    """Says why Triton kernels cannot run in this process, or None when they can."""
    platforms = sorted({device.platform for device in jax.devices()})
    if platforms != ["gpu"]:
        return f"Triton needs a GPU, and JAX's devices here are {', '.join(platforms)}"
    return missing_packages()


def device_kind() -> str:
    """The kind of GPU that the current trace is for, such as "NVIDIA H200"."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind


def num_cores() -> int:
    """Multiprocessors of the GPU that the current trace is for; 132, an H100's, where unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or 132
    return getattr(jax.devices()[0], "core_count", 132)


def shared_memory(kind: str) -> int:
    """Shared memory in bytes that one block may use on a device of this kind."""
    for device in jax.devices():
        if device.device_kind == kind and hasattr(device, "shared_memory_per_block_optin"):
            return device.shared_memory_per_block_optin
    matches = (size for pattern, size in SHARED_MEMORY.items() if re.search(pattern, kind))
    return next(matches, SMALLEST_SHARED_MEMORY)


def bucket(dtype: Any, key_dim: int, value_dim: int = 0) -> str:
    """The tuned table's name of a shape, such as "bfloat16 K256 V512".

    Head dimensions round up to a power of two; the number of tokens and heads does not matter.
    """
    dims = {"K": key_dim, "V": value_dim}
    rounded = [f"{name}{1 << (dim - 1).bit_length()}" for name, dim in dims.items() if dim]
    return " ".join([jnp.dtype(dtype).name, *rounded])


@functools.cache
def tuned_table() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Block sizes by device kind, kernel and bucket, as `python -m kernels.tune` wrote them."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@functools.cache
def warn_untuned(kind: str) -> None:
    warnings.warn(
        f"{kind!r} has no tuned block sizes in {TABLE.name}: a heuristic chooses them."
        " `python -m kernels.tune` on this device writes its entries.",
        stacklevel=3,
    )


def choose(
    kernel: str,
    shape: str,
    candidates: Sequence[Mapping[str, int]],
    shared: Callable[[Mapping[str, int]], int],
    fit: Callable[[str, int], int] = lambda name, value: value,
) -> dict[str, int]:
    """Block sizes, num_warps and num_stages for one kernel on the current device.

    The tuned table's entry if there is one, else the first of `candidates` (best first) whose
    shared memory, as `shared` estimates it in bytes, the device has. When none fits it is the
    last, the smallest.

    Args:
      kernel: the kernel's name in the table, such as "gated_delta_rule.state".
      shape: the shape's `bucket`.
      candidates: keyword arguments for `call`, best first.
      shared: bytes of shared memory that a block of this candidate takes.
      fit: makes a number, given by name, of other shapes in the bucket fit this one.
    """
    kind = device_kind()
    entries = tuned_table().get(kind)
    if entries is None:
        warn_untuned(kind)
        entries = {}
    tuned = entries.get(kernel, {}).get(shape)
    limit = shared_memory(kind)
    fitting = [config for config in candidates if shared(config) <= limit] or [candidates[-1]]
    fitted = [
        {name: fit(name, value) for name, value in config.items()}
        for config in ([tuned] if tuned else []) + fitting
    ]
    CHOSEN[kernel, shape] = fitted
    return dict(fitted[0])


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Kernels traced within write over NaN, so that what they leave unwritten can be seen."""
    global _poison
    _poison = True
    try:
        yield
    finally:
        _poison = False


def in_place(x: jax.Array) -> jax.Ref:
    """For a kernel to update: the caller's buffer where that is donated, else a copy.

    The barriers here and in `after` keep XLA (of JAX 0.11.2) from fusing the kernel with a slice that
    x is, or with an update of a larger array by the result: within such a fusion the kernel still writes
    through its operand, so into the array that x is a slice of, and its result is never written.
    """
    return jax.new_ref(jax.lax.optimization_barrier(x))


def after(ref: jax.Ref) -> jax.Array:
    """What a kernel left in a buffer of `in_place`."""
    return jax.lax.optimization_barrier(jax.freeze(ref))


def f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A result of a kernel in float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def like(x: jax.Array, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """A result of a kernel in x's dtype and, if no other is given, of its shape."""
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _poisoned(x: Any) -> Any:
    """What a result is written over: NaN, or what the kernel asks for."""
    if isinstance(x, gluon_util.Tiles):
        return gluon_util.Tiles(_poisoned(x.array), x.block)
    return x if isinstance(x, jax.Array) else jnp.full(x.shape, jnp.nan, x.dtype)


def call(
    kernel: Any,
    *operands: jax.Array | jax.Ref | gluon_util.Tiles | int | float,
    out: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    maxnreg: int | None = None,
    **constants: Any,
) -> Any:
    """Launches a Triton kernel whose arguments are `operands`, then pointers to `out`.

    Args:
      kernel: a function under `triton.jit` or `gluon.jit`; see `gluon_util` for the latter.
      operands: arrays, Refs that it updates in place, and numbers (compiled once for all values)
        such as the sequence length.
      out: `jax.ShapeDtypeStruct`s, any pytree; the result has the same structure. The kernel must
        write every element. The first may be arrays, if it is a Gluon kernel, which it updates.
      grid: blocks along up to three axes; the first may pass 65,535.
      num_warps: warps a block.
      num_stages: depth of the software pipeline, which Gluon kernels write out themselves.
      maxnreg: registers a thread, if fewer than Triton's compiler would take, so that more blocks fit.
      constants: the kernel's constexpr arguments, and numbers that it takes by name.
    """
    if gluon_util.is_gluon(kernel):
        over = jax.tree.map(_poisoned, out) if _poison else out
        results = gluon_util.launch(
            kernel, *operands, out=over, grid=grid, num_warps=num_warps, **constants
        )
    else:
        import jax_triton

        launch = functools.partial(
            jax_triton.triton_call,
            *operands,
            kernel=kernel,
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            backend_options={} if maxnreg is None else {"maxnreg": maxnreg},
            **constants,
        )
        if _poison:
            filled = jax.tree.map(lambda x: in_place(_poisoned(x)), out)
            launch(*jax.tree.leaves(filled), out_type=())
            results = jax.tree.map(after, filled)
        else:
            results = launch(out_type=out)
    # Inside shard_map the call forgets over which mesh axes its results vary.
    arrays = [x for x in map(gluon_util.array_of, operands) if isinstance(x, jax.Array)]
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    if not varying:
        return results
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(varying), to="varying"), results)
