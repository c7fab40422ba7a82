"""The compiled loops of the Triton kernels, for Hopper, where Triton is installed; no GPU is needed."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from pipelines import overwritten_while_read

from kernels import gluon_util, shapes, triton_util

compiles = pytest.mark.skipif(
    triton_util.missing_packages() is not None, reason=str(triton_util.missing_packages())
)
H200 = "NVIDIA H200"
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32"}
LOOP = """
    %x = ttg.local_alloc : () -> !ttg.memdesc<{depth}x64x64xbf16, #shared, #smem, mutable>
    %0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{depth}x64x64xbf16>
    %1 = ttg.async_copy_global_to_local %p, %0 : <64x64xbf16>
    %2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>)  : i32 {{
      %3 = ttg.memdesc_index %x[%i] : !ttg.memdesc<{depth}x64x64xbf16>
      %4 = ttng.warp_group_dot %a, %3, %acc {{isAsync = true}} : tensor<64x64xf32>
      %5 = ttng.warp_group_dot_wait %4 {{pendings = {pending} : i32}} : tensor<64x64xf32>
      %6 = ttg.memdesc_index %x[%j] : !ttg.memdesc<{depth}x64x64xbf16>
      %7 = ttg.async_copy_global_to_local %p, %6 : <64x64xbf16>
      scf.yield %5 : tensor<64x64xf32>
    }}
"""


@pytest.mark.parametrize("depth, pending, race", [(1, 1, True), (1, 0, False), (2, 1, False)])
def test_a_race_is_seen(depth, pending, race):
    found = overwritten_while_read(LOOP.format(depth=depth, pending=pending))
    assert found == (["%x"] if race else [])


def launches(operator, shape, monkeypatch, **options):
    """What the operator's forward and backward launch: (kernel, arrays, constants)."""
    module = importlib.import_module(f"kernels.{operator}.triton")
    found = []

    def call(kernel, *operands, out, grid, **constants):
        found.append((kernel, (*operands, *jax.tree.leaves(out)), constants))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)

    monkeypatch.setattr(triton_util, "call", call)
    monkeypatch.setattr(triton_util, "device_kind", lambda: H200)
    # Triton's kernels alone: Gluon's pipeline nothing by themselves.
    monkeypatch.setattr(gluon_util, "can_run_on", lambda kind: False)
    inputs = shapes.make_inputs(operator, shape, dtype="bfloat16")
    names = ("q", "k", "v", "lam", "log_decay", "beta", "initial_state")
    arrays = tuple(inputs[name] for name in names if name in inputs)

    def run(*arrays):
        out, state, residuals = module.forward(*arrays, **options)
        module.backward(residuals, out, state, **options)

    jax.eval_shape(run, *arrays)
    return found


def ttgir(kernel, arrays, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = ("num_warps", "num_stages", "maxnreg")
    options = {name: constants.pop(name) for name in names if name in constants}
    signature, fixed, aligned = {}, {}, {}
    rest = iter(arrays)
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], fixed[i,] = "constexpr", constants[name]
        elif name in constants or isinstance(x := next(rest), int):
            value = constants.get(name, 16)
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        else:
            signature[name] = "*" + TYPES[jnp.dtype(x.dtype).name]
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options).asm["ttgir"]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("width, value_width", [(128, 128), (256, 512)])
@pytest.mark.parametrize(
    "operator, options",
    [
        ("gated_delta_rule", {"scale": 0.5}),
        ("gated_linear_attention", {"scale": 0.5}),
        ("ccq_query", {"centered": True}),
        ("ccq_query", {"centered": True, "only_segments": True}),
        ("ccq_query", {"centered": True, "only_segments": True, "chunk_size": 128}),
    ],
)
def test_no_tile_is_overwritten_while_it_is_read(
    operator, options, width, value_width, monkeypatch
):
    shape = shapes.Shape(1, 256, 1, width, value_width)
    found = launches(operator, shape, monkeypatch, **options)
    assert len(found) >= 4
    for kernel, arrays, constants in found:
        assert not overwritten_while_read(ttgir(kernel, arrays, dict(constants))), kernel
