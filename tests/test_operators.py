"""Every implementation of every operator computes the recurrence, and its gradients."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from operators import PAIRS, assert_close, gradient_at, run, tokens

import kernels
from kernels import check, chunk, reference, shapes
from kernels.shapes import SHAPES, Shape

CASES = [
    check.Case(),
    check.Case("strong"),
    check.Case("mixed", "crowded"),
    check.Case("mild", "crowded", segments=True),
]
every = pytest.mark.parametrize("operator, implementation", PAIRS)


def assert_accurate(operator, implementation, inputs, dtype, **options):
    errors, _ = check.compare(operator, implementation, inputs, **options)
    wrong = {name: x for name, x in errors.items() if not x <= check.tolerance(name, dtype)}
    assert not wrong


@every
@pytest.mark.parametrize(
    "dtype, name",
    [("float32", "short"), ("float32", "tail"), ("float32", "odd"), ("bfloat16", "tail")],
)
def test_values_states_and_gradients_equal_the_float64_recurrence(
    operator, implementation, dtype, name
):
    for case in CASES:
        arguments = case._asdict()
        del arguments["centered"]
        inputs = shapes.make_inputs(operator, SHAPES[name], dtype=dtype, **arguments)
        # One document is as none; so all cases are one program.
        inputs.setdefault("segment_ids", jnp.zeros(inputs["q"].shape[:2], jnp.int32))
        assert_accurate(operator, implementation, inputs, dtype)


@every
@pytest.mark.parametrize("keys", shapes.KEYS)
def test_without_decay_and_without_a_state(operator, implementation, keys):
    inputs = shapes.make_inputs(
        operator, SHAPES["tail"], decay="none", keys=keys, initial_state=False
    )
    assert_accurate(operator, implementation, inputs, "float32")


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "gated_linear_attention"])
@pytest.mark.parametrize("decay", ["mild per head", "mixed per head"])
def test_one_decay_a_head(implementation, decay):
    inputs = shapes.make_inputs("gated_linear_attention", SHAPES["tail"], decay=decay)
    assert_accurate("gated_linear_attention", implementation, inputs, "float32")


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "ccq_query"])
def test_statistics_that_are_not_centered(implementation):
    inputs = shapes.make_inputs("ccq_query", SHAPES["tail"], decay="mixed")
    assert_accurate("ccq_query", implementation, inputs, "float32", centered=False)


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "gated_delta_rule"])
@pytest.mark.parametrize("dtype", check.DTYPES)
def test_value_heads_in_groups(implementation, dtype):
    inputs = shapes.make_inputs("gated_delta_rule", SHAPES["grouped"], dtype=dtype, decay="mixed")
    assert_accurate("gated_delta_rule", implementation, inputs, dtype)


@pytest.mark.parametrize(
    "operator, implementation, length",
    # Without chunks one length is as another.
    [(*pair, n) for pair in PAIRS for n in ((1, 2) if pair[1] == "scan" else range(1, 10))],
)
def test_any_few_tokens(operator, implementation, length):
    inputs = shapes.make_inputs(operator, Shape(2, length, 2, 8, 4))
    assert_accurate(operator, implementation, inputs, "float32")


@pytest.mark.parametrize("operator", shapes.OPERATORS)
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_groups_of_chunks_need_not_divide_the_length(operator, decay, monkeypatch):
    shape = Shape(2, 43, 1, 8, 8)  # three chunks: with two a group, the fourth is all padding
    two_chunks = 2 * shape.batch * shape.heads * shape.key_width * 16
    monkeypatch.setattr(chunk, "GROUP_ELEMENTS", {})
    monkeypatch.setattr(chunk, "GROUP_ELEMENTS_ELSEWHERE", two_chunks)
    inputs = shapes.make_inputs(operator, shape, decay=decay)
    assert_accurate(operator, "xla", inputs, "float32", chunk_size=16)


@every
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_decays_segments_and_chunks(operator, implementation, data):
    length = data.draw(st.sampled_from([21, 45]), label="length")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    keys = data.draw(st.sampled_from(shapes.KEYS), label="keys")
    inputs = shapes.make_inputs(
        operator, Shape(2, length, 1, 8, 4), seed=seed, keys=keys, decay="mixed", segments=True
    )
    floor = data.draw(st.sampled_from([0.0, -0.5, -20.0, -1e4, -np.inf]), label="floor")
    inputs["log_decay"] = jnp.maximum(inputs["log_decay"], floor)
    assert_accurate(operator, implementation, inputs, "float32", chunk_size=16)


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "ccq_query"])
def test_where_terms_cancel_the_error_is_that_of_rounding_the_inputs(implementation):
    # Here the gradient of the initial count is a thousandth of the terms that it sums.
    inputs = shapes.make_inputs(
        "ccq_query",
        Shape(2, 45, 1, 8, 4),
        seed=1425768,
        keys="crowded",
        decay="mixed",
        segments=True,
    )
    inputs["log_decay"] = jnp.maximum(inputs["log_decay"], -1e4)
    errors, expected = check.compare("ccq_query", implementation, inputs, chunk_size=16)
    cotangents = shapes.make_cotangents(*run("ccq_query", implementation, inputs))
    rng = np.random.default_rng(0)

    def rounded(x):
        half_ulps = 2.0**-24 * rng.uniform(-1, 1, x.shape)
        return x if x.dtype == np.int32 else np.asarray(x, np.float64) * (1 + half_ulps)

    movement = []
    for _ in range(4):
        moved = reference.gradients("ccq_query", jax.tree.map(rounded, inputs), *cotangents)
        count = moved["initial_state"][0]
        movement.append(check.relative_error(count, expected["dinitial_state.count"]))
    assert errors["dinitial_state.count"] <= 2 * max(movement)


@every
@settings(max_examples=8, deadline=None)
@given(cut=st.sampled_from([1, 16, 33]), seed=st.integers(0, 2**32 - 1))
def test_a_sequence_may_be_cut_anywhere(operator, implementation, cut, seed):
    inputs = shapes.make_inputs(operator, Shape(2, 40, 2, 8, 4), seed=seed, decay="mixed")
    whole = run(operator, implementation, inputs)
    first = tokens(inputs, 0, cut) | {"initial_state": inputs["initial_state"]}
    out, state = run(operator, implementation, first)
    rest = tokens(inputs, cut, None) | {"initial_state": state}
    more, state = run(operator, implementation, rest)
    assert_close((jnp.concatenate([out, more], 1), state), whole)


@every
def test_gradients_pass_through_a_cut(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(1, 40, 2, 8, 4), keys="crowded")
    function = getattr(kernels, operator)

    def loss(inputs, cut):
        state, outs = inputs["initial_state"], []
        for start, stop in ((0, cut), (cut, 40)) if cut else ((0, 40),):
            part = tokens(inputs, start, stop)
            out, state = function(**part, initial_state=state, implementation=implementation)
            outs.append(out)
        return sum((x**2).mean() for x in jax.tree.leaves((jnp.concatenate(outs, 1), state)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_close(gradient(inputs, 19), gradient(inputs, 0), 1e-4)


@every
def test_no_output_depends_on_later_tokens(operator, implementation):
    inputs = shapes.make_inputs(operator, SHAPES["tail"])
    for position in (0, 40, 82):
        gradients = gradient_at(operator, implementation, inputs, position)
        for name, gradient in gradients.items():
            if name != "initial_state":
                assert not np.any(gradient[:, position + 1 :]), name
        assert np.any(gradients["q"][:, position])
        assert np.any(gradients["k"][:, 0])


@every
def test_packed_documents_equal_separate_ones(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(2, 70, 2, 8, 4), initial_state=False)
    ids = np.repeat([5, 2, 9], [33, 1, 36])
    packed, state = run(operator, implementation, inputs | {"segment_ids": np.stack([ids, ids])})
    for start, stop in ((0, 33), (33, 34), (34, 70)):
        out, last = run(operator, implementation, tokens(inputs, start, stop))
        assert_close(packed[:, start:stop], out)
    assert_close(state, last)


@every
def test_segments_may_differ_by_row(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(2, 40, 1, 8, 4))
    ids = np.zeros((2, 40), np.int32)
    ids[1, 20:] = 1
    both = run(operator, implementation, inputs | {"segment_ids": ids})
    whole = run(operator, implementation, inputs)
    assert_close(*(jax.tree.map(lambda x: x[:1], results) for results in (both, whole)))
    rest, state = run(operator, implementation, tokens(inputs, 20, None))
    assert_close(both[0][1:, 20:], rest[1:])
    assert_close(*(jax.tree.map(lambda x: x[1:], s) for s in (both[1], state)))


@every
def test_no_gradient_crosses_a_segment(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(1, 40, 2, 8, 4), decay="none")
    ids = (np.arange(40) >= 25).astype(np.int32)[None]
    gradients = gradient_at(operator, implementation, inputs | {"segment_ids": ids}, 39)
    for name, gradient in gradients.items():
        earlier = gradient if name == "initial_state" else gradient[:, :25]
        assert not any(np.any(x) for x in jax.tree.leaves(earlier)), name
    assert np.any(gradients["k"][:, 25])


@every
@pytest.mark.parametrize("log_decay", [-np.inf, -1e4])
def test_after_a_reset_the_state_is_fresh(operator, implementation, log_decay):
    inputs = shapes.make_inputs(operator, Shape(1, 40, 2, 8, 4))
    inputs["log_decay"] = inputs["log_decay"].at[:, 17].set(log_decay)
    out, state = run(operator, implementation, inputs)
    assert_close((out[:, 17:], state), run(operator, implementation, tokens(inputs, 17, None)))
    gradient = gradient_at(operator, implementation, inputs, 39)["log_decay"]
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[:, 17])


@every
def test_rows_do_not_depend_on_each_other(operator, implementation):
    inputs = shapes.make_inputs(operator, Shape(3, 40, 2, 8, 4), decay="mixed")
    out, state = run(operator, implementation, inputs)
    one = jax.tree.map(lambda x: x[1:2], inputs)
    assert_close(jax.tree.map(lambda x: x[1:2], (out, state)), run(operator, implementation, one))


@every
@pytest.mark.parametrize("chunk_size", [16, 128])
def test_the_chunk_size_changes_nothing(operator, implementation, chunk_size):
    inputs = shapes.make_inputs(operator, SHAPES["odd"], decay="mixed")
    chunked = run(operator, implementation, inputs, (("chunk_size", chunk_size),))
    assert_close(chunked, run(operator, "scan", inputs))


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_have_the_dtype_of_the_inputs_and_states_float32(operator, implementation, dtype):
    inputs = shapes.make_inputs(operator, SHAPES["short"], dtype=dtype)
    out, state = run(operator, implementation, inputs)
    assert out.dtype == dtype
    assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype("float32")}
    for name, gradient in gradient_at(operator, implementation, inputs, 3).items():
        expected = jax.tree.map(lambda x: x.dtype, inputs[name])
        assert jax.tree.map(lambda x: x.dtype, gradient) == expected


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "ccq_query"])
@pytest.mark.parametrize("keys", shapes.KEYS)
def test_with_one_key_the_query_stays_as_it_is(implementation, keys):
    inputs = shapes.make_inputs("ccq_query", Shape(2, 20, 2, 8, 1), keys=keys, initial_state=False)
    inputs["log_decay"] = inputs["log_decay"].at[:, 9].set(-np.inf)
    out, _ = run("ccq_query", implementation, inputs)
    np.testing.assert_array_equal(out[:, [0, 9]], inputs["q"][:, [0, 9]])
    assert np.all(np.any(out[:, 1:9] != inputs["q"][:, 1:9], -1))


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "ccq_query"])
def test_the_query_contracts_along_the_covariance(implementation):
    inputs = shapes.make_inputs("ccq_query", Shape(1, 50, 1, 8, 1), decay="none")
    del inputs["initial_state"]
    out, state = run("ccq_query", implementation, inputs)
    keys = np.asarray(inputs["k"][0, :, 0], np.float64)
    covariance = np.cov(keys.T, bias=True)
    q, lam = inputs["q"][0, -1, 0], inputs["lam"][0, -1, 0]
    assert_close(out[0, -1, 0], q - lam * covariance @ q)
    assert_close(state.key_outer[0, 0] / state.count[0, 0], keys.T @ keys / 50)


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "gated_delta_rule"])
def test_a_group_of_value_heads_shares_its_key_head(implementation):
    inputs = shapes.make_inputs("gated_delta_rule", SHAPES["grouped"])
    repeated = inputs | {name: jnp.repeat(inputs[name], 2, axis=2) for name in ("q", "k")}
    run_of = [run("gated_delta_rule", implementation, x) for x in (inputs, repeated)]
    assert_close(*run_of)


@pytest.mark.parametrize("implementation", [i for o, i in PAIRS if o == "gated_delta_rule"])
def test_the_delta_rule_replaces_what_a_key_held(implementation):
    key = jnp.zeros((1, 2, 1, 8)).at[..., 3].set(1)
    value = jnp.arange(8.0).reshape(1, 2, 1, 4)
    ones = jnp.ones((1, 2, 1))
    out, _ = kernels.gated_delta_rule(
        key, key, value, 0 * ones, ones, scale=1.0, implementation=implementation
    )
    assert_close(out, value)
