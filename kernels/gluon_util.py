"""Calls Gluon kernels whose warps are specialised.

jax-triton 0.4.1 starts such a kernel without the warps that it adds, and knows no tile descriptors of
Triton 3.7.1. So the call is put together here, from what jaxlib has for jax-triton.
This module imports without Triton or jax-triton installed.
"""

import dataclasses
import functools
import importlib
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Of the devices that have the instructions of compute capability 9.0a, and no others.
HOPPER = r"\b(H20|H100|H200|H800|GH200)\b"
CAPABILITY = 90
TARGET = "triton_kernel_call_ffi"
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
SWIZZLE = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array of 16-bit elements, or the shape of a result, that a kernel copies in blocks."""

    array: Any
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Of the array."""
        return self.array.dtype


def can_run_on(kind: str) -> bool:
    """Whether kernels for Hopper can be compiled here and run on a device of this kind."""
    return re.search(HOPPER, kind) is not None and _jaxlib() is not None


@functools.cache
def _jaxlib() -> Any:
    """jaxlib's part of Triton calls, None where it has none that copies tiles."""
    try:
        importlib.import_module("triton.experimental.gluon")
        # Registers the call's target with XLA.
        importlib.import_module("jax_triton")
        module = importlib.import_module("jax._src.lib").gpu_triton
    except (ImportError, AttributeError):
        return None
    return module if hasattr(module, "create_tma_descriptor_parameter") else None


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel is under `gluon.jit`, not `triton.jit`."""
    return type(kernel).__name__ == "GluonJITFunction"


def launch(
    kernel: Any,
    *operands: Any,
    out: Any,
    grid: tuple[int, ...],
    num_warps: int,
    **constants: Any,
) -> Any:
    """As `triton_util.call`, with `Tiles` among operands and results.

    Args:
      kernel: a function under `gluon.jit`.
      operands: arrays, `Tiles` and whole numbers.
      out: its results, after the operands: first arrays that are written over, if any, then shapes.
      grid: blocks along up to three axes.
      num_warps: warps a block of the default partition.
      constants: constexpr arguments.
    """
    results, tree = jax.tree.flatten(out)
    over = [array_of(x) for x in results if isinstance(array_of(x), jax.Array)]
    # The call hands the kernel its first buffers: what is written over comes in before the other results.
    fresh = results[len(over) :]
    if any(isinstance(array_of(x), jax.Array) for x in fresh):
        raise ValueError("out: arrays that a kernel writes over come before its other results")
    arguments = (*operands, *results)
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    signature = tuple(zip(names, map(_type, arguments), strict=True))
    code = _compiled(kernel, signature, tuple(sorted(constants.items())), num_warps)
    opaque = zlib.compress(_call(code, arguments, grid).to_proto(code.about["name"], b""))
    arrays = [array_of(x) for x in operands if not isinstance(x, int)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*fresh, *over)]
    aliases = {len(arrays) + i: len(fresh) + i for i in range(len(over))}
    called = jax.ffi.ffi_call(TARGET, shapes, input_output_aliases=aliases)
    if over:  # barriers as in `triton_util.in_place`
        over = jax.lax.optimization_barrier(over)
    written = called(*arrays, *over, opaque=opaque)
    if over:
        written = jax.lax.optimization_barrier(written)
    return jax.tree.unflatten(tree, [*written[len(fresh) :], *written[: len(fresh)]])


def array_of(x: Any) -> Any:
    """An argument's array."""
    return x.array if isinstance(x, Tiles) else x


def _type(x: Any) -> str:
    if isinstance(x, int):
        return "i32"
    name = TYPES[jnp.dtype(x.dtype).name]
    if not isinstance(x, Tiles):
        return "*" + name
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(SWIZZLE, 16, len(x.block))
    return f"tensordesc<{name}[{','.join(map(str, x.block))}],{layout!r}>"


class Code(NamedTuple):
    """A compiled kernel: its PTX, and what Triton says about it."""

    ptx: str
    about: dict[str, Any]


@functools.cache
def _compiled(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
) -> Code:
    """As `triton.compile`, up to PTX, which XLA takes from there; nothing is written to a disk."""
    from triton._C import libtriton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource

    types = dict(signature) | {name: "constexpr" for name, _ in constants}
    names = [parameter.name for parameter in kernel.params]
    fixed = {(names.index(name),): value for name, value in constants}
    aligned = [names.index(name) for name, kind in signature if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = GluonASTSource(kernel, {name: types[name] for name in names}, fixed, attributes)
    target = GPUTarget("cuda", CAPABILITY, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": num_warps} | source.parse_options())
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    codegen = backend.get_codegen_implementation(options)
    code = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    about = {"target": target, **vars(options)}
    for stage in ("ttgir", "llir", "ptx"):
        code = stages[stage](code, about)
    return Code(code, about)


def _call(code: Code, arguments: tuple[Any, ...], grid: tuple[int, ...]) -> Any:
    """jaxlib's form of one call of a compiled kernel."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    jaxlib, about = _jaxlib(), code.about
    warps, shared = about["num_warps"], about["shared"]
    kernel = jaxlib.TritonKernel(about["name"], warps, 1, shared, code.ptx, "", CAPABILITY)
    tiles = iter(about["tensordesc_meta"])
    parameters = []
    for x in arguments:
        if isinstance(x, int):
            parameters.append(jaxlib.create_scalar_parameter(x, "i32"))
        elif isinstance(x, Tiles):
            tile, shape = next(tiles), x.shape
            strides = [1]
            for size in shape[:0:-1]:
                strides.insert(0, strides[0] * size)
            parameters.append(
                jaxlib.create_tma_descriptor_parameter(
                    elem_type=TMA_DTYPE_DEVICE_TO_HOST[tile["elem_type"]],
                    swizzle=tile["swizzle"],
                    shape=shape,
                    strides=tuple(strides),
                    block_shape=tile["block_size"],
                    oob_fill=0,
                )
            )
            parameters += [jaxlib.create_scalar_parameter(size, "i32") for size in shape]
            parameters += [jaxlib.create_scalar_parameter(stride, "i64") for stride in strides]
        else:
            parameters.append(jaxlib.create_array_parameter(0, 16))
    return jaxlib.TritonKernelCall(kernel, *grid, *(1,) * (3 - len(grid)), parameters)
