"""The CCQ module, against the formulas computed token by token in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import FrozenConfigDict
from models import SMALL, cached, error, features, make, tokens

from ccq_jax.cache import locate
from ccq_jax.ccq import CCQ, TRACE_FLOOR, diagnose, largest_eigenvalue
from ccq_jax.config import default, resolve_model
from kernels import CCQMoments

B, T, H, K = 2, 12, 2, 8
PAPER = {"decay": False, "centered": True, "key_norm": False, "trace_norm": False}
OPTIONS = {
    "paper": PAPER,
    "decay": PAPER | {"decay": True},
    "uncentered": PAPER | {"centered": False},
    "key_norm": PAPER | {"key_norm": True},
    "trace_norm": PAPER | {"trace_norm": True},
    "uncentered_trace_norm": PAPER | {"centered": False, "trace_norm": True},
    "decay_key_norm_trace_norm": dict.fromkeys(PAPER, True),
}


def module(**options) -> CCQ:
    config = default().model
    config.update(SMALL)
    config.ccq.update({"enabled": True} | options)
    ccq = CCQ(FrozenConfigDict(resolve_model(config)), rngs=nnx.Rngs(0))
    if ccq.lambda_proj is not None:
        ccq.lambda_proj.bias = nnx.Param(jnp.asarray([0.5, -1.0]))
    return ccq


def inputs():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, B, T, H, K))
    return q, k + 1.0, -rng.uniform(0, 0.5, (B, T, H))


def sigmas(k, log_decay, options):
    """Sigma_t [B, T, H, K, K], as the formulas say."""
    if options["key_norm"]:
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    n, total, outer = np.zeros((B, H)), np.zeros((B, H, K)), np.zeros((B, H, K, K))
    out = []
    for t in range(k.shape[1]):
        keep = np.exp(log_decay[:, t]) if options["decay"] else np.ones((B, H))
        n = keep * n + 1
        total = keep[..., None] * total + k[:, t]
        outer = keep[..., None, None] * outer + np.einsum("bhi,bhj->bhij", k[:, t], k[:, t])
        mean = total / n[..., None]
        sigma = second = outer / n[..., None, None]
        if options["centered"]:
            sigma = second - np.einsum("bhi,bhj->bhij", mean, mean)
        if options["trace_norm"]:
            floor = TRACE_FLOOR * np.trace(second, axis1=-2, axis2=-1)
            sigma = sigma / (np.trace(sigma, axis1=-2, axis2=-1) + floor)[..., None, None]
        out.append(sigma)
    return np.stack(out, axis=1)


def expected(ccq, q, k, log_decay, options, lambda_max=1.0):
    w, b = (np.asarray(x[...], np.float64) for x in (ccq.lambda_proj.kernel, ccq.lambda_proj.bias))
    lam = lambda_max / (1 + np.exp(-(np.einsum("bthk,hk->bth", q, w) + b)))
    read = np.einsum("bthij,bthj->bthi", sigmas(k, log_decay, options), q)
    return q - lam[..., None] * read, lam


@functools.partial(jax.jit, static_argnums=(0, 7))
def _run(graph, params, q, k, log_decay, ids, state, diagnostics):
    segments = locate(ids, None, q.shape[1])
    return nnx.merge(graph, params)(q, k, log_decay, segments, state, diagnostics)


def run(ccq, q, k, log_decay, ids=None, state=None, diagnostics=False):
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, log_decay))
    return _run(*nnx.split(ccq), *arrays, ids, state, diagnostics)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_follows_the_formulas_in_one_call_in_two_and_in_segments(name):
    ccq, arrays = module(**OPTIONS[name]), inputs()
    wanted = expected(ccq, *arrays, OPTIONS[name])[0]
    whole, _, described = run(ccq, *arrays)
    assert described == {}
    assert error(whole, wanted) < 1e-5

    first, state, _ = run(ccq, *(x[:, :6] for x in arrays), state=ccq.init_cache(B))
    second, _, _ = run(ccq, *(x[:, 6:] for x in arrays), state=state)
    assert error(jnp.concatenate([first, second], axis=1), wanted) < 1e-5

    ids = jnp.asarray([[3] * 6 + [1] * 6] * B)
    packed = run(ccq, *arrays, ids=ids)[0]
    for part in (np.s_[:, :6], np.s_[:, 6:]):
        alone = expected(ccq, *(x[part] for x in arrays), OPTIONS[name])[0]
        assert error(packed[part], alone) < 1e-5


def test_lambda_max_scales_lambda():
    ccq = module(lambda_max=4.0)
    q, k, log_decay = inputs()
    assert error(run(ccq, q, k, log_decay)[0], expected(ccq, q, k, log_decay, PAPER, 4.0)[0]) < 1e-5


def test_a_fixed_lambda_replaces_the_gate_and_works_without_one():
    q, k, log_decay = inputs()
    read = np.einsum("bthij,bthj->bthi", sigmas(k, log_decay, PAPER), q)
    for enabled in (True, False):
        ccq = module(enabled=enabled, fixed_lambda=0.3)
        assert (ccq.lambda_proj is None) == (not enabled)
        assert error(run(ccq, q, k, log_decay)[0], q - 0.3 * read) < 1e-5


def test_a_fixed_lambda_conditions_a_plain_models_queries():
    plain, fixed = cached("gdn"), make("gdn_fixed_lambda")
    assert nnx.state(plain).keys() == nnx.state(fixed).keys()
    nnx.update(fixed, nnx.state(plain))  # the same parameters fit
    x = tokens(2, 16)
    assert error(features(fixed, x).hidden, features(plain, x).hidden) > 1e-3


@pytest.mark.parametrize("name", ["paper", "uncentered", "trace_norm"])
def test_diagnostics_are_what_they_say(name):
    options = OPTIONS[name]
    ccq = module(**options)
    q, k, log_decay = inputs()
    q, k = (x * np.linspace(0.2, 2, K) for x in (q, k))  # eigenvalues apart
    described = run(ccq, q, k, log_decay, diagnostics=True)[2]
    cleaned, lam = expected(ccq, q, k, log_decay, options)
    last = sigmas(k, log_decay, options)[:, -1]
    values = np.linalg.eigvalsh(last)
    moved = np.linalg.norm(cleaned - q, axis=-1) / np.linalg.norm(q, axis=-1)
    wanted = {
        "lambda_mean": lam.mean((0, 1)),
        "lambda_std": lam.std((0, 1)),
        "lambda_sigma_max": (lam.mean(1) * values[..., -1]).mean(0),
        "effective_rank": (values.sum(-1) ** 2 / (values**2).sum(-1)).mean(0),
        "query_moved": moved.mean((0, 1)),
    }
    assert described.keys() == wanted.keys()
    for name, value in wanted.items():
        assert described[name].shape == (H,)
        np.testing.assert_allclose(described[name], value, rtol=2e-2 if "max" in name else 1e-4)


def test_diagnostics_of_one_token_are_finite():
    zeros = jnp.zeros((1, 1, H, K))
    moments = CCQMoments(jnp.ones((1, H)), jnp.zeros((1, H, K)), jnp.zeros((1, H, K, K)))
    options = FrozenConfigDict({"centered": True, "trace_norm": True})
    for value in diagnose(zeros, zeros, jnp.ones((1, 1, H)), moments, options).values():
        assert jnp.isfinite(value).all()


def test_power_iteration_is_close_from_below():
    keys = np.random.default_rng(0).normal(size=(20, 64, 16))
    sigma = np.einsum("bti,btj->bij", keys, keys) / 64
    exact = np.linalg.eigvalsh(sigma)[:, -1]
    ratio = np.asarray(largest_eigenvalue(jnp.asarray(sigma, jnp.float32))) / exact
    assert ratio.max() < 1 + 1e-5 and ratio.min() > 0.9


def test_the_model_stacks_diagnostics_over_layers_and_they_carry_no_gradient():
    model, x = cached("gla_ccq"), tokens(2, 16)
    out = features(model, x, diagnostics=True).diagnostics
    assert {v.shape for v in out.values()} == {(2, 2)}
    assert features(model, x).diagnostics == {}
    assert features(cached("gla"), x, diagnostics=True).diagnostics == {}
    graph, params = nnx.split(model)

    def total(params):
        described = nnx.merge(graph, params).features(x, diagnostics=True).diagnostics
        return sum(v.sum() for v in described.values())

    assert all((g == 0).all() for g in jax.tree.leaves(jax.jit(jax.grad(total))(params)))


def test_trace_norm_is_finite_where_keys_are_equal_or_zero():
    for scale in (0.0, 1.0, 100.0):
        ccq = module(trace_norm=True)
        q = np.random.default_rng(0).normal(size=(B, T, H, K))
        k = scale * np.ones((B, T, H, K))

        def read(q, k, ccq=ccq):
            return run(ccq, q, k, jnp.zeros((B, T, H)))[0]

        assert error(read(q, k), q) < 1e-4  # no covariance, nothing to contract
        q, k = jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)
        gradients = jax.grad(lambda q, k: read(q, k).sum(), argnums=(0, 1))(q, k)
        assert all(jnp.isfinite(g).all() for g in gradients)
