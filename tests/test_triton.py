"""Triton implementations where no GPU is: dispatch, tuned table, and lowering for CUDA."""

import importlib.util
import json
import math
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from kernels import check, gated_delta_rule, gluon_util, shapes, triton_util, tune
from kernels.gated_delta_rule import hopper
from kernels.gated_delta_rule import triton as gdn

H200 = "NVIDIA H200"
PARAMETERS = {"num_warps", "num_stages"}


@pytest.fixture
def device(monkeypatch):
    """Makes block sizes be chosen for a device of a given kind, with a given table."""

    def use(kind, table=None):
        monkeypatch.setattr(triton_util, "device_kind", lambda: kind)
        monkeypatch.setattr(triton_util, "tuned_table", lambda: table or {})
        triton_util.warn_untuned.cache_clear()

    return use


def choose(shape="bfloat16 K128 V128"):
    candidates = [{"BLOCK": size, "num_warps": 4, "num_stages": 2} for size in (128, 64, 16)]
    return triton_util.choose("op.kernel", shape, candidates, lambda c: c["BLOCK"] * 1800)


def test_named_on_a_cpu_says_that_it_needs_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("says what a machine without a GPU is told; this one has one")
    inputs = shapes.make_inputs("gated_delta_rule", shapes.SHAPES["short"])
    with pytest.raises(RuntimeError, match=r"needs a GPU.*cpu"):
        gated_delta_rule(**inputs, implementation="triton")


@pytest.mark.parametrize(
    "key_dim, value_dim, name",
    [(128, 128, "bfloat16 K128 V128"), (192, 96, "bfloat16 K256 V128"), (64, 0, "bfloat16 K64")],
)
def test_shapes_share_a_bucket_up_to_the_next_power_of_two(key_dim, value_dim, name):
    assert triton_util.bucket(jnp.bfloat16, key_dim, value_dim) == name


def test_the_tuned_entry_wins(device):
    entry = {"BLOCK": 32, "num_warps": 8, "num_stages": 3}
    device(H200, {H200: {"op.kernel": {"bfloat16 K128 V128": entry}}})
    assert choose() == entry
    assert choose("bfloat16 K64 V64")["BLOCK"] == 128


@pytest.mark.parametrize("kind, block", [(H200, 128), ("NVIDIA A100-SXM4-80GB", 64), ("Small", 16)])
def test_less_shared_memory_takes_smaller_tiles(device, monkeypatch, kind, block):
    monkeypatch.setattr(triton_util, "SMALLEST_SHARED_MEMORY", 48 * 1024)
    device(kind, {kind: {}})
    assert choose()["BLOCK"] == block


def test_an_unknown_device_is_warned_of_once(device):
    device("NVIDIA Unheard-of")
    with pytest.warns(UserWarning, match=r"Unheard-of.*heuristic"):
        choose()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose()


def test_the_table_holds_complete_launches_of_known_buckets():
    table = json.loads(triton_util.TABLE.read_text())
    assert table
    for kernels in table.values():
        for name, buckets in kernels.items():
            assert name.split(".")[0] in shapes.OPERATORS
            for shape, entry in buckets.items():
                dtype, *dims = shape.split()
                assert dtype in ("bfloat16", "float32") and dims
                assert entry.keys() >= PARAMETERS
                assert all(value >= 1 for value in entry.values())


@pytest.mark.parametrize(
    "length, heads, parts",
    [(4096, 8, 1), (16384, 8, 8), (65536, 8, 16), (65536, 64, 2), (65537, 8, 1), (43884, 1, 4)],
)
def test_long_sequences_of_few_heads_are_walked_in_parts(monkeypatch, length, heads, parts):
    monkeypatch.setattr(triton_util, "num_cores", lambda: 132)
    for batch in (1, 8):  # a row's result must not depend on the batch's size
        v = jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
        assert gdn._parts(v) == parts


def test_a_small_device_takes_shorter_chunks(device, monkeypatch):
    q = jax.ShapeDtypeStruct((1, 64, 1, 512), jnp.bfloat16)
    device(H200)
    assert gdn._chunk("backward", q, q, None) == 64
    assert gdn._chunk("backward", q, q, 16) == 16
    device("NVIDIA L4")
    assert gdn._chunk("backward", q, q, None) == 32


