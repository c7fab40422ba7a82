"""Compiles the real training step, and says what it takes of each device.

    python -m ccq_jax.plan --config=configs/ccq_gdn.py:1.3B --topology=v5p:4x4x4 --config.mesh.fsdp=8
    python -m ccq_jax.plan --config=configs/ccq_gla.py:1.3B --topology=v5e:16x16 --search
    python -m ccq_jax.plan --config=configs/ccq_gdn.py --time=10

With --topology the step is compiled for a TPU pod that need not be here (libtpu: pip install
'ccq_jax[tpu]'), --slices of them; without, for the devices of this machine. --search finds the
largest batch, and the cheapest remat with which it fits; it also chooses mesh.fsdp where that is 1.
Fields are set as in train.py. No data is read. --time runs that many steps here, on random tokens in
packed documents, and says how long one takes; nothing is saved.

Exits with 0 if the step fits, 1 if it does not, and 2 where there is nothing to compile, with the reason.
"""

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict, config_flags

from ccq_jax import collectives, flops, step, topology
from ccq_jax.collectives import Traffic
from ccq_jax.config import resolve, validate
from ccq_jax.data import required_vocab_size
from ccq_jax.sharding import BATCH, make_mesh
from ccq_jax.topology import Topology
from kernels import dispatch

REMAT = ("none", "dots", "full")  # the cheapest first
GIB = 2**30
# Of float32 parameters, their gradients and two moments, in bytes a parameter.
STATE_BYTES = 16
OPERATORS = {"gla": "gated_linear_attention", "gated_deltanet": "gated_delta_rule"}


class Refused(ValueError):
    """There is nothing to compile; the message says why, and what would be right."""


class Plan(NamedTuple):
    """What one step takes of one device, in bytes."""

    parameters: int
    optimizer: int
    activations: int  # all that is neither, at the peak: gradients, batch, what a backward keeps
    peak: int
    limit: float
    traffic: list[Traffic]
    seconds: float  # to compile
    cpu_seconds: float  # of all threads
    fits: bool
    compiled: Any = None  # the step, if it fits


class Target(NamedTuple):
    """Where the step is to run."""

    devices: list[jax.Device]
    limit: float  # memory of a device, in bytes
    topology: Topology | None


def define_flags() -> None:
    """Defines the command's flags; not on import, where they would meet those of train.py."""
    config_flags.DEFINE_config_file("config", None, "A file under configs/, as FILE[:SIZE].")
    flags.DEFINE_string("topology", None, "A TPU slice, such as v5p:4x4x4 or v5e:16x16.")
    flags.DEFINE_integer("slices", 1, "TPU slices, joined by the data center's network.")
    flags.DEFINE_bool("search", False, "Find the largest batch and the cheapest remat.")
    flags.DEFINE_integer(
        "time", 0, "Steps to run on random tokens, on this machine.", lower_bound=0
    )
    flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Plans as the flags say; returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: fields are set as --config.NAME=VALUE")
    given = flags.FLAGS
    try:
        if given.time and given.topology:
            raise Refused("--time runs steps on this machine's devices: leave --topology out")
        target = find_target(given.topology, given.slices)
        config = prepare(given.config)
        if given.search:
            config, plan = search(config, target, lambda line: print(line, flush=True))
        else:
            check_sizes(config, target)
            plan = make_plan(config, target)
    except (Refused, RuntimeError) as error:
        print(f"ccq_jax.plan: {error}", file=sys.stderr)
        return 2
    print(report(config, target, plan), flush=True)
    if given.time and plan.fits:
        print(timing(config, target, step_seconds(config, target, plan.compiled, given.time)))
    if given.search:
        print(f"flags        {' '.join(as_flags(config))}")
    return 0 if plan.fits else 1


