"""Cross-entropy in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from ccq_jax.loss import token_losses

B, T, D, N = 2, 12, 8, 50


def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (B, T, D))
    kernel = jax.random.normal(keys[1], (D, N))
    targets = jax.random.randint(keys[2], (B, T), 0, N)
    return hidden, kernel, targets


def total(hidden, kernel, targets, chunk):
    losses = token_losses(lambda h: h @ kernel, hidden, targets, chunk)
    return jnp.sum(losses * jnp.arange(T)), losses


def test_losses_are_minus_log_probabilities():
    hidden, kernel, targets = inputs()
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, np.asarray(targets)[..., None], axis=-1)[..., 0])
    _, losses = total(hidden, kernel, targets, 0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 5, 12, 100])
def test_chunks_change_neither_losses_nor_gradients(chunk):
    hidden, kernel, targets = inputs()
    compute = jax.value_and_grad(total, (0, 1), has_aux=True)
    (_, expected), expected_grads = compute(hidden, kernel, targets, 0)
    (_, losses), grads = compute(hidden, kernel, targets, chunk)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for grad, other in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, other, rtol=1e-5, atol=1e-5)


def test_the_logits_of_a_batch_never_exist():
    hidden, kernel, targets = inputs()
    step = jax.grad(lambda h, w: total(h, w, targets, 3)[0], (0, 1))
    assert largest(jax.make_jaxpr(step)(hidden, kernel).jaxpr) < B * T * N
    whole = jax.grad(lambda h, w: total(h, w, targets, 0)[0], (0, 1))
    assert largest(jax.make_jaxpr(whole)(hidden, kernel).jaxpr) >= B * T * N


def largest(jaxpr) -> int:
    """The number of elements of the largest array in a program."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "size")]
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if isinstance(inner, Jaxpr):
                    sizes.append(largest(inner))
    return max(sizes, default=0)