def test_tuning_changes_one_number_at_a_time():
    near = list(tune.neighbours({"BLOCK_K": 16, "num_warps": 4, "num_stages": 1}))
    expected = {(32, 4, 1), (16, 2, 1), (16, 8, 1), (16, 4, 2)}
    assert {tuple(config.values()) for config in near} == expected


def test_tuning_keeps_a_limit_of_registers_within_what_a_gpu_has():
    near = [config["maxnreg"] for config in tune.neighbours({"maxnreg": 128})]
    assert near == [168]


def test_tuning_climbs_to_the_fastest_and_times_nothing_twice():
    timed = []

    def time(config):
        timed.append(tuple(config.values()))
        block, stages = timed[-1]
        if block == 256:  # refused
            return math.inf
        return 10 - block / 32 - stages + (3 if stages == 2 and block < 128 else 0)

    start = {"BLOCK": 16, "num_stages": 1}
    assert tune.climb([start], time) == {"BLOCK": 128, "num_stages": 4}
    assert len(timed) == len(set(timed))
    assert tune.climb([start], lambda config: 1 - 1e-3 * config["BLOCK"] / 32) == start  # noise
    elsewhere = {"BLOCK": 512, "num_stages": 1}  # no step leads there
    assert tune.climb([start, elsewhere], lambda config: 3 - (config == elsewhere)) == elsewhere
    assert tune.climb([start, elsewhere], lambda config: 3 - 1e-3 * (config == elsewhere)) == start


def test_tuning_writes_the_fastest_of_what_is_right(monkeypatch, tmp_path, capsys):
    """Of a kernel whose times and results are made up; it takes 64 columns where it is told 32."""
    table = {}
    monkeypatch.setattr(triton_util, "TABLE", tmp_path / "tuned.json")
    monkeypatch.setattr(triton_util, "tuned_table", lambda: table)
    monkeypatch.setattr(triton_util, "device_kind", lambda: H200)
    monkeypatch.setattr(triton_util, "warn_untuned", lambda kind: None)
    made = []

    class Program:
        def __init__(self, config):
            self.config = config

        def __call__(self):
            return jnp.full(3, jnp.nan if self.config["num_warps"] == 8 else 1.0)

        def sample(self):
            return 1.0 / self.config["num_warps"] + 1e-4 * self.config["BK"]

    def fresh():
        sizes = [{"BK": 64, "num_warps": 2}, {"BK": 512, "num_warps": 2}]
        fit = lambda name, value: max(value, 64) if name == "BK" else value
        made.append(triton_util.choose("op.kernel", "bfloat16 K64", sizes, lambda config: 0, fit))
        if made[-1]["BK"] == 128:
            raise jax.errors.JaxRuntimeError("too much shared memory")
        return Program(made[-1])

    monkeypatch.setattr(tune, "problem", lambda *_: fresh)
    tune.tune("gated_delta_rule", shapes.SHAPES["k64"], "bfloat16", "mild")
    expected = {"BK": 64, "num_warps": 4}
    assert json.loads(triton_util.TABLE.read_text()) == {
        H200: {"op.kernel": {"bfloat16 K64": expected}}
    }
    said = capsys.readouterr().out
    assert "differs" in said and "'BK': 32" not in said


