"""Small models for the tests of the model and its parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ccq_jax.config import default
from ccq_jax.model import LanguageModel

VOCAB = 64
# Weights are large enough for each mixer to matter beside the residual stream. `scan` compiles
# fastest; that other implementations equal it is for the operators' tests to say.
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "head_v_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "implementation": "scan",
}

# Every mixer, and every option of CCQ, once.
VARIANTS = {
    "gdn": ("gated_deltanet", {}, None),
    "gdn_grouped_values": ("gated_deltanet", {"num_v_heads": 4, "head_v_dim": 12}, {}),
    "gdn_no_conv_no_gate": ("gated_deltanet", {"conv_size": 0, "use_gate": False}, {}),
    "gdn_decay": ("gated_deltanet", {}, {"decay": True, "lambda_max": 4.0}),
    "gdn_decay_trace_norm": ("gated_deltanet", {}, {"decay": True, "trace_norm": True}),
    "gdn_fixed_lambda": ("gated_deltanet", {}, {"enabled": False, "fixed_lambda": 0.7}),
    "gla": ("gla", {}, None),
    "gla_ccq": ("gla", {}, {}),
    "gla_key_norm": ("gla", {"conv_size": 4}, {"key_norm": True}),
    "gla_uncentered": ("gla", {}, {"centered": False, "trace_norm": True}),
    "attention": ("attention", {}, None),
}


def make(variant: str, **fields) -> LanguageModel:
    """The model of a variant; `fields` of its configuration take precedence."""
    mixer, changes, ccq = VARIANTS[variant]
    config = default(mixer).model
    config.update(SMALL | changes | fields)
    if ccq is not None:
        config.ccq.update({"enabled": True} | ccq)
    return LanguageModel(config, rngs=nnx.Rngs(1))


@functools.cache
def cached(variant: str) -> LanguageModel:
    """As `make`, for tests that do not change the model."""
    return make(variant)


def tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    """Random tokens [batch, length]."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, length)), jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _features(graph, params, inputs, segment_ids, cache, diagnostics):
    return nnx.merge(graph, params).features(inputs, segment_ids, cache, diagnostics=diagnostics)


def features(model, inputs, segment_ids=None, cache=None, diagnostics=False):
    """`model.features`, compiled."""
    return _features(*nnx.split(model), inputs, segment_ids, cache, diagnostics)


def error(x, reference) -> float:
    """||x - reference|| / ||reference||."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))
