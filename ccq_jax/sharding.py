"""The device mesh, and how every array of a training run lies on it.

Two axes.  Both split the batch; `fsdp` splits the parameters and the optimiser's moments as well, so each
device keeps 1/fsdp of them and gathers a layer's weights when it computes that layer:

    data=8, fsdp=1      parameters copied to all eight devices, gradients summed over them
    data=1, fsdp=8      parameters cut in eight
    data=2, fsdp=4      two copies of the parameters, each cut in four

`with jax.set_mesh(mesh):` makes a mesh current.  Without one every function here leaves its argument alone,
so the same model code runs on one device.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")
BATCH = P(AXES)  # tokens [B, T], activations [B, T, ...]: the batch over all devices

# Parameter path (joined by "/") -> how its shape is cut.  Parameters of the layers carry a leading axis L.
# The first pattern found anywhere in the path applies.  A dimension that fsdp does not divide stays whole.
#   D hidden_size, I intermediate_size, V vocabulary, H heads, K and V' head widths, R low rank, W conv width
RULES: tuple[tuple[str, P], ...] = (
    (r"embed\w*/embedding$", P("fsdp", None)),  # [V, D]
    (r"lm_head/kernel$", P(None, "fsdp")),  # [D, V]
    (r"(o_proj|down_proj)/kernel$", P(None, None, "fsdp")),  # [L, H V' | I, D]
    (r"lambda_proj/kernel$", P(None, None, None)),  # [L, H, K]: a vector a head
    (r"\w+/kernel$", P(None, "fsdp", None)),  # [L, D, H K | H V' | H | I | R], conv [L, W, H K]
    (r"(bias|scale|A_log|dt_bias)$", P()),  # [L, ...] vectors: copied
)


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `fsdp` devices; one of the two may be -1, "all that are left".

    Raises ValueError where the product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [data, fsdp]
    if any(n < 1 and n != -1 for n in shape) or shape == [-1, -1]:
        raise ValueError(
            f"mesh.data={data}, mesh.fsdp={fsdp}: give positive sizes, or -1 for one of them"
        )
    if -1 in shape:
        known = -math.prod(shape)
        if len(devices) % known:
            raise ValueError(
                f"mesh.data={data}, mesh.fsdp={fsdp}: {known} does not divide the {len(devices)} devices"
            )
        shape[shape.index(-1)] = len(devices) // known
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"mesh.data={data}, mesh.fsdp={fsdp} need {math.prod(shape)} devices; here are {len(devices)}"
        )
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every array (or ShapeDtypeStruct) of `params`, by `RULES`.

    Works on whatever has the parameters' paths inside it, such as AdamW's moments.
    Raises ValueError for a parameter that no rule covers.
    """

    def place(path, x) -> NamedSharding:
        return NamedSharding(mesh, _fit(_rule(path_name(path), x.ndim), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, params)


def path_name(path) -> str:
    """The name of a leaf: its path with "/" between the parts, as `RULES` and error messages use it."""
    parts = (getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))) for p in path)
    return "/".join(str(p) for p in parts if p != "value")


def _rule(name: str, ndim: int) -> P:
    if ndim == 0:  # step counters
        return P()
    for pattern, spec in RULES:
        if re.search(pattern, name):
            return spec
    raise ValueError(f"no sharding rule for parameter {name!r}: add one to ccq_jax.sharding.RULES")


def _fit(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    if len(spec) > len(shape):
        raise ValueError(f"sharding rule {spec} has more axes than the shape {shape} it was given")
    return P(
        *(a if a and n % mesh.shape[a] == 0 else None for a, n in zip(spec, shape, strict=False))
    )


def batch_parallel(fn: Callable) -> Callable:
    """`fn` computed on each device for that device's share of the batch.

    Every array that goes in or comes out has the batch as its first axis (pytrees and None are fine).  Kernels
    written outside XLA need this, because XLA cannot cut a call that it cannot look into.  A batch that the
    devices do not divide is computed whole on each of them.
    """

    def wrapped(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1 or set(AXES) - set(mesh.axis_names) or _is_manual(mesh):
            return fn(*args)
        batch = {x.shape[0] for x in jax.tree.leaves(args)}
        spec = BATCH if all(b % mesh.size == 0 for b in batch) else P()
        return jax.shard_map(fn, in_specs=spec, out_specs=spec, check_vma=False)(*args)

    return wrapped


def shard_batch(x: jax.Array) -> jax.Array:
    """Asks that activations [B, ...] be cut along the batch, so that weights travel and activations stay."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(AXES) - set(mesh.axis_names) or _is_manual(mesh) or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, BATCH)


def _is_manual(mesh) -> bool:
    return AxisType.Manual in mesh.axis_types
