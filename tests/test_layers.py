"""Norms and the short convolution, against their formulas in float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import FrozenConfigDict
from models import error

from ccq_jax.cache import locate
from ccq_jax.layers import RMSNorm, ShortConv, l2_norm

CONFIG = {"dtype": "float32", "norm_eps": 1e-6, "conv_size": 4, "initializer_range": 0.5}


def config(**changes) -> FrozenConfigDict:
    return FrozenConfigDict(CONFIG | changes)


def silu(x):
    return x / (1 + np.exp(-x))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("size", [1.0, 1e-3])  # the second: eps weighs as much as x
def test_l2_norm_has_its_eps_under_the_root(size):
    x = size * normal(5, 8)
    expected = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    assert error(l2_norm(jnp.asarray(x, jnp.float32)), expected) < 1e-6


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_rms_norm_and_its_gate(size):
    norm = RMSNorm(config(), 8)
    norm.scale = nnx.Param(jnp.arange(8.0))
    x, gate = size * normal(5, 8), normal(5, 8) + 1
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.arange(8)
    x, cast = jnp.asarray(x, jnp.float32), jnp.asarray(gate, jnp.float32)
    assert error(norm(x), expected) < 1e-6
    assert error(norm(x, cast), expected * silu(gate)) < 1e-6


def test_norms_compute_in_float32_whatever_the_dtype():
    x = jnp.asarray(300 * normal(2, 4096), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    expected = exact / np.sqrt((exact * exact).mean(-1, keepdims=True))
    out = RMSNorm(config(dtype="bfloat16"), 4096)(x)
    assert out.dtype == jnp.bfloat16
    assert error(out, expected) < 3e-3  # one rounding


@pytest.mark.parametrize("width", [1, 2, 4])
def test_short_conv_sees_its_own_segment_only(width):
    conv = ShortConv(config(conv_size=width), 3, rngs=nnx.Rngs(0))
    kernel = np.asarray(conv.kernel[...], np.float64)
    x, ids = normal(1, 9, 3), np.asarray([[5, 5, 5, 5, 5, 2, 2, 5, 5]])
    start = np.asarray([0, 0, 0, 0, 0, 5, 5, 7, 7])
    expected = np.zeros((9, 3))
    for t in range(9):
        for back in range(width):
            if t - back >= start[t]:
                expected[t] += kernel[width - 1 - back] * x[0, t - back]
    segments = locate(jnp.asarray(ids), None, 9)
    out, tail = conv(jnp.asarray(x, jnp.float32), segments, None)
    assert error(out[0], silu(expected)) < 1e-6
    np.testing.assert_array_equal(tail[0], np.float32(x[0, 9 - (width - 1) :]))
