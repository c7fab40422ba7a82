"""The language model: causality, segments, decoding, sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL, VARIANTS, VOCAB, cached, error, features, make, tokens

from ccq_jax.cache import locate
from ccq_jax.config import SIZES, default
from ccq_jax.model import LanguageModel

every_variant = pytest.mark.parametrize("variant", VARIANTS)
TOLERANCE = 2e-5  # float32, after the final norm
LENGTH = 16  # one length for most tests: each shape is compiled once


def count(model) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def abstract(config) -> LanguageModel:
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


PARAMETERS = {
    ("gated_deltanet", "500M"): 512_272_124,
    ("gated_deltanet", "1.3B"): 1_387_348_732,
    ("gla", "340M"): 374_475_776,
    ("gla", "500M"): 509_278_336,
    ("gla", "1.3B"): 1_365_514_240,
    ("attention", "500M"): 508_614_400,
    ("attention", "1.3B"): 1_364_297_728,
}


@pytest.mark.parametrize(("mixer", "size"), PARAMETERS)
def test_parameter_count(mixer, size):
    config = default(mixer, size).model
    config.vocab_size = 32000
    assert count(abstract(config)) == PARAMETERS[mixer, size]
    if mixer != "attention":
        config.ccq.enabled = True
        added = config.num_layers * config.num_heads * (config.head_dim + 1)
        assert count(abstract(config)) == PARAMETERS[mixer, size] + added


@pytest.mark.parametrize("mixer", SIZES)
def test_tiny_has_about_a_million_parameters(mixer):
    config = default(mixer).model
    config.vocab_size = 320
    assert 1.0e6 < count(abstract(config)) < 1.3e6


def test_initialisation():
    config = default().model
    config.vocab_size = 320
    config.num_heads = 64
    config.ccq.update(enabled=True, bias_init=-2.0)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    mixer = model.layers.mixer
    for kernel in (model.embed.embedding, mixer.q_proj.kernel, mixer.q_conv.kernel):
        assert np.std(kernel[...]) == pytest.approx(0.02, rel=0.05)
    assert np.std(mixer.ccq.lambda_proj.kernel[...]) == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(mixer.ccq.lambda_proj.bias[...], -2.0)
    a, dt = np.exp(mixer.A_log[...]), jax.nn.softplus(mixer.dt_bias[...])
    assert a.min() >= 0 and a.max() <= 16 and a.mean() == pytest.approx(8, rel=0.2)
    assert dt.min() >= 0.99e-3 and dt.max() <= 0.101
    assert np.log(dt).mean() == pytest.approx(np.log(1e-2), abs=0.3)
    layers = mixer.q_proj.kernel[...]
    assert np.corrcoef(layers[0].ravel(), layers[1].ravel())[0, 1] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("variant", ["gdn_grouped_values", "gla_key_norm", "attention"])
def test_a_token_depends_on_all_tokens_up_to_itself_and_no_later_one(variant):
    graph, params = nnx.split(cached(variant))
    at = 9

    @jax.jit
    def gradient(rows):  # of a random read of token `at`'s features, for each token's embedding
        def read(rows):
            model = nnx.merge(graph, params)
            model.embed.embedding = nnx.Param(rows)
            hidden = model.features(jnp.arange(LENGTH)[None]).hidden[0, at]
            return hidden @ jax.random.normal(jax.random.key(0), hidden.shape)

        return jax.grad(read)(rows)

    rows = cached(variant).embed.embedding[...][tokens(1, LENGTH)[0]]
    by_token = jnp.abs(gradient(rows)).max(axis=-1)
    assert (by_token[: at + 1] > 0).all()
    assert (by_token[at + 1 :] == 0).all()


@every_variant
def test_a_later_token_changes_nothing_before_it(variant):
    model, x = cached(variant), tokens(2, LENGTH)
    before = features(model, x).hidden
    after = features(model, x.at[:, 9:].set(tokens(2, LENGTH - 9, seed=9))).hidden
    assert (after[:, :9] == before[:, :9]).all()
    assert (after[:, 9:] != before[:, 9:]).any(axis=-1).all()


@every_variant
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_cut_anywhere_the_pieces_give_what_the_whole_gives(variant, data):
    model, length = cached(variant), LENGTH
    pieces = data.draw(st.permutations([5, 5, 1, 1, 1, 1, 1, 1]))  # two shapes to compile
    inputs, ids = tokens(2, length, seed=3), None
    if data.draw(st.booleans()):
        ends = data.draw(st.lists(st.integers(0, 5), min_size=2 * length, max_size=2 * length))
        ids = jnp.cumsum(jnp.asarray(ends).reshape(2, length) == 0, axis=1) % 2  # ids come back
    whole = features(model, inputs, ids).hidden
    cache, hidden, at = model.init_cache(2, length + 5), [], 0
    for piece in pieces:
        part = np.s_[:, at : at + piece]
        out = features(model, inputs[part], None if ids is None else ids[part], cache)
        cache, at = out.cache, at + piece
        hidden.append(out.hidden)
    assert error(jnp.concatenate(hidden, axis=1), whole) < TOLERANCE


@every_variant
def test_packed_documents_give_what_they_give_alone(variant):
    model, half = cached(variant), LENGTH // 2
    one, two = tokens(2, LENGTH, seed=1), tokens(2, LENGTH, seed=2)
    alone = [features(model, x).hidden[:, :half] for x in (one, two)]
    packed = jnp.concatenate([one[:, :half], two[:, :half]], axis=1)
    ids = jnp.asarray([[7] * half + [3] * half] * 2)
    assert error(features(model, packed, ids).hidden, jnp.concatenate(alone, 1)) < TOLERANCE
    assert error(features(model, packed).hidden[:, half:], alone[1]) > 100 * TOLERANCE


@every_variant
def test_left_padding_leaves_no_trace(variant):
    model, lengths = cached(variant), (11, 1)
    prompts, more = tokens(2, LENGTH, seed=4), tokens(2, 5, seed=5)
    ids = jnp.asarray([[0] * (LENGTH - n) + [1] * n for n in lengths])
    cache = features(model, prompts, ids, model.init_cache(2, LENGTH + 5)).cache
    padded = features(model, more, None, cache).hidden  # goes on with the last segment
    rows = zip(prompts, more, lengths, strict=True)
    rows = [jnp.concatenate([p[LENGTH - n :], m, p[: LENGTH - 5 - n]]) for p, m, n in rows]
    alone = features(model, jnp.stack(rows)).hidden
    for row, n in enumerate(lengths):
        assert error(padded[row], alone[row, n : n + 5]) < TOLERANCE


@pytest.mark.parametrize("variant", ["gdn_decay_trace_norm", "attention"])
def test_prefill_and_step_give_the_logits_of_the_whole_pass(variant):
    model, x = cached(variant), tokens(2, LENGTH, seed=5)
    graph, params = nnx.split(model)
    whole = jax.jit(lambda p: nnx.merge(graph, p)(x))(params)
    assert whole.shape == (2, LENGTH, VOCAB) and whole.dtype == jnp.float32
    prefill = jax.jit(lambda p, *inputs: nnx.merge(graph, p).prefill(*inputs))
    step = jax.jit(lambda p, *inputs: nnx.merge(graph, p).step(*inputs))
    logits, cache = prefill(params, x[:, :9], model.init_cache(2, LENGTH))
    assert error(logits, whole[:, 8]) < TOLERANCE
    for t in range(9, LENGTH):
        logits, cache = step(params, x[:, t], cache)
        assert error(logits, whole[:, t]) < TOLERANCE
    assert int(cache.length) == LENGTH


@pytest.mark.parametrize("variant", ["gdn_decay_trace_norm", "gla_ccq"])
def test_the_chunked_implementation_gives_what_the_recurrence_gives(variant):
    x, ids = tokens(2, 40), jnp.asarray([[0] * 15 + [1] * 25, [0] * 40])
    chunked = make(variant, implementation="xla", chunk_size=16)
    assert error(features(chunked, x, ids).hidden, features(cached(variant), x, ids).hidden) < 1e-4


def sizes(model, max_len):
    return [x.shape for x in jax.tree.leaves(model.init_cache(2, max_len))]


@every_variant
def test_only_attentions_cache_grows_with_the_context(variant):
    grows = sizes(cached(variant), 100) != sizes(cached(variant), 1000)
    assert grows == (variant == "attention")


def test_attention_beyond_its_cache_is_nan_or_refused_not_wrong():
    model = cached("attention")
    cache = features(model, tokens(2, 5), None, model.init_cache(2, 9)).cache
    assert jnp.isnan(features(model, tokens(2, 5), None, cache).hidden).all()
    with pytest.raises(ValueError, match=r"10 tokens do not fit a cache of max_len 9"):
        features(model, tokens(2, 10), None, model.init_cache(2, 9))


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputing_changes_no_gradient(remat):
    def gradient(model):
        graph, params = nnx.split(model)
        loss = lambda p: jnp.mean(nnx.merge(graph, p).features(tokens(2, 8)).hidden ** 3)
        return jax.tree.leaves(jax.jit(jax.grad(loss))(params)["layers"])

    kept, again = gradient(cached("gla_ccq")), gradient(make("gla_ccq", remat=remat))
    for x, y in zip(kept, again, strict=True):
        assert error(y, x) < 1e-5


@pytest.mark.parametrize("variant", ["gdn_grouped_values", "attention"])
def test_bfloat16_compute_keeps_float32_parameters_states_and_logits(variant):
    model = make(variant, dtype="bfloat16", initializer_range=0.05)
    out = features(model, tokens(2, 16), None, model.init_cache(2, 16), True)
    assert out.hidden.dtype == jnp.bfloat16
    assert model.logits(out.hidden).dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert {x.dtype for x in out.diagnostics.values()} <= {jnp.dtype("float32")}
    if variant != "attention":
        assert out.cache.layers.state.dtype == jnp.float32
    exact = features(make(variant, initializer_range=0.05), tokens(2, 16)).hidden
    assert error(out.hidden, exact) < 0.02


def test_a_tied_head_is_the_embedding():
    model = make("gla", tie_embeddings=True)
    assert count(model) == count(cached("gla")) - VOCAB * SMALL["hidden_size"]
    hidden = features(model, tokens(1, 3)).hidden
    np.testing.assert_allclose(
        model.logits(hidden), hidden @ model.embed.embedding[...].T, rtol=1e-5, atol=1e-5
    )


def test_bad_input_is_refused_by_name():
    model = cached("gla")
    with pytest.raises(ValueError, match=r"tokens is int32\[4\].*integers \[B, T\]"):
        model(jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match=r"tokens is float32\[1, 4\]"):
        model(jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"segment_ids is int32\[1, 5\].*\[1, 4\]"):
        model(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"model.vocab_size is 0"):
        LanguageModel(default().model, rngs=nnx.Rngs(0))
    assert jnp.isnan(model(jnp.full((1, 1), VOCAB, jnp.int32))).all()


def rotation(position, width, theta):
    """The block matrix that turns channel pairs (i, i + width / 2), in float64."""
    half = width // 2
    angle = position * theta ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def test_attention_is_softmax_over_the_segment_with_rotary_positions():
    model = cached("attention")
    block = jax.tree.map(lambda x: np.asarray(x[0], np.float64), nnx.to_pure_dict(nnx.state(model)))
    weights = {name: x["kernel"] for name, x in block["layers"]["mixer"].items()}
    graph, params = nnx.split(model.layers.mixer)
    mixer = nnx.merge(graph, jax.tree.map(lambda x: x[0], params))

    x = np.random.default_rng(0).normal(size=(1, 10, SMALL["hidden_size"]))
    ids = np.asarray([[1, 1, 1, 1, 2, 2, 2, 1, 1, 1]])
    out, _, _ = mixer(jnp.asarray(x, jnp.float32), locate(jnp.asarray(ids), None, 10))
    starts = np.asarray([0, 0, 0, 0, 4, 4, 4, 7, 7, 7])
    q, k, v = (
        (x[0] @ weights[name]).reshape(10, 2, 8).swapaxes(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    turn = np.stack([rotation(t - s, 8, 10000.0) for t, s in enumerate(starts)])
    q, k = (np.einsum("tij,htj->hti", turn, y) for y in (q, k))
    expected = np.zeros((10, 2, 8))
    for t, s in enumerate(starts):
        scores = np.einsum("hi,hsi->hs", q[:, t], k[:, s : t + 1]) / np.sqrt(8)
        p = np.exp(scores)
        expected[t] = np.einsum("hs,hsi->hi", p / p.sum(-1, keepdims=True), v[:, s : t + 1])
    assert error(out[0], expected.reshape(10, 16) @ weights["o_proj"]) < 1e-5
