"""Generation: batches equal single runs, pieces the whole, and saved states uninterrupted ones."""

import functools
import pickle

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ccq_jax import program
from ccq_jax.continuation import Continuation
from ccq_jax.data import make_tokenizer
from ccq_jax.generator import Generator
from ccq_jax.sampling import Sampling

GREEDY = Sampling(temperature=0)
VARIANTS = ("gdn_decay", "gla_ccq", "attention")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]


class Numbers:
    """A tokenizer of the small models' ids: each is a character; the last ends a document."""

    vocab_size, eos_id = models.VOCAB, models.VOCAB - 1

    def encode(self, text):
        return [ord(c) - 32 for c in text]

    def stream(self):
        return self

    def push(self, token):
        return chr(32 + token)

    def flush(self):
        return ""


@functools.cache
def generator(variant):
    return Generator(models.cached(variant), Numbers())


def continued(variant, prompts, count, **options):
    """Tokens without end: an end of document does not end them here."""
    out = generator(variant)
    tokens = out._tokens(out.read(prompts, room=count), options.pop("sampling", GREEDY), 0, count)
    return np.stack(list(tokens), axis=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_is_the_likeliest_token_of_the_whole_pass(variant):
    model = models.cached(variant)
    text = list(PROMPTS[0])
    for _ in range(6):
        padded = jnp.asarray([text + [0] * (16 - len(text))])
        logits = model.logits(models.features(model, padded).hidden)[0, len(text) - 1]
        text.append(int(jnp.argmax(logits)))
    assert continued(variant, PROMPTS[:1], 6)[0].tolist() == text[5:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_of_different_lengths_in_a_batch_continue_as_alone(variant):
    together = continued(variant, PROMPTS, 5)
    alone = [continued(variant, [prompt], 5)[0] for prompt in PROMPTS]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_read_in_pieces_is_the_prompt_read_at_once(variant, monkeypatch):
    model = models.make(variant)
    prompt = models.tokens(1, 43, seed=7).tolist()
    whole = model(jnp.asarray(prompt))[:, -1]
    monkeypatch.setattr(program, "PIECES", (16, 4))
    pieces = Generator(model, Numbers()).read(prompt).logits
    assert models.error(pieces, whole) < 1e-5


@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), min_size=2, max_size=2), prefix=st.integers(1, 20))
def test_a_state_kept_in_a_file_continues_as_if_nothing_had_happened(
    tmp_path_factory, cuts, prefix
):
    out = generator("gdn_decay")
    text = models.tokens(1, 64, seed=3)[0].tolist()
    path = tmp_path_factory.mktemp("state") / "prefix.safetensors"
    out.save(out.read([text[:prefix]]), path)
    prompts = [text[prefix : prefix + n] for n in cuts]  # of two lengths, none perhaps
    state = out.read(prompts, state=out.load(path))
    assert state.tokens.tolist() == [prefix + n for n in cuts]
    for row, n in enumerate(cuts):
        expected = out.read([text[: prefix + n]])
        assert models.error(state.logits[row], expected.logits[0]) < 1e-5


def test_a_state_of_attention_continues_rows_of_one_length():
    out = generator("attention")
    state = out.read([[1, 2, 3], [7]], room=8)
    expected = out.read([[1, 2, 3, 4, 5], [7, 6, 5]], room=8)
    assert models.error(out.read([[4, 5], [6, 5]], state=state).logits, expected.logits) < 1e-5
    with pytest.raises(ValueError, match="the prompts have different lengths"):
        out.read([[4, 5], [6]], state=state)


def test_a_state_is_not_used_up():
    out = generator("gdn_decay")
    state = out.read([[1, 2, 3]])
    texts = [
        out.generate(["!A", "!"], state=state, max_tokens=6, sampling=GREEDY).texts for _ in "ab"
    ]
    assert texts[0] == texts[1]
    alone = out.generate([[1, 2, 3, 1, 33]], max_tokens=6, sampling=GREEDY).texts
    assert texts[0][0] == alone[0]


