import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

from ccq_jax import generate
from ccq_jax.generate import Sampling

GREEDY = Sampling(temperature=0)
VARIANTS = ("gdn_decay", "gla_ccq", "attention")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]


def continued(model, prompts, count, **options):
    tokens = generate.generate(model, prompts, max_tokens=count, **options)
    return np.stack(list(tokens), axis=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_the_likeliest_token_of_the_whole_pass(variant):
    model = models.cached(variant)
    text = list(PROMPTS[0])
    for _ in range(6):
        padded = jnp.asarray([text + [0] * (16 - len(text))])
        logits = model.logits(models.features(model, padded).hidden)[0, len(text) - 1]
        text.append(int(jnp.argmax(logits)))
    assert continued(model, PROMPTS[:1], 6, sampling=GREEDY)[0].tolist() == text[5:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_of_different_lengths_in_a_batch_continue_as_alone(variant):
    model = models.cached(variant)
    together = continued(model, PROMPTS, 5, sampling=GREEDY)
    alone = [continued(model, [prompt], 5, sampling=GREEDY)[0] for prompt in PROMPTS]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_read_in_pieces_is_the_prompt_read_at_once(variant, monkeypatch):
    model = models.cached(variant)
    prompt = models.tokens(1, 43, seed=7).tolist()
    whole, _ = generate.prefill(model, prompt, 1)
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 16)
    pieces, _ = generate.prefill(model, prompt, 1)
    assert models.error(pieces, whole) < 1e-5


def test_a_linear_mixers_cache_does_not_grow_with_the_text():
    model = models.cached("gdn_decay")

    def size(tokens):
        return sum(x.size for x in jax.tree.leaves(model.init_cache(1, tokens)))

    assert size(10) == size(10**6)


def test_the_seed_decides_the_text():
    model = models.cached("gla_ccq")
    one, again, other = (continued(model, [[1, 2]], 20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_ids_that_the_tokenizer_lacks_are_not_drawn():
    tokens = continued(models.cached("gla_ccq"), [[1, 2]], 40, vocab_size=5)
    assert set(np.unique(tokens)) == set(range(5))


LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]))


def drawn(sampling: Sampling, count: int = 4000) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.vmap(lambda key: sampling(LOGITS, key))(keys))


@pytest.mark.parametrize(
    ("sampling", "first", "second"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]),
        (Sampling(temperature=0.5), np.array([1, 16, 4, 9]) / 30, np.array([49, 1, 1, 1]) / 52),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7], None),
        (Sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], None),
        (Sampling(top_p=0.6), None, [1, 0, 0, 0]),
        (Sampling(temperature=0), [0, 1, 0, 0], [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_distribution_asked_for(sampling, first, second):
    tokens = drawn(sampling)
    for row, expected in ((0, first), (1, second)):
        if expected is not None:
            shares = np.bincount(tokens[:, row], minlength=4) / len(tokens)
            np.testing.assert_allclose(shares, expected, atol=0.03)
            assert (shares[np.equal(expected, 0)] == 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0)],
)
def test_sampling_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Sampling(**{field: value})


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate.prefill(models.cached("gla"), [[1], []], 1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        next(generate.generate(models.cached("gla"), [[1]], max_tokens=0))


def test_generation_does_not_change_the_model():
    model = models.make("gla")
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    continued(model, [[1]], 3)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
