"""decode_step, token by token: against float64, against the chunked operators, and its arguments."""

import importlib.util
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from operators import assert_close

import kernels
from kernels import bench, check, check_decode, dispatch, shapes, triton_util
from kernels.decode_step import triton

DELTA, GLA = check_decode.BACKBONES
SHORT = shapes.Shape(2, 21, 2, 12, 20)
GROUPED = SHORT._replace(value_heads=4)
plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
lowers = pytest.mark.skipif(
    triton_util.missing_packages() is not None or not plugin,
    reason=triton_util.missing_packages() or "JAX's CUDA plugin is not installed",
)
on_gpu = pytest.mark.skipif(
    triton_util.unavailable() is not None, reason=str(triton_util.unavailable())
)
HERE = [x for x in ("scan", "triton") if dispatch.unavailable("decode_step", x) is None]
each_backbone = pytest.mark.parametrize("backbone", check_decode.BACKBONES)


def inputs_of(backbone, shape=SHORT, dtype="float32", **case):
    return check_decode.make_inputs(backbone, shape, dtype, check.Case(**case))


def assert_accurate(backbone, implementation, shape, dtype, case):
    inputs = check_decode.make_inputs(backbone, shape, dtype, case)
    wanted = check_decode.expected(backbone, inputs, case.centered)
    found = check_decode.errors(implementation, inputs, wanted, case.centered)
    assert found.keys() == {"out", "state", "count", "mean", "covariance"}
    for tensor, error in found.items():
        assert error <= check.tolerance(tensor, dtype), f"{tensor}: {error:.1e}"


@pytest.mark.parametrize("case", [*check_decode.CASES, check.Case("mixed per head", "crowded")])
@each_backbone
def test_many_tokens_are_those_of_float64(backbone, case):
    if backbone == DELTA and case.decay == "mixed per head":
        pytest.skip("the delta rule has one decay a head in every case")
    shape = GROUPED if backbone == DELTA else SHORT
    for dtype in check.DTYPES:
        assert_accurate(backbone, "scan", shape, dtype, case)


def test_thousands_of_crowded_keys_cost_no_digits():
    shape = shapes.Shape(1, 8192, 1, 16, 8)
    assert_accurate(GLA, "scan", shape, "float32", check.Case("mild", "crowded"))


@each_backbone
def test_steps_are_the_operators_on_the_whole_sequence(backbone):
    inputs = inputs_of(backbone, decay="mixed", keys="crowded")
    out, state, moments = check_decode.decode(inputs, implementation="scan")
    options = {"implementation": "xla", "chunk_size": 16}
    q, sums = kernels.ccq_query(
        *(inputs[name] for name in ("q", "k", "lam")),
        log_decay=inputs["ccq_log_decay"],
        initial_state=inputs["moments"].sums(),
        **options,
    )
    names = [name for name in ("k", "v", "log_decay", "beta") if name in inputs]
    arguments = {"q": q, **{name: inputs[name] for name in names}}
    whole = getattr(kernels, backbone)(**arguments, initial_state=inputs["state"], **options)
    assert_close((out, state), whole)
    assert_close(moments.sums(), sums)


def one_token(inputs, t=0):
    """The arguments of one token: arrays [B, ...]."""
    states = ("state", "moments")
    tokens = {name: x if name in states else x[:, t] for name, x in inputs.items()}
    return {"log_decay": None, **tokens}


@each_backbone
def test_a_row_is_what_it_is_alone(backbone):
    token = one_token(inputs_of(backbone))
    together = kernels.decode_step(**token)
    for row in range(SHORT.batch):
        part = lambda tree, row=row: jax.tree.map(lambda x: x[row : row + 1], tree)
        assert_close(kernels.decode_step(**part(token)), part(together), 1e-6)


@each_backbone
def test_without_ccq_the_query_reads_as_it_is(backbone):
    token = one_token(inputs_of(backbone))
    plain = {name: x for name, x in token.items() if name not in ("lam", "moments")}
    out, state, moments = kernels.decode_step(**plain)
    assert moments is None
    conditioned = kernels.decode_step(**token | {"lam": jnp.zeros_like(token["lam"])})
    assert_close((out, state), conditioned[:2], 1e-6)
    assert (kernels.decode_step(**token)[0] != out).any()


@pytest.mark.parametrize("implementation", HERE)
@each_backbone
def test_one_layer_of_several_is_updated_and_the_others_stay(backbone, implementation):
    token = one_token(inputs_of(backbone)) | {"implementation": implementation}
    names = ("state", "moments")
    stacked = {
        name: jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), token[name]) for name in names
    }
    step = jax.jit(lambda layer: kernels.decode_step(**token | stacked, layer=layer))
    for layer in (0, 2):
        of_layer = {name: jax.tree.map(lambda x, i=layer: x[i], stacked[name]) for name in names}
        alone = kernels.decode_step(**token | of_layer)
        out, *states = step(jnp.int32(layer))
        assert_close(out, alone[0], 1e-6)
        pick = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
        assert_close(pick(states, layer), list(alone[1:]), 1e-6)
        for other in {0, 1, 2} - {layer}:
            before = pick([stacked[name] for name in names], other)
            jax.tree.map(np.testing.assert_array_equal, pick(states, other), before)


