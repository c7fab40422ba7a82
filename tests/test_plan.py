"""The planner: which topologies there are, what a program moves, what fits, and compiling for a TPU pod."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from training import tiny_config

import kernels
from ccq_jax import collectives, plan, topology
from ccq_jax.plan import Plan, Target
from ccq_jax.sharding import make_mesh
from ccq_jax.topology import Topology
from kernels import shapes
from kernels.shapes import Shape

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.mark.parametrize("name, size", [("v5e:4x4", 16), ("v5p:4x4x4", 64), ("v6e:16x16", 256)])
def test_a_topology_is_known_by_its_name(name, size):
    found = topology.parse(name)
    assert str(found) == name
    assert found.size == size
    assert topology.parse(name, slices=3).size == 3 * size


@pytest.mark.parametrize(
    "name, message",
    [
        ("v5e:32x32", "does not exist; the nearest that does is v5e:16x16"),
        ("v5e:4x2", "the nearest that does is v5e:2x4"),
        ("v5p:4x4x5", "the nearest that does is v5p:4x4x4"),
        ("v6e:0x0", "the nearest that does is v6e:1x1"),
        ("v5p:64", "the nearest that does is v5p:4x4x4"),
        ("v5e:big", "give the chips along each axis, as v5e:4x4"),
        ("h100:8", "its generation must be one of v5e, v5p, v6e"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


def prepared(tmp_path, *, data=-1, fsdp=1, **train):
    config = tiny_config(tmp_path, **train)
    config.mesh.update({"data": data, "fsdp": fsdp})
    return plan.prepare(config)


def absent(name, slices=1):
    """A target of as many devices, none of which is needed."""
    found = topology.parse(name, slices)
    return Target([None] * found.size, topology.HBM[found.generation], found)


@pytest.mark.parametrize(
    "name, slices, changes, message",
    [
        ("v5e:4x4", 1, {"batch_size": 8}, "multiple of 16 devices.*divides is v5e:2x4"),
        ("v5e:4x4", 1, {"batch_size": 16, "accumulation": 2}, "= 32; .*divides is v5e:2x4"),
        ("v5e:4x4", 1, {"fsdp": 32, "batch_size": 32}, "mesh.fsdp=32 do.*divides is v5e:4x8"),
        ("v5e:4x4", 2, {"fsdp": 32, "batch_size": 64}, "mesh.fsdp=32 do.*divides is 2 x v5e:4x8"),
        ("v5e:4x4", 1, {"batch_size": 7}, "nearest topology that divides is v5e:1x1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest(tmp_path, name, slices, changes, message):
    with pytest.raises(plan.Refused, match=message):
        plan.check_sizes(prepared(tmp_path, **changes), absent(name, slices))


def test_what_divides_is_accepted(tmp_path):
    plan.check_sizes(prepared(tmp_path, fsdp=4, batch_size=32), absent("v5e:4x4", 2))
    plan.check_sizes(prepared(tmp_path, data=4, fsdp=4, batch_size=16), absent("v5e:4x4"))


def test_a_config_that_cannot_run_is_refused_without_its_data(tmp_path):
    config = tiny_config(tmp_path)
    config.data.source = "arrayrecord:"
    plan.prepare(config)
    config.model.num_heads = 0
    with pytest.raises(plan.Refused, match=r"model\.num_heads is 0"):
        plan.prepare(config)


HLO = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%body (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %gathered = bf16[4,8]{1,0:T(8,128)} all-gather(%part), replica_groups=[1,4]<=[4], dimensions={0}
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%own), replica_groups={{0,1,2,3}}
  %done = f32[8]{0} all-gather-done(%start)
}

%condition (x: (s32[], f32[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(21), metadata={}
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%all-reduce-scatter.1 (x: f32[16]) -> f32[4] {
  %sum = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%p), condition=%condition, body=%body, backend_config={}
  %kept = f32[4]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %part = f32[4]{0} reduce-scatter(%g), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}
  %total = (f32[]{:T(128)}, f32[3]{0}) all-reduce(%y, %z), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_collectives_count_as_often_as_they_run():
    assert collectives.traffic(HLO) == [
        ("all-gather", 42, 21 * (64 + 32)),
        ("reduce-scatter", 2, 64 + 64),
        ("all-reduce", 1, 4 + 12),
    ]


def searched(config, monkeypatch, limit, peak):
    """What a search finds, as (sequences a device, remat), whether it fits, and all that it compiled."""
    tried = {}

    def make_plan(config, target):
        rows = config.train.batch_size // len(target.devices) // config.train.accumulation
        assert (rows, config.model.remat) not in tried
        size = 2 + peak(rows, config.model.remat)
        tried[rows, config.model.remat] = size <= limit
        return Plan(1, 1, 0, size, limit, [], 0.0, 0.0, size <= limit)

    monkeypatch.setattr(plan, "make_plan", make_plan)
    monkeypatch.setattr(plan, "_too_many", lambda config, target: 40)
    target = Target(jax.devices(), limit, None)
    found, chosen = plan.search(config, target, lambda line: None)
    rows = found.train.batch_size // len(target.devices) // found.train.accumulation
    return (rows, found.model.remat), chosen.fits, tried


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "limit, best",
    [
        (9.0, (7, "full")),  # no power of two
        (10.9, (8, "full")),
        (4.0, (2, "full")),
        (3.0, (1, "full")),
        (2.5, (1, "full")),  # does not fit
        (102.0, (100, "full")),  # above where the search begins
        (5.75, (3, "dots")),  # between 3 sequences of 1.25 and 4 of 1
    ],
)
def test_search_finds_the_largest_batch(tmp_path, monkeypatch, accumulation, limit, best):
    held = {"none": 3.0, "dots": 1.25, "full": 1.0}  # of a sequence
    config = prepared(tmp_path, fsdp=2, batch_size=24, accumulation=accumulation)
    found, fits, tried = searched(
        config, monkeypatch, limit, lambda rows, remat: held[remat] * rows
    )
    assert found == best and fits == (limit >= 3) == tried[best]
    assert not tried.get((best[0] + fits, "full"))
    assert len(tried) <= 6


def test_search_finds_the_cheapest_remat_that_holds_the_largest_batch(tmp_path, monkeypatch):
    config = prepared(tmp_path, fsdp=2)
    assert searched(config, monkeypatch, 9, lambda rows, remat: rows)[0] == (7, "none")


def test_search_does_not_need_memory_to_grow_evenly(tmp_path, monkeypatch):
    def peak(rows, remat):
        return rows + rows**1.5 / 4 + rows % 2 if remat == "full" else 1000

    for limit in range(5, 60):
        (rows, _), fits, tried = searched(prepared(tmp_path, fsdp=2), monkeypatch, limit, peak)
        assert fits and not tried[rows + 1, "full"]
        assert len(tried) <= 9


@pytest.mark.parametrize(
    "message, size",
    [
        ("RESOURCE_EXHAUSTED: ... Used 24.00G of 15.75G hbm. Exceeded", 24 * 2**30),
        ("RESOURCE_EXHAUSTED: required for HLO temporaries (37.00G) exceeds", 37 * 2**30 + 5),
        ("INTERNAL: Used 24.00G of patience", None),
    ],
)
def test_the_compilers_messages_say_how_much_was_asked_for(message, size):
    assert plan._asked_for(message, 5) == size


def test_temporaries_that_fragment_count_once():
    # A step of libtpu 0.0.48, whose own account is 956.72 MiB of temporaries, 143.72 of what lies between
    # them, 1.95 of arguments and 43.43 of code.
    account = {
        "argument_size_in_bytes": 2041856,
        "output_size_in_bytes": 1953792,
        "alias_size_in_bytes": 1934848,
        "temp_size_in_bytes": 1304638464,
        "generated_code_size_in_bytes": 45755392,
        "total_allocation_bytes": 1156450816,
    }
    peak = plan._allocated(SimpleNamespace(**account))
    assert peak / 2**20 == pytest.approx(956.72 + 143.72 + 1.95 + 43.43, rel=2e-3)


def test_the_devices_that_are_present(tmp_path):
    config = prepared(tmp_path, fsdp=4, batch_size=8)
    target = plan.find_target(None)
    found = plan.make_plan(config, target)
    assert found.fits
    assert 0 < found.parameters < found.optimizer < found.peak
    assert {"all-gather", "all-reduce"} <= {x.kind for x in found.traffic}
    text = plan.report(config, target, found)
    assert "data=2, fsdp=4" in text and "it fits" in text


def command(*arguments):
    """Exit status and output of the planner's command."""
    root = Path(plan.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "ccq_jax.plan", "--config=configs/transformer.py", *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_exit_status_is_0_where_it_fits():
    status, said = command("--config.train.batch_size=2", "--time=1")
    assert status == 0 and "it fits" in said, said
    seconds, tokens = re.search(r"timed +(\S+) s a step, (\S+) tokens/s", said).groups()
    assert float(seconds) * float(tokens.replace(",", "")) == pytest.approx(2 * 512, rel=0.01)


@tpu
def test_the_exit_status_is_1_where_it_does_not_fit():
    status, said = command("--topology=v5e:1x1", "--config.train.batch_size=16384")
    assert status == 1 and "it does NOT fit" in said, said


def test_steps_elsewhere_cannot_be_timed():
    status, said = command("--topology=v5e:2x2", "--time=1")
    assert status == 2 and "leave --topology out" in said, said


def test_the_exit_status_is_2_where_there_is_nothing_to_compile():
    status, said = command("--topology=v5e:32x32")
    assert status == 2 and "the nearest that does is v5e:16x16" in said, said


@tpu
@pytest.mark.slow
def test_a_training_step_compiles_for_a_pod(tmp_path):
    config = prepared(tmp_path, fsdp=4, batch_size=8)
    target = plan.find_target("v5e:2x4")
    found = plan.make_plan(config, target)
    assert found.fits and found.limit < 16 * 2**30
    assert {"all-gather"} <= {x.kind for x in found.traffic}
    assert "pallas operators" in plan.report(config, target, found)


@tpu
@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_every_kernel_compiles_for_a_pod(operator):
    devices = topology.devices(Topology("v5e", (2, 2)))
    mesh = make_mesh(devices=devices)
    inputs = shapes.make_inputs(operator, Shape(4, 256, 2, 128, 128), dtype="bfloat16")
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)

    def loss(inputs):
        results = getattr(kernels, operator)(**inputs, implementation="pallas")
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(results))

    spec = PartitionSpec(("data", "fsdp"))
    mapped = jax.shard_map(jax.grad(loss), in_specs=(spec,), out_specs=spec, check_vma=False)
    with jax.set_mesh(mesh), topology.no_compilation_cache():
        text = jax.jit(mapped).trace(inputs).lower(lowering_platforms=("tpu",)).compile().as_text()
    for direction in ("forward", "backward"):
        assert f"{operator}_{direction}" in text
    assert text.count("tpu_custom_call") >= 2


@tpu
@pytest.mark.parametrize("name, fsdp", [("v5p:4x4x4", 8), ("v5p:4x4x4", 2), ("v5e:16x16", 16)])
def test_meshes_over_a_torus(name, fsdp):
    found = topology.parse(name)
    mesh = make_mesh(-1, fsdp, topology.devices(found))
    assert mesh.devices.shape == (found.size // fsdp, fsdp)
    assert len(set(mesh.devices.flat)) == found.size


@tpu
def test_parameters_stay_inside_a_slice():
    devices = topology.devices(Topology("v5e", (4, 4), slices=2))
    mesh = make_mesh(-1, 8, devices)
    assert isinstance(mesh, Mesh) and mesh.axis_types == (AxisType.Auto,) * 2
    for row in mesh.devices:
        assert len({device.slice_index for device in row}) == 1
    with pytest.raises(ValueError, match="fsdp must divide the 16 devices of a slice"):
        make_mesh(1, 32, devices)
