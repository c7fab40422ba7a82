"""The device mesh, and how every array of a training run lies on it.

Two axes. Both split the batch; `fsdp` splits the parameters and the optimiser's moments as well,
so each device keeps 1/fsdp of them and gathers a layer's weights when it computes that layer:

    data=8, fsdp=1      parameters copied to all eight devices, gradients summed over them
    data=1, fsdp=8      parameters cut in eight
    data=2, fsdp=4      two copies of the parameters, each cut in four

`with jax.set_mesh(mesh):` makes a mesh current. Without one, `batch_parallel` and `shard_batch`
do nothing, so the same model code runs on one device.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp")
BATCH = P(AXES)  # tokens [B, T], activations [B, T, ...]: the batch over all devices

# Parameter path (joined by "/") -> how its shape is cut. The first pattern that is found applies.
# A dimension that fsdp does not divide stays whole.
#   L layers, D hidden_size, I intermediate_size, N vocabulary, H heads, K and V widths of a head,
#   R low rank, W width of the convolution
RULES: tuple[tuple[str, P], ...] = (
    (r"embed/embedding$", P("fsdp", None)),  # [N, D]
    (r"lm_head/kernel$", P(None, "fsdp")),  # [D, N]
    (r"(o_proj|down_proj|decay_up)/kernel$", P(None, None, "fsdp")),  # [L, H V | I | R, D | H K]
    (r"_conv/kernel$", P(None, None, "fsdp")),  # [L, W, H K | H V]
    (r"lambda_proj/kernel$", P()),  # [L, H, K]: a vector a head
    (r"layers/.*/kernel$", P(None, "fsdp", None)),  # [L, D, H K | H V | H | I | R]
    (r"(bias|scale|A_log|dt_bias)$", P()),  # [L, ...] vectors
)


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `fsdp` devices; one of the two may be -1, "all that are left".

    Devices that share parameters are neighbours. Those of one TPU slice come together: slices have
    each their copies of the parameters, and between slices gradients alone travel.

    Raises ValueError where the product is not the number of devices, or `fsdp` would cross slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [data, fsdp]
    asked = f"mesh.data={data}, mesh.fsdp={fsdp}"
    if any(n < 1 and n != -1 for n in shape) or shape == [-1, -1]:
        raise ValueError(f"{asked}: give positive sizes, or -1 for one of them")
    if -1 in shape:
        known = -math.prod(shape)
        if len(devices) % known:
            raise ValueError(f"{asked}: {known} does not divide the {len(devices)} devices")
        shape[shape.index(-1)] = len(devices) // known
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"{asked} need {math.prod(shape)} devices; here are {len(devices)} "
            "(-1 stands for all that are left)"
        )
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        # Only TPUs have slices; elsewhere the number stands for other things.
        index = getattr(device, "slice_index", None) if device.platform == "tpu" else None
        slices.setdefault(index or 0, []).append(device)
    if shape[0] % len(slices):
        raise ValueError(
            f"{asked}: fsdp must divide the {len(devices) // len(slices)} devices of a slice, "
            f"of which there are {len(slices)}"
        )
    part = (shape[0] // len(slices), shape[1])
    arranged = [
        mesh_utils.create_device_mesh(part, slices[i], allow_split_physical_axes=True)
        for i in sorted(slices)
    ]
    return Mesh(np.concatenate(arranged), AXES, axis_types=(AxisType.Auto,) * 2)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every array (or ShapeDtypeStruct) of `params`, by `RULES`.

    Works on whatever has the parameters' paths inside it, such as AdamW's moments.
    Raises ValueError for a parameter that no rule covers.
    """

    def place(path, x) -> NamedSharding:
        return NamedSharding(mesh, _cut(path_name(path), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, params)


def path_name(path) -> str:
    """The name of a leaf: its path with "/" between the parts, as `RULES` and errors use it."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def is_stacked(name: str) -> bool:
    """True for a parameter of the layers, whose first axis is the layer."""
    return "layers/" in name


def _cut(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    if not shape:  # step counters
        return P()
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        raise ValueError(f"no sharding rule for parameter {name!r}: add one to sharding.RULES")
    if len(spec) > len(shape):
        raise ValueError(f"the sharding rule {spec} does not fit {name!r} of shape {shape}")
    sizes = zip(spec, shape, strict=False)
    return P(*(axis if axis and n % mesh.shape[axis] == 0 else None for axis, n in sizes))


Axes = int | tuple[int | None, ...]


def batch_parallel(fn: Callable, in_axes: Axes = 0, out_axes: Axes = 0) -> Callable:
    """`fn` computed on each device for that device's share of the batch.

    Kernels written outside XLA need this, because XLA cannot cut a call that it cannot look into. A
    batch that the devices do not divide is computed whole on each of them.

    Args:
      fn: takes and returns arrays, pytrees of them, or None.
      in_axes: where the batch is: one axis for all arguments, or one for each; None has no batch.
      out_axes: the same for what `fn` returns.
    """

    def wrapped(*args):
        mesh = jax.sharding.get_abstract_mesh()
        if not _is_automatic(mesh) or mesh.size == 1:
            return fn(*args)
        axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
        sizes = [
            x.shape[axis]
            for axis, arg in zip(axes, args, strict=True)
            if axis is not None
            for x in jax.tree.leaves(arg)
        ]
        divides = all(size % mesh.size == 0 for size in sizes)

        def spec(axis: Axes | None) -> Any:
            if isinstance(axis, tuple):
                return tuple(map(spec, axis))
            return P() if axis is None or not divides else P(*[None] * axis, *BATCH)

        specs = {"in_specs": spec(axes), "out_specs": spec(out_axes)}
        return jax.shard_map(fn, **specs, check_vma=False)(*args)

    return wrapped


def shard_batch(x: jax.Array) -> jax.Array:
    """Keeps activations [B, ...] cut along the batch, so that weights travel and they stay."""
    mesh = jax.sharding.get_abstract_mesh()
    if not _is_automatic(mesh) or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, BATCH)


def _is_automatic(mesh) -> bool:
    """Whether `mesh` is ours and XLA distributes over it: false inside a shard_map."""
    return set(AXES) <= set(mesh.axis_names) and AxisType.Manual not in mesh.axis_types
