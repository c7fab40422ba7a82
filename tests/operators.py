"""What the tests of the operators share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels import dispatch, shapes

# Every implementation that this machine can run, of every operator.
PAIRS = [
    (operator, implementation)
    for operator in shapes.OPERATORS
    for implementation in dispatch.IMPLEMENTATIONS
    if dispatch.unavailable(operator, implementation) is None
]
FLOATING = ("q", "k", "v", "lam", "log_decay", "beta", "initial_state")


@functools.partial(jax.jit, static_argnames=("operator", "implementation", "options"))
def run(operator, implementation, inputs, options=()):
    """(out, state)."""
    return getattr(kernels, operator)(**inputs, implementation=implementation, **dict(options))


@functools.partial(jax.jit, static_argnames=("operator", "implementation"))
def gradient_at(operator, implementation, inputs, position):
    """Gradients of the output at one position."""
    ids = {name: x for name, x in inputs.items() if name == "segment_ids"}

    def total(moving):
        out, _ = getattr(kernels, operator)(**moving, **ids, implementation=implementation)
        return out[:, position].astype(jnp.float32).sum()

    return jax.grad(total)({name: x for name, x in inputs.items() if name in FLOATING})


def tokens(inputs, start, stop):
    """The arguments of a part of the tokens; the initial state, which has no tokens, stays out."""
    return {name: x[:, start:stop] for name, x in inputs.items() if name != "initial_state"}


def assert_close(actual, expected, tolerance=1e-5):
    """Every array of one tree is near the other's, by norm."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for i, (x, y) in enumerate(pairs):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert np.isfinite(x).all()
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-10)
        assert error <= tolerance, f"array {i}: error {error:.1e}"
