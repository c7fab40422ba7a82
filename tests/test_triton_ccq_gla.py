"""CCQ's and GLA's Triton kernels: what they lower to without a GPU, and their results on one."""

import importlib
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kernels
from kernels import check, gluon_util, shapes, triton_util
from kernels.ccq_query import hopper, triton_tiles
from kernels.ccq_query import triton as ccq

OPERATORS = ("ccq_query", "gated_linear_attention")
STATIC = {"ccq_query": {"centered": True}, "gated_linear_attention": {"scale": 0.5}}
NAMES = {
    "ccq_query": ("q", "k", "lam", "log_decay", "initial_state"),
    "gated_linear_attention": ("q", "k", "v", "log_decay", "initial_state"),
}
H200 = "NVIDIA H200"
plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
lowers = pytest.mark.skipif(
    triton_util.missing_packages() is not None or not plugin,
    reason=triton_util.missing_packages() or "JAX's CUDA plugin is not installed",
)
on_gpu = pytest.mark.skipif(
    triton_util.unavailable() is not None, reason=str(triton_util.unavailable())
)


@pytest.mark.parametrize("operator", OPERATORS)
def test_named_on_a_cpu_says_that_it_needs_a_gpu(operator):
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    inputs = shapes.make_inputs(operator, shapes.SHAPES["short"])
    with pytest.raises(RuntimeError, match=r"needs a GPU.*cpu"):
        getattr(kernels, operator)(**inputs, implementation="triton")


@pytest.fixture
def tiles(monkeypatch):
    """Block sizes of one kernel, as a device with the given table would choose them."""

    def choose(operator, kernel, width, *, table=None, dtype=jnp.bfloat16, chunk=128, mode="all"):
        monkeypatch.setattr(triton_util, "device_kind", lambda: H200)
        monkeypatch.setattr(triton_util, "tuned_table", lambda: {H200: table or {}})
        x = jnp.zeros((1, 1, 1, width), dtype)
        if operator == "ccq_query":
            return triton_tiles.of(kernel, x, chunk, mode)
        return importlib.import_module(f"kernels.{operator}.triton")._tiles(kernel, x, x)

    return choose


@pytest.mark.parametrize("width", [8, 64, 96, 192, 256, 512])
@pytest.mark.parametrize(
    "kernel", ["states", "read", "read_backward", "adjoint", "keys", "log_decay"]
)
def test_ccq_tiles_fit_the_chunk_and_are_wide_enough(tiles, kernel, width):
    for chunk in (64, 128):
        for mode in ("all", "resets", "decay"):
            config = tiles("ccq_query", kernel, width, chunk=chunk, mode=mode)
            tokens = {"R", "S"} | ({"BT"} if kernel in ("keys", "log_decay") else set())
            columns = {name for name in config if name.startswith("B")} - tokens
            assert min(config[name] for name in columns) >= 64
            assert all(chunk % config[name] == 0 for name in tokens & config.keys())


@pytest.mark.parametrize(
    "kernel",
    ["scores", "strong_scores", "walk", "states", "reverse", "gradients", "strong_gradients"],
)
@pytest.mark.parametrize("width", [8, 64, 192, 512])
def test_gla_tiles_are_wide_enough(tiles, kernel, width):
    config = tiles("gated_linear_attention", kernel, width)
    assert min(size for name, size in config.items() if name.startswith("B")) >= 64