def find_target(name: str | None, slices: int = 1) -> Target:
    """The devices of a topology, or those of this machine.

    Raises:
      Refused: a topology that does not exist.
    """
    if name is None:
        devices = jax.devices()
        return Target(devices, _memory(devices[0]), None)
    try:
        found = topology.parse(name, slices)
    except ValueError as error:
        raise Refused(str(error)) from error
    return Target(topology.devices(found), topology.HBM[found.generation], found)


def _memory(device: jax.Device) -> float:
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()


def prepare(config: ConfigDict) -> ConfigDict:
    """The resolved configuration. Its data need not be there, but its tokenizer sets the vocabulary."""
    config = ConfigDict(config.to_dict())
    if config.data.source.endswith(":"):
        config.data.source = "stdlib"
    try:
        validate(config)
        return resolve(config, required_vocab_size(config))
    except ValueError as error:
        raise Refused(str(error)) from error


def check_sizes(config: ConfigDict, target: Target) -> None:
    """Raises Refused where mesh or batch do not divide, with the nearest topology where they do."""
    batch, accumulation = config.train.batch_size, config.train.accumulation
    data, fsdp = config.mesh.data, config.mesh.fsdp

    def mesh_fits(size: int, slices: int = 1) -> bool:
        copies = size // fsdp
        return size % fsdp == 0 and copies % slices == 0 and data in (-1, copies)

    def suits(found: Topology) -> bool:
        return mesh_fits(found.size, found.slices) and batch % (found.size * accumulation) == 0

    size = len(target.devices)
    slices = target.topology.slices if target.topology else 1
    problems = []
    if not mesh_fits(size, slices):
        problems.append(f"mesh.data={data} and mesh.fsdp={fsdp} do not divide {size} devices")
    if batch % (size * accumulation):
        problems.append(
            f"train.batch_size is {batch}: it must be a multiple of {size} devices x "
            f"train.accumulation {accumulation} = {size * accumulation}"
        )
    if problems and target.topology:
        near = topology.nearest(target.topology, suits)
        problems.append(f"the nearest topology that divides is {near}" if near else "none divides")
    if problems:
        raise Refused("; ".join(problems))


def make_plan(config: ConfigDict, target: Target) -> Plan:
    """Compiles the step of `config` for the target; raises Refused for a mesh that is impossible."""
    try:
        mesh = make_mesh(**config.mesh, devices=target.devices)
    except ValueError as error:
        raise Refused(str(error)) from error
    graphdef, abstract = step.abstract_state(config, mesh)
    parameters, optimizer = (_local_bytes(abstract[x]) for x in ("params", "opt_state"))
    start, cpu_start = time.monotonic(), time.process_time()

    def plan(peak: int, traffic: list[Traffic], compiled: Any = None) -> Plan:
        fits = compiled is not None and peak <= target.limit
        rest = peak - parameters - optimizer
        seconds = time.monotonic() - start, time.process_time() - cpu_start
        step = compiled if fits else None
        return Plan(parameters, optimizer, rest, peak, target.limit, traffic, *seconds, fits, step)

    with jax.set_mesh(mesh), topology.no_compilation_cache():
        train_step: Any = step.make_train_step(graphdef, config, abstract, mesh)
        lowered = train_step.lower(abstract, step.abstract_batch(config, mesh))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            peak = _asked_for(str(error), parameters + optimizer)
            if peak is None:
                raise
            return plan(peak, [])
    peak = _allocated(compiled.memory_analysis())
    return plan(peak, collectives.traffic(compiled.as_text()), compiled)


def _allocated(memory: Any) -> int:
    """Bytes of arguments, results, temporaries and code, of a compiled program's account.

    Of a TPU, `temp_size_in_bytes` counts what fragments temporaries twice. JAX 0.10 knows no other.
    """
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    data = getattr(memory, "total_allocation_bytes", held + memory.temp_size_in_bytes)
    return data + memory.generated_code_size_in_bytes


