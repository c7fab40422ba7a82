"""TPU pods that are not here: which exist, and their devices, for which libtpu compiles on any machine."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.experimental import topologies

# Chips along each axis of the torus (Google Cloud's documentation of v5e, v5p and v6e).
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SIDES = range(4, 28, 4)
_CUBES = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    *((a, b, c) for a in _SIDES for b in _SIDES for c in _SIDES if a <= b <= c and b <= 16),
)
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {"v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}

# Memory of a chip that programs may use, in bytes, as libtpu reports it.
HBM = {"v5e": 15.75 * 2**30, "v5p": 95.74 * 2**30, "v6e": 31.25 * 2**30}

# libtpu, on a machine without TPUs: ask no metadata server, share the library with other processes.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


class Topology(NamedTuple):
    """A pod slice, or several of one shape."""

    generation: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Chips in all."""
        return math.prod(self.shape) * self.slices

    def __str__(self) -> str:
        name = f"{self.generation}:{'x'.join(map(str, self.shape))}"
        return f"{self.slices} x {name}" if self.slices > 1 else name


def parse(name: str, slices: int = 1) -> Topology:
    """The topology of a name such as "v5p:4x4x4".

    Raises:
      ValueError: there is none of that name; the message has the nearest.
    """
    generation, _, sides = name.partition(":")
    if generation not in SHAPES:
        raise ValueError(f"--topology={name}: its generation must be one of {', '.join(SHAPES)}")
    if slices < 1:
        raise ValueError(f"--slices={slices}: it must be at least 1")
    try:
        shape = tuple(int(side) for side in sides.split("x"))
    except ValueError:
        example = Topology(generation, SHAPES[generation][3])
        raise ValueError(
            f"--topology={name}: give the chips along each axis, as {example}"
        ) from None
    topology = Topology(generation, shape, slices)
    if shape not in SHAPES[generation]:
        near = nearest(topology._replace(slices=1))
        raise ValueError(f"--topology={name} does not exist; the nearest that does is {near}")
    return topology


def nearest(
    topology: Topology, suits: Callable[[Topology], bool] = lambda _: True
) -> Topology | None:
    """The existing topology that suits and whose size is nearest, by ratio; None if none suits."""
    wanted = max(math.prod(topology.shape), 1)
    existing = (topology._replace(shape=shape) for shape in SHAPES[topology.generation])

    def distance(other: Topology) -> tuple[float, float]:
        ratio = math.prod(other.shape) / wanted
        sides = zip(other.shape, topology.shape, strict=False)
        return abs(math.log(ratio)), sum(abs(a - b) for a, b in sides)

    return min(filter(suits, existing), key=distance, default=None)


def devices(topology: Topology) -> list[jax.Device]:
    """The topology's devices, which programs can be compiled for.

    JAX must not have touched a device before: it is kept off this machine's accelerators.

    Raises:
      RuntimeError: libtpu is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    options: dict = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    name = str(topology._replace(slices=1))
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"libtpu does not describe {topology} ({error}); pip install 'ccq_jax[tpu]' installs it"
        ) from error
    return list(found.devices)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """What is compiled for devices elsewhere cannot be read back from JAX's cache."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
