"""Which implementation of an operator runs, and the one custom gradient that all of them share.

An implementation is a module `kernels.<operator>.<name>` with

    forward(*inputs, **static) -> (out, state, residuals)
    backward(residuals, d_out, d_state, **static) -> one gradient an input, each in its input's dtype
    primal(*inputs, **static)           if it has one: the forward that keeps nothing, (out, state, None)
    REFS = True                         if its forward may have Refs, as one whose outputs are poisoned has
    unavailable() -> str | None         why it cannot run on this machine; None if it can

or, where JAX differentiates it, `differentiable = True` and `forward(*inputs, **static) -> (out, state)`.
`inputs` is the operator's tuple of arrays, in which an absent one is None; `static` holds Python values.
A module that lists names in HINTS also gets what the operator knows about its inputs under these names.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("scan", "xla", "triton", "pallas")
# Best first. Platforms that are not listed use xla.
PREFERENCE = {"gpu": ("triton", "xla"), "tpu": ("pallas", "xla")}
# Elsewhere nothing beats the plain recurrence for one token.
DECODE_PREFERENCE = {"gpu": ("triton",)}

Static = tuple[tuple[str, Any], ...]


def call(
    operator: str,
    implementation: str | None,
    inputs: tuple[Any, ...],
    hints: Mapping[str, Any] | None = None,
    **static: Any,
) -> Any:
    """Runs the operator on validated inputs and returns (out, state), differentiable in every array.

    Raises:
      ValueError: unknown implementation.
      RuntimeError: a named implementation that cannot run here, with the reason.
    """
    module = select(operator, implementation, length=inputs[0].shape[1])
    wanted = getattr(module, "HINTS", ())
    static |= {name: hint for name, hint in (hints or {}).items() if name in wanted}
    inputs = _match_varying_axes(inputs)
    if getattr(module, "differentiable", False):
        return module.forward(*inputs, **static)
    forgets = hasattr(module, "primal") and not hasattr(module, "REFS")
    gradient = _with_primal if forgets else _with_gradient
    return gradient(module, tuple(static.items()), inputs)


def select(operator: str, implementation: str | None, *, length: int = 0) -> ModuleType:
    """The module to run: the named one, or for None the best that this platform has.

    An operator on one token is the plain recurrence; for generation `decode_step` has a fused kernel.
    """
    if implementation is None:
        return _best(operator, platform(), length)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{operator}: implementation is {implementation!r}; expected None or one of "
            + ", ".join(repr(name) for name in IMPLEMENTATIONS)
        )
    reason = unavailable(operator, implementation)
    if reason is not None:
        raise RuntimeError(
            f"{operator}: implementation {implementation!r} cannot run here: {reason}"
        )
    return _module(operator, implementation)


def unavailable(operator: str, implementation: str) -> str | None:
    """Why the implementation cannot run on this machine, or None if it can."""
    if not is_built(operator, implementation):
        return "it is not built for this operator"
    try:
        module = _module(operator, implementation)
    except ImportError as error:
        return f"an import failed ({error})"
    return module.unavailable() if hasattr(module, "unavailable") else None


def is_built(operator: str, implementation: str) -> bool:
    """Whether the operator has this implementation, on some machine."""
    return importlib.util.find_spec(f"kernels.{operator}.{implementation}") is not None


def _module(operator: str, implementation: str) -> ModuleType:
    return importlib.import_module(f"kernels.{operator}.{implementation}")


def platform() -> str:
    """The platform that is traced for: of the current mesh, or else of JAX's default device.

    A mesh's devices need not be here: programs are also compiled for machines elsewhere.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform
    device = jax.config.values["jax_default_device"]
    if device is None:
        return jax.default_backend()
    return getattr(device, "platform", device)


def _best(operator: str, platform: str, length: int) -> ModuleType:
    if length == 1:
        return _module(operator, "scan")
    for name in _preference(operator, platform):
        reason = unavailable(operator, name)
        if reason is None:
            return _module(operator, name)
        _warn_once(f"{operator} falls back from {name!r} on {platform}: {reason}")
    return _module(operator, "scan")


def _preference(operator: str, platform: str) -> tuple[str, ...]:
    if operator == "decode_step":
        return DECODE_PREFERENCE.get(platform, ())
    return PREFERENCE.get(platform, ("xla",))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _match_varying_axes(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside shard_map, marks every input as varying over each mesh axis that any of them varies over.

    A zero initial state made inside the mapped function is the same on all devices, what a scan carries is not.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(inputs)]
    union = frozenset().union(*varying)

    def match(x: jax.Array) -> jax.Array:
        missing = union - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(match, inputs)


def _primal(module: ModuleType, static: Static, inputs: tuple[Any, ...]) -> Any:
    primal = getattr(module, "primal", module.forward)
    out, state, _ = primal(*inputs, **dict(static))
    return out, state


def _forward(module: ModuleType, static: Static, inputs: tuple[Any, ...]) -> Any:
    out, state, residuals = module.forward(*inputs, **dict(static))
    return (out, state), residuals


def _backward(module: ModuleType, static: Static, residuals: Any, cotangents: Any) -> Any:
    return (tuple(module.backward(residuals, *cotangents, **dict(static))),)


_with_gradient = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
_with_gradient.defvjp(_forward, _backward)
# The primal also serves a forward whose residuals `jax.checkpoint` forgets. JAX gives up the gradient's gradient
# for that, which kernels do not have, and has no rule for Refs in the forward.
_with_primal = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
_with_primal.defvjp(_forward, _backward, optimize_remat=True)


def promote(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in their common dtype, so that every matmul has one input dtype."""
    dtype = jnp.result_type(*arrays)
    return tuple(x.astype(dtype) for x in arrays)