def test_tuning_without_a_gpu_says_why(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("says what a machine without a GPU is told; this one has one")
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--op=gated_delta_rule"])
    assert stopped.value.code == 1
    assert "needs a GPU" in capsys.readouterr().err


plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
lowers = pytest.mark.skipif(
    triton_util.missing_packages() is not None or not plugin,
    reason=triton_util.missing_packages() or "JAX's CUDA plugin is not installed",
)


def abstract_mesh(size=1):
    gpu = jax.sharding.AbstractDevice(device_kind=H200, num_cores=132, platform="gpu")
    axes = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((size,), ("data",), axis_types=axes, abstract_device=gpu)


def structs(shape, dtype):
    inputs = shapes.make_inputs("gated_delta_rule", shape, dtype=dtype)
    names = ("q", "k", "v", "log_decay", "beta", "initial_state")
    return tuple(jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in names)


def both_ways(*inputs):
    out, state, residuals = gdn.forward(*inputs, scale=0.5)
    return out, state, gdn.backward(residuals, out, state, scale=0.5)


@lowers
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("k64", "bfloat16"),
        ("k128", "bfloat16"),
        ("token", "bfloat16"),
        ("odd", "float32"),
        ("grouped", "bfloat16"),
        pytest.param("k96", "bfloat16", marks=pytest.mark.slow),
        pytest.param("k256", "bfloat16", marks=pytest.mark.slow),
        pytest.param("k512", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_gated_delta_rule_lowers_for_cuda(name, dtype):
    inputs = structs(shapes.SHAPES[name], dtype)
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        lowered = jax.jit(both_ways).trace(*inputs).lower(lowering_platforms=("cuda",))
    out, state, gradients = lowered.out_info
    assert (out.shape, out.dtype) == (inputs[2].shape, inputs[2].dtype)
    assert state.shape == inputs[5].shape
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]


@lowers
@pytest.mark.parametrize("name", ["short", "k128"])
def test_gated_delta_rule_lowers_inside_shard_map(name):
    inputs = structs(shapes.SHAPES[name]._replace(batch=2), "bfloat16")
    batch = PartitionSpec("data")
    with jax.sharding.use_abstract_mesh(abstract_mesh(2)):
        mapped = jax.shard_map(both_ways, in_specs=batch, out_specs=batch)
        lowered = jax.jit(mapped).trace(*inputs).lower(lowering_platforms=("cuda",))
    assert lowered.out_info[0].shape == inputs[2].shape


@lowers
def test_what_a_kernel_writes_over_comes_before_its_other_results(monkeypatch):
    # jaxlib's call hands a kernel its first buffers, all operands before all results.
    calls = []
    call = jax.ffi.ffi_call

    def spy(name, shapes, input_output_aliases=None):
        def run(*arrays, **attributes):
            calls.append((len(arrays), len(shapes), dict(input_output_aliases or {})))
            return call(name, shapes, input_output_aliases=input_output_aliases)(
                *arrays, **attributes
            )

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", spy)
    inputs = structs(shapes.SHAPES["k128"], "bfloat16")
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        jax.jit(lambda *x: gdn.forward(*x, scale=0.5)[:2]).trace(*inputs)
    prepare, walk = calls
    assert prepare[2] == {}
    # The last operand is the last result, though the first of the kernel's.
    assert walk[2] == {walk[0] - 1: walk[1] - 1}


def test_an_array_to_write_over_after_other_results_is_refused():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(ValueError, match="before its other results"):
        gluon_util.launch(None, out=(shape, jnp.zeros(4)), grid=(1,), num_warps=4)


@pytest.mark.parametrize(
    "kind, heads, key_dim, value_heads, value_dim, dtype, chunk, expected",
    [
        (H200, 2, 128, 2, 128, "bfloat16", 64, "prepare walk differentiate"),
        ("NVIDIA H100 80GB HBM3", 2, 256, 2, 64, "float16", 64, "prepare differentiate"),
        (H200, 2, 64, 2, 128, "bfloat16", 64, "prepare"),
        (H200, 2, 192, 2, 128, "bfloat16", 64, ""),
        (H200, 2, 512, 2, 128, "bfloat16", 64, ""),
        (H200, 2, 128, 2, 96, "bfloat16", 64, "prepare"),
        (H200, 2, 128, 4, 256, "bfloat16", 64, "prepare walk"),
        (H200, 2, 128, 2, 128, "bfloat16", 32, ""),
        (H200, 2, 128, 2, 128, "float32", 64, ""),
        ("NVIDIA B200", 2, 128, 2, 128, "bfloat16", 64, ""),
    ],
)
def test_the_kernels_for_hopper_are_for_what_they_can_do(
    kind, heads, key_dim, value_heads, value_dim, dtype, chunk, expected, monkeypatch
):
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: gluon_util)
    monkeypatch.setattr(triton_util, "device_kind", lambda: kind)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    k, v = struct(1, 1000, heads, key_dim), struct(1, 1000, value_heads, value_dim)
    can = {
        "prepare": hopper.can_prepare(k, chunk),
        "walk": hopper.can_walk(k, value_dim, chunk),
        "differentiate": hopper.can_differentiate(k, v, chunk),
    }
    assert " ".join(name for name, it_can in can.items() if it_can) == expected