def test_long_sequences_of_few_heads_are_walked_in_parts(monkeypatch):
    monkeypatch.setattr(triton_util, "num_cores", lambda: 132)
    parts = lambda *shape: ccq._parts(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert parts(1, 4096, 16, 128) == 1
    assert parts(1, 65536, 8, 128) * 8 >= 132, "one sequence fills the card"
    assert parts(1, 100_000, 3, 256) == parts(64, 100_000, 3, 256), "the batch has no say"


def test_a_table_cannot_ask_for_tiles_that_are_miscompiled(tiles):
    entry = {"BT": 32, "S": 256, "num_warps": 4, "num_stages": 2}
    table = {"ccq_query.adjoint": {"bfloat16 K128": entry}}
    config = tiles("ccq_query", "adjoint", 128, table=table)
    assert (config["BT"], config["S"]) == (64, 128)


@pytest.mark.parametrize(
    "kind, width, dtype, chunk, mode, expected",
    [
        (H200, 128, "bfloat16", 128, "all", {"read", "walk"}),
        ("NVIDIA H100 80GB HBM3", 128, "float16", 128, "resets", {"read", "walk"}),
        ("NVIDIA H100 80GB HBM3", 64, "float16", 128, "resets", {"read"}),
        (H200, 128, "bfloat16", 128, "decay", set()),
        (H200, 128, "bfloat16", 64, "all", set()),
        (H200, 256, "bfloat16", 128, "all", {"read", "collect"}),
        (H200, 256, "bfloat16", 128, "decay", set()),
        (H200, 512, "bfloat16", 128, "all", set()),
        (H200, 96, "bfloat16", 128, "all", set()),
        (H200, 128, "float32", 128, "all", set()),
        ("NVIDIA A100-SXM4-80GB", 128, "bfloat16", 128, "all", set()),
        ("NVIDIA A100-SXM4-80GB", 256, "bfloat16", 128, "all", set()),
        ("NVIDIA B200", 128, "bfloat16", 128, "all", set()),
    ],
)
def test_the_kernels_for_hopper_are_for_what_they_can_do(
    kind, width, dtype, chunk, mode, expected, monkeypatch
):
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: gluon_util)
    monkeypatch.setattr(triton_util, "device_kind", lambda: kind)
    q = jax.ShapeDtypeStruct((1, 1000, 2, width), jnp.dtype(dtype))
    assert hopper.can_read(q, chunk, mode) is ("read" in expected)
    assert hopper.can_walk(q, chunk, mode) is ("walk" in expected)
    assert hopper.can_collect(q, chunk, mode) is ("collect" in expected)
    if chunk == 128:
        tokens = 128 if expected or width > 128 else 64
        assert ccq._chunks(q, None, mode) == (tokens, -(-1000 // tokens))


def test_without_its_packages_nothing_is_for_hopper(monkeypatch):
    monkeypatch.setattr(gluon_util, "_jaxlib", lambda: None)
    assert not gluon_util.can_run_on(H200)


def arguments(operator, name, dtype, decay="mild", **changes):
    shape = shapes.SHAPES[name]._replace(**changes)
    inputs = shapes.make_inputs(operator, shape, dtype=dtype, decay=decay)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.tree.map(struct, tuple(inputs.get(key) for key in NAMES[operator]))


def both_ways(operator, **options):
    module = importlib.import_module(f"kernels.{operator}.triton")
    static = STATIC[operator] | options

    def run(*inputs):
        out, state, residuals = module.forward(*inputs, **static)
        return out, state, module.backward(residuals, out, state, **static)

    return run


def abstract_mesh(size=1):
    gpu = jax.sharding.AbstractDevice(device_kind=H200, num_cores=132, platform="gpu")
    axes = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((size,), ("data",), axis_types=axes, abstract_device=gpu)


@lowers
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "name, dtype, decay",
    [
        ("k64", "bfloat16", "mild"),
        ("k128", "bfloat16", "none"),
        ("k192", "bfloat16", "none"),
        ("token", "bfloat16", "mild"),
        ("odd", "float32", "none"),
    ],
)
def test_every_kernel_lowers_for_cuda(operator, name, dtype, decay):
    inputs = arguments(operator, name, dtype, decay)
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        lowered = jax.jit(both_ways(operator)).trace(*inputs).lower(lowering_platforms=("cuda",))
    calls = {"ccq_query": 4, "gated_linear_attention": 5 if decay == "none" else 7}[operator]
    assert lowered.as_text().count("triton_kernel_call") >= calls


@lowers
@pytest.mark.parametrize(
    "name, dtype, calls",
    [
        ("k64", "bfloat16", 5),
        ("k128", "bfloat16", 4),
        ("k256", "bfloat16", 5),
        ("k512", "bfloat16", 5),
        ("tail", "float32", 7),
        ("k64", "float32", 7),
    ],
)
def test_segments_alone_lower_for_cuda(name, dtype, calls):
    inputs = arguments("ccq_query", name, dtype)
    for initial, more in ((False, 0), (True, 5)):
        run = both_ways("ccq_query", only_segments=True, has_initial_state=initial)
        with jax.sharding.use_abstract_mesh(abstract_mesh()):
            lowered = jax.jit(run).trace(*inputs).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("triton_kernel_call") == calls + more


@lowers
@pytest.mark.parametrize(
    "name, expected",
    [
        # Two groups of four compute, in a block for each chunk: reads, and the keys' gradients.
        ("k64", [(12, 24)] * 3),
        # In the walk of each head a third group computes too.
        ("k128", [(16, 4), *[(12, 32)] * 2]),
        # And where two blocks walk each head.
        ("k256", [(16, 4), *[(12, 8)] * 3]),
    ],
)
def test_the_warps_that_copy_are_started_too(name, expected, monkeypatch):
    started = []
    call = gluon_util._call

    def spy(code, arguments, grid):
        started.append((code.about["num_warps"], *grid))
        return call(code, arguments, grid)

    monkeypatch.setattr(gluon_util, "_call", spy)
    inputs = arguments("ccq_query", name, "bfloat16", "none")
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        jax.jit(both_ways("ccq_query")).trace(*inputs).lower(lowering_platforms=("cuda",))
    assert started == expected


@lowers
def test_without_a_gradient_the_walk_writes_no_states():
    inputs = arguments("ccq_query", "k128", "bfloat16", "none")
    sizes = []
    for run in (ccq.primal, ccq.forward):
        with jax.sharding.use_abstract_mesh(abstract_mesh()):
            traced = jax.make_jaxpr(lambda *x, run=run: run(*x, centered=True))(*inputs)
        (call,) = (e for e in traced.eqns if e.primitive.name == "ffi_call")
        sizes.append(max(math.prod(x.aval.shape) for x in call.outvars))
    assert sizes[0] == math.prod(inputs[0].shape) < sizes[1]


@lowers
@pytest.mark.parametrize("name", ["k128", "k256"])
def test_gradients_lower_with_poisoned_outputs(name, monkeypatch):
    # They are Refs, of which JAX cannot forget residuals.
    monkeypatch.setattr(ccq, "unavailable", lambda: None)
    q, k, lam, *_ = arguments("ccq_query", name, "bfloat16", "none")

    def gradients(q, k, lam):
        run = lambda *x: kernels.ccq_query(*x, implementation="triton")[0]
        out, pullback = jax.vjp(run, q, k, lam)
        return pullback(out)

    with jax.sharding.use_abstract_mesh(abstract_mesh()), triton_util.poisoned_outputs():
        jax.jit(gradients).trace(q, k, lam).lower(lowering_platforms=("cuda",))


@lowers
@pytest.mark.parametrize(
    "operator, decay, calls", [("gated_linear_attention", "mild", 6), ("ccq_query", "none", 5)]
)
def test_poisoned_outputs_are_full_of_nan_when_a_kernel_starts(operator, decay, calls):
    inputs = arguments(operator, "k64", "bfloat16", decay)
    with jax.sharding.use_abstract_mesh(abstract_mesh()), triton_util.poisoned_outputs():
        lowered = jax.jit(both_ways(operator)).trace(*inputs)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias") >= calls


@lowers
def test_one_decay_a_head_lowers_for_cuda():
    inputs = arguments("gated_linear_attention", "k64", "bfloat16", "mild per head")
    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        jax.jit(both_ways("gated_linear_attention")).trace(*inputs).lower(
            lowering_platforms=("cuda",)
        )


@lowers
@pytest.mark.parametrize("name", ["k64", "k128", "k256"])
@pytest.mark.parametrize("decay", ["mild", "none"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_lowers_inside_shard_map(operator, decay, name):
    inputs = arguments(operator, name, "bfloat16", decay, batch=2)
    with jax.sharding.use_abstract_mesh(abstract_mesh(2)):
        mapped = jax.shard_map(
            both_ways(operator), in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
        )
        jax.jit(mapped).trace(*inputs).lower(lowering_platforms=("cuda",))


CASES = [
    ("k64", "bfloat16", {"decay": "mixed", "segments": True}),
    ("k64", "bfloat16", {"decay": "none", "segments": True}),
    ("k256", "bfloat16", {"decay": "none", "segments": True, "keys": "crowded"}),
    ("k96", "bfloat16", {"decay": "strong"}),
    ("k128", "bfloat16", {"decay": "none", "keys": "crowded"}),
    ("k192", "bfloat16", {"decay": "mild"}),
    ("k128", "bfloat16", {"decay": "mild", "segments": True}),  # some of GLA's chunks are strong
    ("k256", "bfloat16", {"decay": "none"}),
    ("k512", "bfloat16", {"decay": "mild"}),
    ("tail", "float32", {"decay": "mixed", "keys": "crowded"}),
    ("k128", "float32", {"decay": "strong"}),
]


@on_gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name, dtype, options", CASES)
def test_results_and_gradients_are_those_of_float64(operator, name, dtype, options):
    inputs = shapes.make_inputs(operator, shapes.SHAPES[name], dtype=dtype, **options)
    errors, _ = check.compare(operator, "triton", inputs)
    too_large = {
        tensor: error
        for tensor, error in errors.items()
        if not error <= check.tolerance(tensor, dtype)
    }
    assert not too_large


@on_gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 64, 65, 127, 128, 129, 700])
@pytest.mark.parametrize(
    "dtype, segments, centered",
    [("bfloat16", False, True), ("float16", True, True), ("bfloat16", True, False)],
)
def test_chunks_of_any_length_are_those_of_float64(width, length, dtype, segments, centered):
    shape = shapes.Shape(2, length, 3, width, width)
    inputs = shapes.make_inputs(
        "ccq_query", shape, dtype=dtype, decay="none", keys="crowded", segments=segments
    )
    errors, _ = check.compare("ccq_query", "triton", inputs, centered=centered)
    assert all(error <= check.tolerance(name, dtype) for name, error in errors.items()), errors


@on_gpu
@pytest.mark.parametrize("name", ["k128", "k256"])
@pytest.mark.parametrize("operator", ["ccq_query", "gated_delta_rule"])
def test_what_other_gpus_run_in_place_of_gluon_is_right_too(operator, name, monkeypatch):
    monkeypatch.setattr(gluon_util, "can_run_on", lambda kind: False)
    jax.clear_caches()
    inputs = shapes.make_inputs(
        operator, shapes.SHAPES[name], dtype="bfloat16", decay="none", segments=True
    )
    errors, _ = check.compare(operator, "triton", inputs)
    jax.clear_caches()
    assert all(error <= check.tolerance(name, "bfloat16") for name, error in errors.items())


@on_gpu
@pytest.mark.parametrize("options", [{"decay": "mixed"}, {"decay": "none", "segments": True}])
@pytest.mark.parametrize("initial_state", [True, False])
def test_parts_of_a_sequence_add_up(options, initial_state, monkeypatch):
    monkeypatch.setattr(ccq, "LONG", 256)
    monkeypatch.setattr(ccq, "SHORTEST_PART", 128)
    jax.clear_caches()
    inputs = shapes.make_inputs(
        "ccq_query",
        shapes.SHAPES["k64"],
        dtype="bfloat16",
        keys="crowded",
        initial_state=initial_state,
        **options,
    )
    assert ccq._parts(inputs["q"]) > 1
    errors, _ = check.compare("ccq_query", "triton", inputs)
    jax.clear_caches()
    assert all(error <= check.tolerance(name, "bfloat16") for name, error in errors.items())


@on_gpu
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("initial_state", [False, True])
def test_results_without_a_gradient_have_the_same_bits(segments, initial_state):
    options = {"segments": segments, "initial_state": initial_state, "keys": "crowded"}
    inputs = shapes.make_inputs(
        "ccq_query", shapes.SHAPES["k128"], dtype="bfloat16", decay="none", **options
    )
    ids = inputs.pop("segment_ids", None)
    run = lambda x: kernels.ccq_query(**x, segment_ids=ids, implementation="triton")
    expected, _ = jax.jit(lambda x: jax.vjp(run, x))(inputs)
    for x, y in zip(jax.tree.leaves(jax.jit(run)(inputs)), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@on_gpu
@pytest.mark.parametrize("width", [128, 256])
def test_many_tokens_add_up_to_their_covariance(width, monkeypatch):
    # The tensor cores cut off what they add to a sum: with one for all of them this would be 1e-3.
    monkeypatch.setattr(ccq, "LONG", 1 << 30)
    shape = shapes.Shape(1, 262_144, 1, width, width)
    inputs = shapes.make_inputs(
        "ccq_query", shape, dtype="bfloat16", decay="none", keys="crowded", initial_state=False
    )
    _, state = kernels.ccq_query(**inputs, implementation="triton")
    k = np.asarray(inputs["k"][0, :, 0], np.float64)
    covariance = lambda outer, total: outer - np.outer(total, total) / len(k)
    expected = covariance(k.T @ k, k.sum(0))
    outer, total = (np.asarray(x[0, 0], np.float64) for x in (state.key_outer, state.key_sum))
    error = np.linalg.norm(covariance(outer, total) - expected) / np.linalg.norm(expected)
    assert error <= 3e-5, error


@on_gpu
@pytest.mark.parametrize("name", ["k128", "k256"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_second_run_and_a_row_on_its_own_give_the_same_bits(operator, name):
    inputs = shapes.make_inputs(operator, shapes.SHAPES[name], dtype="bfloat16", decay="none")
    assert set(check.repeats(operator, "triton", inputs).values()) == {0.0}


@on_gpu
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_more_chunks_than_multiprocessors_have_the_same_bits(width, segments):
    # 432 chunks, of which a block takes several; those of a row by itself have one each.
    shape = shapes.Shape(4, 2200, 6, width, width)
    inputs = shapes.make_inputs(
        "ccq_query", shape, dtype="bfloat16", decay="none", segments=segments
    )
    assert set(check.repeats("ccq_query", "triton", inputs).values()) == {0.0}


@on_gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("length", range(1, 10))
def test_a_few_tokens_are_finite(operator, length):
    shape = shapes.SHAPES["k64"]._replace(length=length)
    inputs = shapes.make_inputs(operator, shape, dtype="bfloat16", decay="mixed")
    out, state = getattr(kernels, operator)(**inputs, implementation="triton")
    assert all(
        math.isfinite(np.asarray(x, np.float64).sum()) for x in jax.tree.leaves((out, state))
    )


@on_gpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("decay", ["mild", "none"])
@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_two_gpus_give_the_bits_of_one(operator, decay):
    shape = shapes.SHAPES["k64"]
    inputs = shapes.make_inputs(operator, shape, dtype="bfloat16", decay=decay, segments=True)

    def gradients(inputs):
        ids = inputs.pop("segment_ids")

        def run(inputs):
            return getattr(kernels, operator)(**inputs, segment_ids=ids, implementation="triton")

        results, pullback = jax.vjp(run, inputs)
        return results, pullback(results)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(spec,), out_specs=spec)
    found, (expected, _) = jax.jit(sharded)(inputs), jax.tree.flatten(jax.jit(gradients)(inputs))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.array_equal(x, y), f"{jax.tree_util.keystr(path)}: {np.abs(x - y).max()}"
