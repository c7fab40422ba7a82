"""Wrong arguments are refused by name; the implementation that runs is the one that was asked for."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import dispatch, shapes

SHAPE = shapes.Shape(2, 6, 2, 4, 3)


def call(operator, changes, **options):
    inputs = shapes.make_inputs(operator, SHAPE)
    for name, change in changes.items():
        inputs[name] = change(inputs[name]) if callable(change) else change
    return getattr(kernels, operator)(**inputs, **options)


@pytest.mark.parametrize("operator", shapes.OPERATORS)
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": lambda q: q[0]}, ValueError, r"q has shape \(6, 2, 4\); expected \[B, T, H, K\], 4"),
        ({"q": lambda q: q.astype(int)}, TypeError, "q has dtype int32; expected one of float32"),
        ({"q": lambda q: q[:, :0]}, ValueError, "q has shape .*T must be at least 1"),
        ({"q": [1.0]}, TypeError, "q is list; expected an array"),
        ({"k": lambda k: k[:, :5]}, ValueError, r"k has shape \(2, 5, 2, 4\).*T is 5 here and 6"),
        ({"k": lambda k: k[:, :, :1]}, ValueError, r"k has shape .*H=2.*H is 1 here and 2"),
        ({"k": lambda k: k[..., :3]}, ValueError, "k has shape .*K is 3 here and 4"),
        ({"k": lambda k: np.asarray(k, float)}, TypeError, "k has dtype float64"),
        ({"log_decay": lambda g: g[:1]}, ValueError, "log_decay has shape .*B is 1 here and 2"),
        ({"log_decay": lambda g: g[:, :, :1]}, ValueError, "log_decay has shape"),
        ({"segment_ids": jnp.zeros((2, 5), int)}, ValueError, "segment_ids has shape .*T is 5"),
        ({"segment_ids": jnp.zeros((2, 6))}, TypeError, "segment_ids has dtype float32.*integer"),
    ],
)
def test_a_wrong_array_is_named_with_what_would_be_right(operator, changes, error, message):
    with pytest.raises(error, match=f"{operator}: {message}"):
        call(operator, changes)


@pytest.mark.parametrize(
    "operator, changes, error, message",
    [
        ("gated_delta_rule", {"beta": lambda x: x[..., :1]}, ValueError, "beta has shape"),
        ("gated_delta_rule", {"log_decay": None}, TypeError, "log_decay is NoneType; expected an"),
        ("gated_delta_rule", {"initial_state": lambda x: x[:, :1]}, ValueError, "initial_state"),
        ("gated_linear_attention", {"v": lambda x: x[:, :, :1]}, ValueError, "v has shape .*H=2"),
        ("gated_linear_attention", {"log_decay": lambda x: x[..., :2]}, ValueError, "K is 2 here"),
        ("ccq_query", {"lam": lambda x: x[..., None]}, ValueError, "lam has shape .*3 dimensions"),
        ("ccq_query", {"initial_state": (1, 2)}, TypeError, "initial_state is tuple.*CCQState"),
        (
            "ccq_query",
            {"initial_state": lambda x: x._replace(key_sum=x.key_sum[..., :3])},
            ValueError,
            "initial_state.key_sum has shape .*K is 3 here and 4",
        ),
    ],
)
def test_an_operator_checks_its_own_arrays(operator, changes, error, message):
    with pytest.raises(error, match=message):
        call(operator, changes)


def test_value_heads_must_be_a_multiple_of_key_heads():
    inputs = shapes.make_inputs("gated_delta_rule", SHAPE._replace(value_heads=3))
    with pytest.raises(ValueError, match="HV=3 value heads; expected a multiple of H=2"):
        kernels.gated_delta_rule(**inputs)


@pytest.mark.parametrize("operator", shapes.OPERATORS)
@pytest.mark.parametrize("chunk_size", [0, 24, 512, 64.0, True])
def test_a_chunk_size_is_a_power_of_two(operator, chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}; expected None or one of 16"):
        call(operator, {}, chunk_size=chunk_size)


def test_a_scale_is_a_number():
    with pytest.raises(TypeError, match="scale is 'big'; expected None or a Python number"):
        call("gated_delta_rule", {}, scale="big")
    with pytest.raises(TypeError, match="known before tracing"):
        jax.jit(lambda scale: call("gated_linear_attention", {}, scale=scale))(1.0)
    with pytest.raises(TypeError, match="centered is 1; expected True or False"):
        call("ccq_query", {}, centered=1)


@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_an_unknown_implementation_is_refused(operator):
    with pytest.raises(
        ValueError, match="implementation is 'cuda'; expected None or one of 'scan'"
    ):
        call(operator, {}, implementation="cuda")


@pytest.mark.parametrize("operator", shapes.OPERATORS)
@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_a_named_implementation_that_cannot_run_says_why(operator, implementation):
    reason = dispatch.unavailable(operator, implementation)
    if reason is None:
        pytest.skip(f"{implementation} can run here, so it has nothing to say")
    with pytest.raises(RuntimeError, match=f"'{implementation}' cannot run here: ."):
        call(operator, {}, implementation=implementation)


def test_the_best_of_a_platform_runs_and_a_fallback_warns_once(monkeypatch):
    reasons = {"triton": None, "pallas": "no TPU"}
    monkeypatch.setattr(dispatch, "unavailable", lambda operator, name: reasons.get(name))
    monkeypatch.setattr(dispatch, "_module", lambda operator, name: name)
    dispatch._warn_once.cache_clear()
    for platform, best in (("gpu", "triton"), ("cpu", "xla"), ("other", "xla")):
        monkeypatch.setattr(dispatch, "platform", lambda platform=platform: platform)
        assert dispatch.select("gated_delta_rule", None, length=2) == best
        assert dispatch.select("gated_delta_rule", None, length=1) == "scan"
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="gated_delta_rule falls back from 'pallas' on tpu: no"):
        assert dispatch.select("gated_delta_rule", None, length=2) == "xla"
    assert dispatch.select("gated_delta_rule", None, length=2) == "xla"
    dispatch._warn_once.cache_clear()


def test_a_forward_with_refs_says_so(monkeypatch):
    def square(x):
        ref = jax.new_ref(x)
        ref[...] *= x
        return jax.freeze(ref), x, 2 * x

    module = types.ModuleType("square")
    module.forward = module.primal = square
    module.backward = lambda slope, d_out, d_state: (slope * d_out + d_state,)
    monkeypatch.setattr(dispatch, "select", lambda *names, length: module)

    def both_ways(x):
        out, pullback = jax.vjp(lambda x: dispatch.call("square", None, (x,))[0], x)
        return out, pullback(out)

    with pytest.raises(NotImplementedError, match="remat_opt"):
        jax.jit(both_ways)(jnp.ones((1, 3)))
    module.REFS = True
    out, (gradient,) = jax.jit(both_ways)(jnp.full((1, 4), 3.0))  # traced anew
    assert jnp.array_equal(out, jnp.full((1, 4), 9.0))
    assert jnp.array_equal(gradient, jnp.full((1, 4), 2 * 3 * 9.0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_the_default_on_a_cpu_does_not_warn(operator):
    if jax.default_backend() != "cpu":
        pytest.skip("says what holds where JAX's devices are CPUs; here they are not")
    call(operator, {})


def test_inputs_of_mixed_precision_are_computed_in_the_wider():
    inputs = shapes.make_inputs("gated_linear_attention", SHAPE)
    mixed = inputs | {"v": inputs["v"].astype(jnp.bfloat16)}
    out, _ = kernels.gated_linear_attention(**mixed)
    widened = inputs | {"v": mixed["v"].astype(jnp.float32)}
    expected, _ = kernels.gated_linear_attention(**widened)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))