@pytest.mark.parametrize(
    "chunk_size, forward, backward", [(None, 64, 64), (32, 32, 32), (128, 64, 64)]
)
def test_walks_for_hopper_take_chunks_of_64_both_ways(
    chunk_size, forward, backward, device, monkeypatch
):
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: gluon_util)
    device(H200)
    q, v = (jax.ShapeDtypeStruct((1, 1000, 2, width), jnp.bfloat16) for width in (256, 512))
    assert gdn._chunk("forward", q, v, chunk_size) == forward
    assert gdn._chunk("backward", q, v, chunk_size) == backward
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: None)
    assert gdn._chunk("forward", q, v, None) == 32


on_gpu = pytest.mark.skipif(
    triton_util.unavailable() is not None, reason=str(triton_util.unavailable())
)


@on_gpu
@pytest.mark.parametrize(
    "key_dim, value_dim, value_heads",
    [(64, 128, 3), (128, 128, 3), (128, 64, 3), (128, 128, 6), (256, 512, 3), (256, 128, 6)],
)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
@pytest.mark.parametrize(
    "dtype, decay, keys, segments",
    [
        ("bfloat16", "mild", "crowded", False),
        ("float16", "mixed", "crowded", True),
        # In bfloat16 the gradient of decays is a small difference of rounded numbers here.
        ("float16", "strong", "random", False),
    ],
)
def test_chunks_of_any_length_are_those_of_float64(
    key_dim, value_dim, value_heads, length, dtype, decay, keys, segments
):
    shape = shapes.Shape(2, length, 3, key_dim, value_dim, value_heads)
    inputs = shapes.make_inputs(
        "gated_delta_rule", shape, dtype=dtype, decay=decay, keys=keys, segments=segments
    )
    errors, _ = check.compare("gated_delta_rule", "triton", inputs)
    assert all(error <= check.tolerance(name, dtype) for name, error in errors.items()), errors


@on_gpu
@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (128, 128), (256, 512)])
@pytest.mark.parametrize(
    "decay, segments, initial_state",
    [("mild", False, False), ("mixed", False, True), ("none", True, True)],
)
def test_parts_of_a_sequence_add_up(
    key_dim, value_dim, decay, segments, initial_state, monkeypatch
):
    monkeypatch.setattr(gdn, "LONG", 256)
    monkeypatch.setattr(gdn, "SHORTEST_PART", 128)
    jax.clear_caches()
    inputs = shapes.make_inputs(
        "gated_delta_rule",
        shapes.Shape(2, 1000, 2, key_dim, value_dim),
        dtype="bfloat16",
        decay=decay,
        keys="crowded",
        segments=segments,
        initial_state=initial_state,
    )
    assert gdn._parts(inputs["v"]) > 1
    errors, _ = check.compare("gated_delta_rule", "triton", inputs)
    jax.clear_caches()
    assert all(error <= check.tolerance(name, "bfloat16") for name, error in errors.items()), errors


@on_gpu
@pytest.mark.parametrize(
    "shape", [shapes.Shape(9, 150, 16, 128, 128), shapes.Shape(6, 150, 6, 256, 512)]
)
@pytest.mark.parametrize("segments", [True, False])
def test_more_walks_than_multiprocessors_are_cut_without_a_trace(shape, segments):
    inputs = shapes.make_inputs(
        "gated_delta_rule", shape, dtype="bfloat16", decay="mixed", segments=segments
    )
    assert set(check.repeats("gated_delta_rule", "triton", inputs).values()) == {0.0}
    errors, _ = check.compare("gated_delta_rule", "triton", inputs)
    assert all(error <= check.tolerance(name, "bfloat16") for name, error in errors.items()), errors