@pytest.mark.parametrize("implementation", HERE)
@each_backbone
def test_states_can_be_cut_out_of_a_larger_array_which_stays_as_it_is(backbone, implementation):
    token = one_token(inputs_of(backbone, shapes.SHAPES["k64"]))
    states = token.pop("state"), token.pop("moments")
    step = lambda state, moments, name: kernels.decode_step(
        **token, state=state, moments=moments, implementation=name
    )
    stacked = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), states)
    before = jax.tree.map(np.asarray, stacked)

    @jax.jit
    def each(stacked):
        return jax.lax.scan(lambda _, x: (None, step(*x, implementation)), None, stacked)[1]

    found = each(stacked)
    jax.tree.map(np.testing.assert_array_equal, stacked, before)
    assert_close(found, jax.vmap(lambda *x: step(*x, "scan"))(*stacked), 1e-5)


def test_the_statistics_can_count_another_key():
    token = one_token(inputs_of(GLA))
    out, state, moments = kernels.decode_step(**token, ccq_k=2 * token["k"])
    usual = kernels.decode_step(**token)
    count, mean, _ = usual[2]
    assert_close(state, usual[1], 1e-6)
    assert_close(moments.mean - mean, token["k"] / count[..., None], 1e-4)
    assert (out != usual[0]).any()


def test_a_reset_forgets_everything():
    token = one_token(inputs_of(DELTA))
    reset = {name: jnp.full_like(token["lam"], -jnp.inf) for name in ("log_decay", "ccq_log_decay")}
    empty = jax.tree.map(jnp.zeros_like, {name: token[name] for name in ("state", "moments")})
    assert_close(kernels.decode_step(**token | reset), kernels.decode_step(**token | empty), 1e-6)


@pytest.mark.parametrize("centered", [True, False])
def test_moments_and_sums_say_the_same(centered):
    keys = np.random.default_rng(0).normal(size=(1, 30, 1, 5)) + 2
    sums = kernels.ccq_query(*(jnp.asarray(keys, jnp.float32),) * 2, jnp.zeros((1, 30, 1)))[1]
    moments = sums.moments(centered)
    second = np.einsum("bthi,bthj->bhij", keys, keys) / 30
    wanted = np.cov(keys[0, :, 0].T, bias=True) if centered else second
    assert_close(moments.covariance.reshape(5, 5), wanted.reshape(5, 5), 1e-5)
    assert_close(moments.mean[0, 0], keys.mean((0, 1, 2)), 1e-6)
    assert_close(moments.sums(centered), sums, 1e-6)
    empty = jax.tree.map(jnp.zeros_like, sums).moments(centered)
    assert all((x == 0).all() for x in empty)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"lam": None}, ValueError, "moments is given and lam is None"),
        ({"moments": None}, ValueError, "lam is given and moments is None"),
        ({"moments": (1, 2, 3)}, TypeError, "moments is tuple; expected a CCQMoments"),
        ({"v": jnp.zeros((2, 3, 20))}, ValueError, "HV=3 .* expected a multiple of H, H=2"),
        ({"q": jnp.zeros((2, 2, 13))}, ValueError, "k has shape .* K is 12 here and 13"),
        ({"state": jnp.zeros((2, 2, 12, 20), int)}, TypeError, "state has dtype int32"),
        ({"layer": jnp.int32(0)}, ValueError, r"state has shape .*expected \[L, B=2, HV=2"),
        ({"ccq_k": jnp.zeros((2, 1, 12))}, ValueError, "ccq_k has shape .* H is 1 here and 2"),
        ({"scale": "wide"}, TypeError, "scale is .wide."),
        ({"implementation": "cuda"}, ValueError, "implementation is 'cuda'"),
        ({"implementation": "xla"}, RuntimeError, "'xla' cannot run here: it is not built"),
    ],
)
def test_a_bad_argument_is_named(change, error, message):
    token = one_token(inputs_of(DELTA)) | change
    if "v" in change:
        token |= {"log_decay": jnp.zeros((2, 3)), "beta": jnp.zeros((2, 3))}
        token["state"] = jnp.zeros((2, 3, 12, 20))
    with pytest.raises(error, match=message):
        kernels.decode_step(**token)