def test_a_states_file_has_one_size_however_much_was_read(tmp_path):
    out = generator("gdn_decay")
    sizes = set()
    for length in (1, 100):
        out.save(out.read([[5] * length]), tmp_path / "state")
        sizes.add((tmp_path / "state").stat().st_size)
    assert len(sizes) == 1


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    out, path = generator("gdn_decay"), tmp_path / "state"
    state = out.read([[1, 2]])
    out.save(state, path)
    other = Generator(models.make("gdn_decay", initializer_range=0.3), Numbers())
    with pytest.raises(ValueError, match="state of another model, or of another checkpoint"):
        other.load(path)
    with pytest.raises(ValueError, match="prompts is empty"):
        out.read([], state=state)
    with pytest.raises(ValueError, match="the state has 2 rows and there are 3 prompts"):
        out.read([[1]] * 3, state=out.read([[1], [2]]))
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], pickle.dumps({"cache": 1})):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged or no safetensors file"):
            out.load(path)
    path.write_bytes(whole)
    arrays = load_file(path)
    metadata = {"format": "ccq_jax state 1", "model": out.identity}
    save_file(arrays | {"logits": arrays["logits"][:, :-1]}, path, metadata=metadata)
    with pytest.raises(ValueError, match="does not fit the model in logits"):
        out.load(path)
    save_file(arrays, path)
    with pytest.raises(ValueError, match="is no state"):
        out.load(path)
    with pytest.raises(FileNotFoundError, match="there is no state"):
        out.load(tmp_path / "nothing")


def test_a_linear_mixers_cache_does_not_grow_with_the_text():
    model = models.cached("gdn_decay")

    def size(tokens):
        return sum(x.size for x in jax.tree.leaves(model.init_cache(1, tokens)))

    assert size(10) == size(10**6)


def test_batches_of_one_size_give_what_single_prompts_give():
    out = generator("gla_ccq")
    prompts = ["A", "BCD", "E" * 20, "FG", "H" * 7]
    found = out.generate(prompts, max_tokens=8, sampling=GREEDY, batch_size=2)
    alone = [out.generate([p], max_tokens=8, sampling=GREEDY) for p in prompts]
    assert found.texts == [one.texts[0] for one in alone]
    assert found.prompt_tokens == sum(map(len, prompts))
    assert found.output_tokens == sum(one.output_tokens for one in alone)
    assert "tokens/s" in str(found)


def test_a_stream_says_what_generate_returns():
    out = generator("gla_ccq")
    options = {"max_tokens": 30, "sampling": Sampling(), "seed": 1}
    pieces = list(out.stream(["A", "BC"], **options))
    found = out.generate(["A", "BC"], **options)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == found.texts


def test_the_seed_decides_the_text():
    out = generator("gla_ccq")
    one, again, other = (
        out.generate([[1, 2]], max_tokens=20, seed=seed).tokens for seed in (1, 1, 2)
    )
    assert one == again != other


def test_ids_that_the_tokenizer_lacks_are_not_drawn():
    class Few(Numbers):
        vocab_size, eos_id = 5, 99

    found = Generator(models.cached("gla_ccq"), Few()).generate([[1, 2]], max_tokens=40)
    assert set(found.tokens[0]) == set(range(5))


def grown(text: str, stop=()):
    """What a continuation makes of a text's bytes: the pieces, its text, its number of tokens."""
    row = Continuation(make_tokenizer("bytes"), stop)
    pieces = [row.push(b) for b in text.encode()]
    pieces.append(row.end())
    assert "".join(pieces) == row.text
    return row


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab\né", max_size=12), st.lists(st.text("ab\né", min_size=1, max_size=3), max_size=3)
)
def test_a_text_ends_before_the_first_stop_string(text, stop):
    ends = [i for i in map(text.find, stop) if i >= 0]
    found = grown(text, stop).text
    first = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    if first is None:
        assert found == text
    else:  # the string that is whole first; of several, the one that begins first
        whole = [s for s in stop if s in text[:first]]
        assert found == text[: min(map(text[:first].find, whole))] and min(ends) <= len(found)


def test_an_end_of_document_ends_the_text():
    row = Continuation(make_tokenizer("bytes"))
    assert [row.push(x) for x in (65, 0xC3, 256, 66)] == ["A", "", "�", ""]
    assert row.done and row.tokens == [65, 0xC3, 256]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: out.read([]), "prompts is empty"),
        (lambda out: out.read([[1, 64]]), "the id 64: the model has ids from 0 to 63"),
        (lambda out: out.generate(["A"], max_tokens=0), "max_tokens is 0"),
        (lambda out: out.generate(["A"], max_tokens=1, stop=[""]), "stop has an empty string"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(generator("gla_ccq"))


def test_an_empty_prompt_begins_a_document():
    out = generator("gla_ccq")
    assert models.error(out.read([""]).logits, out.read([[Numbers.eos_id]]).logits) == 0


def test_generation_does_not_change_the_model():
    model = models.make("gla")
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    Generator(model, Numbers()).generate([[1]], max_tokens=3)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