def _local_bytes(tree: Any) -> int:
    """Of one device's parts of arrays."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _asked_for(message: str, state: int) -> int | None:
    """Bytes that a program asked for, of the compiler's message that it does not fit; None of others.

    The message counts all of it, or the temporaries beside the `state`'s bytes.
    """
    found = re.search(r"(Used |HLO temporaries \()([\d.]+)([KMGT])", message)
    if found is None or "RESOURCE_EXHAUSTED" not in message:
        return None
    size = int(float(found[2]) * 1024 ** ("KMGT".index(found[3]) + 1))
    return size if found[1] == "Used " else size + state


def search(
    config: ConfigDict, target: Target, say: Callable[[str], None]
) -> tuple[ConfigDict, Plan]:
    """The largest batch that fits, with the cheapest remat that holds it, and its plan.

    Batches are whole numbers of sequences a device, and memory is taken to grow with them. With
    everything recomputed, guesses between what fits and what does not close in on the largest, from
    above: a TPU's compiler refuses in seconds, and needs minutes for what fits. Both the batch that
    comes back and the next larger one were compiled. Where not one sequence fits, its plan comes back.
    """
    config = ConfigDict(config.to_dict())
    if config.mesh.fsdp == 1:
        config.mesh.fsdp = _smallest_fsdp(config, target)

    def attempt(rows: int, remat: str) -> tuple[ConfigDict, Plan]:
        config.model.remat = remat
        config.train.batch_size = rows * len(target.devices) * config.train.accumulation
        plan = make_plan(config, target)
        say(
            f"tried        batch {config.train.batch_size} ({rows} a device), remat {remat}: "
            f"{plan.peak / GIB:.2f} of {plan.limit / GIB:.2f} GiB, {plan.seconds:.0f} s"
        )
        return ConfigDict(config.to_dict()), plan

    best, low, high = None, 0, _too_many(config, target)
    while (last := attempt(high, REMAT[-1]))[1].fits:
        best, low, high = last, high, 2 * high
    larger = last[1].peak
    smaller = best[1].peak if best else last[1].parameters + last[1].optimizer
    while high - low > 1:
        guess = low + math.ceil((high - low) * (target.limit - smaller) / max(larger - smaller, 1))
        rows = min(max(guess, low + 1), high - 1)
        last = attempt(rows, REMAT[-1])
        if last[1].fits:
            best, low, smaller = last, rows, last[1].peak
        else:
            high, larger = rows, last[1].peak
    if best is None:
        return last
    for remat in REMAT[-2::-1]:
        cheaper = attempt(low, remat)
        if not cheaper[1].fits:
            break
        best = cheaper
    return best


def _too_many(config: ConfigDict, target: Target) -> int:
    """Sequences a device that cannot fit: what their layers hand on, which is always kept, fills it."""
    model = config.model
    kept = model.num_layers * config.train.seq_len * model.hidden_size
    return math.ceil(target.limit / (kept * jnp.dtype(model.dtype).itemsize))


def _smallest_fsdp(config: ConfigDict, target: Target) -> int:
    """Devices that share the state, so that it takes at most a third of the memory of each."""
    mesh = make_mesh(devices=target.devices)
    _, abstract = step.abstract_state(config, mesh)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract["params"]))
    part = len(target.devices) // (target.topology.slices if target.topology else 1)
    enough = (n for n in range(1, part + 1) if part % n == 0)
    return next((n for n in enough if STATE_BYTES * count / n <= target.limit / 3), part)


def as_flags(config: ConfigDict) -> list[str]:
    """What to give to train.py for the configuration that was found."""
    return [
        f"--config.train.batch_size={config.train.batch_size}",
        f"--config.model.remat={config.model.remat}",
        f"--config.mesh.data={config.mesh.data}",
        f"--config.mesh.fsdp={config.mesh.fsdp}",
    ]


def report(config: ConfigDict, target: Target, plan: Plan) -> str:
    """The plan in words."""
    mesh = make_mesh(**config.mesh, devices=target.devices)
    train, kind = config.train, target.devices[0].device_kind
    per_token = flops.train_flops_per_token(config.model, train.seq_len)
    rows = train.batch_size // mesh.size
    where = f"{target.topology}, " if target.topology else ""
    ccq = " with CCQ" if config.model.ccq.enabled else ""
    memory = ", ".join(
        f"{name} {size / GIB:.2f}"
        for name, size in (
            ("parameters", plan.parameters),
            ("optimizer", plan.optimizer),
            ("activations", plan.activations),
        )
    )
    verdict = "it fits" if plan.fits else "it does NOT fit"
    lines = [
        f"devices      {where}{mesh.size} x {kind}: data={mesh.shape['data']}, fsdp={mesh.shape['fsdp']}",
        f"model        {config.model.mixer}{ccq}, {_implementation(config, mesh)} operators",
        f"step         {train.batch_size} x {train.seq_len} tokens ({rows} sequences a device), "
        f"remat {config.model.remat}, accumulation {train.accumulation}",
        f"memory       GiB a device: {memory}",
        f"peak         {plan.peak / GIB:.2f} of {plan.limit / GIB:.2f} GiB: {verdict}",
        f"compute      {per_token / 1e9:.3g} GFLOPs a token{_shortest_step(config, mesh, per_token)}",
        *(
            f"moves        {x.kind}: {x.bytes / GIB:.3f} GiB in {x.count} calls"
            for x in plan.traffic
        ),
        f"compiled in  {plan.seconds:.1f} s, {plan.cpu_seconds:.1f} s of CPU time",
    ]
    return "\n".join(lines)


def step_seconds(config: ConfigDict, target: Target, compiled: Any, steps: int) -> list[float]:
    """Seconds of each of `steps` steps of a new model, after two that are not counted."""
    mesh = make_mesh(**config.mesh, devices=target.devices)
    shape = config.train.batch_size, config.train.seq_len
    rng = np.random.default_rng(config.seed)
    tokens = rng.integers(0, config.model.vocab_size, shape, np.int32)
    # Documents of 1,024 tokens on average.
    starts = rng.random(shape) < 1 / 1024
    batch = {
        "inputs": tokens,
        "targets": np.roll(tokens, -1, 1),
        "segment_ids": starts.cumsum(1, dtype=np.int32),
        "loss_mask": np.ones(shape, bool),
        "stop": np.zeros(mesh.size, np.int32),
    }
    seconds = []
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH))
        state = step.init_state(config, step.abstract_state(config, mesh)[1])
        for _ in range(2 + steps):
            start = time.monotonic()
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.monotonic() - start)
    return seconds[2:]


def timing(config: ConfigDict, target: Target, seconds: list[float]) -> str:
    """The median of `seconds` in words."""
    median = statistics.median(seconds)
    speed = config.train.batch_size * config.train.seq_len / median
    peak = flops.peak_flops(target.devices[0].device_kind)
    per_token = flops.train_flops_per_token(config.model, config.train.seq_len)
    mfu = f", MFU {speed * per_token / (peak * len(target.devices)):.3f}" if peak else ""
    return (
        f"timed        {median:.4g} s a step, {speed:,.0f} tokens/s{mfu} (median of {len(seconds)})"
    )


def _implementation(config: ConfigDict, mesh: Mesh) -> str:
    if config.model.implementation != "auto" or config.model.mixer not in OPERATORS:
        return config.model.implementation
    with jax.set_mesh(mesh):
        module = dispatch.select(OPERATORS[config.model.mixer], None)
    return module.__name__.rpartition(".")[2]


def _shortest_step(config: ConfigDict, mesh: Mesh, per_token: float) -> str:
    peak = flops.peak_flops(mesh.devices.flat[0].device_kind)
    if peak is None:
        return ""
    tokens = config.train.batch_size * config.train.seq_len
    return f"; a step takes {per_token * tokens / mesh.size / peak:.3g} s or more"


if __name__ == "__main__":
    define_flags()
    app.run(main)