def test_grouped_values_need_beta():
    token = one_token(inputs_of(DELTA, GROUPED))
    with pytest.raises(ValueError, match="HV=4 heads; expected H, H=2"):
        kernels.decode_step(**token | {"beta": None, "log_decay": None})


def test_elsewhere_than_on_a_gpu_it_is_the_plain_recurrence_and_says_nothing(monkeypatch):
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(dispatch, "platform", lambda platform=platform: platform)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.select("decode_step", None).__name__ == "kernels.decode_step.scan"


def test_on_a_gpu_without_triton_it_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(triton, "unavailable", lambda: "no such package")
    with pytest.warns(RuntimeWarning, match="decode_step falls back from 'triton' .*no such"):
        assert dispatch.select("decode_step", None).__name__ == "kernels.decode_step.scan"


def test_check_covers_it(capsys):
    arguments = ["--op=decode_step", "--shapes=token", "--dtype=float32", "--json"]
    assert check.main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"out", "state", "covariance", "bits again"} <= {x["tensor"] for x in records}
    assert {x["operator"] for x in records} == {"decode_step"}


def test_bench_has_a_record_a_batch(capsys, monkeypatch):
    monkeypatch.setattr("kernels.bench_decode.BATCHES", (1, 2))
    monkeypatch.setattr("kernels.bench_decode.WORKING_SET_ON_CPU", 2**14)
    arguments = ["--op=decode_step", "--implementation=scan", "--shape=token", "--repeats=2"]
    assert bench.main(arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["sizes"]["batch"] for x in records] == [1, 2]
    for record in records:
        assert record["step_ms"] > 0 and record["copy_gbytes"] > 0 and record["layers"] > 1


@pytest.mark.parametrize("heads", [1, 6, 10**4])
@pytest.mark.parametrize("width", [8, 96, 512])
def test_a_tile_fits_and_leaves_blocks_for_every_multiprocessor(monkeypatch, width, heads):
    monkeypatch.setattr(triton_util, "num_cores", lambda: 132)
    for elements, fewest in ((triton.STATISTICS_TILE, 8), (triton.MEMORY_TILE, 16)):
        size = triton._tile(elements, width, 512, heads, fewest)
        assert size >= 8 and size * width <= elements
        assert size <= fewest or heads * 512 // size >= 2 * 132


def abstract_mesh(size=1):
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    axes = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((size,), ("data",), axis_types=axes, abstract_device=gpu)


@lowers
def test_lowers_for_cuda_in_a_loop_over_layers_and_says_what_is_in_place(monkeypatch):
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    token = one_token(inputs_of(DELTA, GROUPED, "bfloat16"))
    state, moments = jax.tree.map(
        lambda x: jnp.stack([x, x]), (token.pop("state"), token.pop("moments"))
    )

    def step(carry, layer):
        state, moments = carry
        out, *states = kernels.decode_step(
            **token, state=state, moments=moments, layer=layer, implementation="triton"
        )
        return tuple(states), out

    with jax.sharding.use_abstract_mesh(abstract_mesh()):
        loop = jax.jit(lambda *states: jax.lax.scan(step, states, jnp.arange(2)))
        text = loop.trace(state, moments).lower(lowering_platforms=("cuda",)).as_text()
    aliases = re.findall(r"output_operand_aliases = (.*?), result_layouts", text)
    assert [x.count("operand_index") for x in aliases] == [1, 3]


@lowers
@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("backbone, decay", [(DELTA, "mixed"), (GLA, "mixed"), (GLA, "none")])
def test_lowers_for_cuda_also_inside_shard_map(monkeypatch, backbone, decay, conditioned):
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    token = one_token(inputs_of(backbone, GROUPED, "bfloat16", decay=decay))
    if not conditioned:
        token = {x: token[x] for x in token if x not in ("lam", "moments", "ccq_log_decay")}
    run = lambda token: kernels.decode_step(**token, implementation="triton")
    for size in (1, 2):
        with jax.sharding.use_abstract_mesh(abstract_mesh(size)):
            split = PartitionSpec("data")
            mapped = run if size == 1 else jax.shard_map(run, in_specs=split, out_specs=split)
            text = jax.jit(mapped).trace(token).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("triton_kernel_call") == 1 + conditioned


@on_gpu
@pytest.mark.parametrize("case", check_decode.CASES)
@pytest.mark.parametrize("name", ["tail", "k96", "k128", "k256"])
@each_backbone
def test_the_kernel_is_that_of_float64(backbone, name, case):
    for dtype in check.DTYPES:
        assert_accurate(backbone, "triton", shapes.SHAPES[name], dtype, case)


@on_gpu
@each_backbone
def test_a_second_run_and_a_row_on_its_own_give_the_same_bits(backbone):
    inputs = inputs_of(backbone, shapes.SHAPES["k64"], "bfloat16")
    assert set(check_decode.repeats("triton", inputs).values()) == {0.0}
