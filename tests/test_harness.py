import json

import benchmark_files
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ccq_jax import interop
from ccq_jax.config import default
from ccq_jax.evaluation import evaluate, harness, likelihood, lm, scoring

VOCAB = 320
PAIRS = [
    ("The river ran under the old", " stone bridge."),
    ("A stone", " house"),
    ("x", " y" * 12),
    ("", "alone"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    interop.save_hf(models.make("gdn_decay", vocab_size=VOCAB), folder)
    return folder


@pytest.fixture(scope="module")
def model():
    return models.make("gdn_decay", vocab_size=VOCAB)


def make(checkpoint, **arguments):
    settings = {"hf": checkpoint, "context_length": 0, "rows": 1} | arguments
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    return get_model("ccq_jax").create_from_arg_string(text, {"batch_size": 1, "device": None})


def scanning():
    config = default()
    config.model.implementation = "scan"
    config.mesh.data = 1
    return config


@pytest.fixture(scope="module", autouse=True)
def fast_programs():
    # The recurrence compiles faster than the chunks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "default", scanning)
        yield


@pytest.fixture(scope="module")
def adapter(checkpoint, fast_programs):
    return make(checkpoint)


def requests(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def direct(model, context, continuation):
    """Log-probability and greediness by one pass over all tokens."""
    tokens = np.array([*context, *continuation])
    logits = logits_of(model, tokens)[:-1]
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[1:, None], 1)[:, 0]
    greedy = logits.argmax(-1) == tokens[1:]
    part = slice(len(context) - 1, None)
    return float(chosen[part].sum()), bool(greedy[part].all())


def logits_of(model, tokens):
    """Of all tokens; what fills them up to one shape comes after them."""
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(tokens)] = tokens
    hidden = models.features(model, jnp.asarray(padded)).hidden
    return np.asarray(model.logits(hidden))[0, : len(tokens)]


def encode(text):
    return list(text.encode())


def test_likelihoods_are_those_of_a_direct_pass(adapter, model):
    found = adapter.loglikelihood(requests("loglikelihood", PAIRS))
    for (context, continuation), (logprob, greedy) in zip(PAIRS, found, strict=True):
        expected = direct(model, encode(context) or [256], encode(continuation))
        assert logprob == pytest.approx(expected[0], rel=1e-5)
        assert greedy == expected[1]


def test_the_likeliest_continuation_is_greedy(adapter, model):
    context = encode("The river")
    logits = logits_of(model, context)[-1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    pairs = [(("", ""), context, [best]), (("", ""), context, [worst])]
    assert [greedy for _, greedy in adapter._loglikelihood_tokens(pairs)] == [True, False]


def test_whole_texts_are_scored_from_their_first_token(adapter, model):
    text = benchmark_files.text(0, 5)
    (found,) = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    assert found == pytest.approx(direct(model, [256], encode(text))[0], rel=1e-5)


def test_a_context_length_cuts_texts_into_the_harnesss_windows(checkpoint, model):
    adapter = make(checkpoint, context_length=16)
    tokens = encode(benchmark_files.text(1, 5))
    text = bytes(tokens).decode()
    (found,) = adapter.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    windows = map(make_disjoint_window, get_rolling_token_windows(tokens, 256, 16, 1))
    expected = sum(direct(model, context, part)[0] for context, part in windows)
    assert found == pytest.approx(expected, rel=1e-5)
    (pair,) = adapter.loglikelihood(requests("loglikelihood", [("a long context here", " end")]))
    kept = encode("a long context here end")[-17:]
    assert pair[0] == pytest.approx(direct(model, kept[:-4], kept[-4:])[0], rel=1e-5)


def test_bos_stands_before_every_context(checkpoint, model):
    adapter = make(checkpoint, bos="eos")
    (found,) = adapter.loglikelihood(requests("loglikelihood", [("A stone", " house")]))
    assert found[0] == pytest.approx(direct(model, [256, *b"A stone"], b" house")[0], rel=1e-5)
    assert adapter.tok_encode("a") == [256, 97]
    assert adapter.tok_encode("a", add_special_tokens=False) == [97]


def test_texts_go_on_greedily_up_to_a_stop(adapter, model):
    arguments = {"until": ["\n\n"], "max_gen_toks": 6}
    made = adapter.generate_until(
        requests("generate_until", [("The river", arguments), ("A", arguments)])
    )
    tokens, ids = encode("The river"), []
    for _ in range(6):
        ids.append(int(logits_of(model, tokens)[-1, :257].argmax()))
        tokens.append(ids[-1])
        if ids[-1] == 256:
            break
    expected = bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
    assert made[0] == expected
    assert len(made) == 2
    first = made[0][2] if len(made[0]) > 2 else ""
    if first:
        stopped = adapter.generate_until(
            requests("generate_until", [("The river", {"until": first, "max_gen_toks": 6})])
        )
        assert stopped == [made[0][: made[0].index(first)]]


def test_lengths_share_few_shapes(monkeypatch):
    shapes = set()

    def watched(model, inputs, targets):
        shapes.add(inputs.shape)
        return scoring.Scores(np.zeros(inputs.shape), np.ones(inputs.shape, bool))

    monkeypatch.setattr(likelihood, "score", watched)
    pairs = [([1] * n, [2]) for n in range(1, 130)] + [([1] * 1500, [2])]
    found = likelihood.likelihoods(None, pairs, lambda tokens: max(1, 256 // tokens))
    assert len(found) == len(pairs)
    assert shapes == {(16, 16), (8, 32), (4, 64), (2, 128), (1, 256), (1, 2048)}


def test_arguments_that_cannot_be_are_refused(checkpoint):
    with pytest.raises(ValueError, match="workdir=RUN or hf=FOLDER"):
        get_model("ccq_jax")()
    with pytest.raises(ValueError, match=r"eval\.bos is 'begin'"):
        make(checkpoint, bos="begin")
    with pytest.raises(ValueError, match="no such id"):
        make(checkpoint, bos="bos")
    with pytest.raises(ValueError, match="context is empty"):
        likelihood.likelihoods(None, [([], [1])], lambda _: 1)


@pytest.fixture(scope="module")
def results(checkpoint, tmp_path_factory):
    data = benchmark_files.write_all(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("results")
    config = scanning()
    config.eval.context_length = 0
    found = evaluate(
        config,
        folder,
        checkpoint=f"hf:{checkpoint}",
        suite=["lm"],
        data_dir=data,
        hub=False,
        limit=2,
    )
    return found["lm"], data, folder


def test_every_task_of_the_tables_is_measured(results):
    found, _, folder = results
    figures = found["results"]
    assert list(figures) == [*lm.TASKS, "mean"]
    for task, metric in lm.PUBLISHED.items():
        assert figures[task]["examples"] == 2
        assert np.isfinite(figures[task][metric])
    shown = [figures[t][m] for t, m in lm.PUBLISHED.items() if t != "wikitext"]
    assert figures["mean"] == pytest.approx(np.mean(shown))
    assert 0 <= figures["hellaswag"]["acc_norm"] <= 100
    assert found["versions"]["lm_eval"]
    assert found["settings"]["eval.context_length"] == 0
    assert (folder / "eval" / "lm.png").read_bytes().startswith(b"\x89PNG")
    assert "mean of the accuracies" in (folder / "eval" / "tables.md").read_text()


def test_accuracies_are_the_means_of_examples(results):
    found, _, _ = results
    for task, metric in lm.PUBLISHED.items():
        if task != "wikitext":
            values = found["examples"][f"{task}/{metric}"]["values"]
            assert found["results"][task][metric] == pytest.approx(np.mean(values))


def test_wikitexts_perplexities_are_of_words_and_bytes_of_the_page(results, model):
    found, data, _ = results
    path = data / lm.TASKS["wikitext"].name / lm.TASKS["wikitext"].config / "test.jsonl"
    page = json.loads(path.read_text().splitlines()[0])["page"]
    figures = found["results"]["wikitext"]
    words = len(page.split()) + 2  # the harness's split counts the ends
    ratio = np.log(figures["word_perplexity"]) / np.log(figures["byte_perplexity"])
    assert ratio == pytest.approx(len(page.encode()) / words)


def test_lambadas_perplexity_is_that_of_its_last_words(results, model):
    found, data, _ = results
    path = data / lm.TASKS["lambada_openai"].name / "default" / "test.jsonl"
    text = json.loads(path.read_text().splitlines()[0])["text"]
    context, _, word = text.rpartition(" ")
    logprob, _ = direct(model, encode(context), encode(f" {word}"))
    assert found["results"]["lambada_openai"]["perplexity"] == pytest.approx(
        np.exp(-logprob), rel=1e-4
    )


def test_the_harness_knows_the_model_by_name():
    assert get_model("ccq_jax") is harness.HarnessModel
