"""The float64 adjoints are the derivatives of the float64 recurrences."""

import numpy as np
import pytest

from kernels import reference, shapes

STEP = 1e-5


def inner(results, cotangents):
    """<results, cotangents>, of arrays or tuples of arrays."""
    if isinstance(results, tuple):
        return sum(inner(x, y) for x, y in zip(results, cotangents, strict=True))
    return float(np.sum(np.asarray(results) * np.asarray(cotangents, np.float64)))


@pytest.mark.parametrize("decay", shapes.DECAYS)
@pytest.mark.parametrize("operator", shapes.OPERATORS)
def test_gradients_equal_finite_differences(operator, decay):
    shape = shapes.Shape(1, 5, 1, 3, 2, value_heads=2)
    inputs = shapes.make_inputs(operator, shape, decay=decay, segments=True)
    for options in ({}, {"centered": False}) if operator == "ccq_query" else ({}, {"scale": 0.7}):
        results = reference.forward(operator, inputs, **options)
        cotangents = shapes.make_cotangents(*results)
        gradients = reference.gradients(operator, inputs, *cotangents, **options)
        rng = np.random.default_rng(0)
        for name, gradient in gradients.items():
            parts = gradient if isinstance(gradient, tuple) else (gradient,)
            # One random direction an input; a reset has no neighbourhood to differ in.
            directions = [rng.standard_normal(x.shape) for x in parts]
            if name == "log_decay":
                directions[0][~np.isfinite(inputs[name])] = 0

            def moved(by, name=name, directions=directions, options=options, d=cotangents):
                value = inputs[name]
                old = value if isinstance(value, tuple) else (value,)
                new = tuple(
                    np.asarray(x, np.float64) + by * y for x, y in zip(old, directions, strict=True)
                )
                changed = inputs | {name: new if isinstance(value, tuple) else new[0]}
                return inner(reference.forward(operator, changed, **options), d)

            slope = (moved(STEP) - moved(-STEP)) / (2 * STEP)
            expected = inner(tuple(parts), tuple(directions))
            assert slope == pytest.approx(expected, rel=1e-6, abs=1e-6), name


def test_the_gradient_of_a_long_sequence_recomputes_the_same_states():
    inputs = shapes.make_inputs("gated_delta_rule", shapes.Shape(1, 30, 1, 4, 4))
    results = reference.forward("gated_delta_rule", inputs)
    d_out, d_state = shapes.make_cotangents(*results)
    whole = reference.gradients("gated_delta_rule", inputs, d_out, d_state)
    first = {n: x if n == "initial_state" else x[:, :13] for n, x in inputs.items()}
    _, state = reference.forward("gated_delta_rule", first)
    rest = {n: x[:, 13:] for n, x in inputs.items() if n != "initial_state"}
    rest["initial_state"] = state
    later = reference.gradients("gated_delta_rule", rest, d_out[:, 13:], d_state)
    earlier = reference.gradients("gated_delta_rule", first, d_out[:, :13], later["initial_state"])
    np.testing.assert_allclose(earlier["k"], whole["k"][:, :13], rtol=1e-12)
    np.testing.assert_allclose(earlier["initial_state"], whole["initial_state"], rtol=1e-12)
