import csv
import json
import re
from types import SimpleNamespace

import benchmark_files
import models
import numpy as np
import pytest
from ml_collections import ConfigDict

from ccq_jax import interop
from ccq_jax.config import default
from ccq_jax.data import make_tokenizer
from ccq_jax.evaluation import evaluate, extrapolation, likelihood, longbench, parts, scoring
from ccq_jax.evaluation import evaluate as evaluation
from ccq_jax.evaluation import subject as subjects
from ccq_jax.evaluation.benchmark_data import DataFolder, Dataset, MissingDataError
from ccq_jax.evaluation.context import Context, Request, prefix

LOCAL = ("s_niah", "extrapolation", "longbench", "retrieval", "mqar")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return benchmark_files.write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    interop.save_hf(models.make("gdn_decay", vocab_size=320), folder)
    return f"hf:{folder}"


def small(**settings) -> ConfigDict:
    config = default()
    config.model.implementation = "scan"
    config.mesh.data = 1
    config.eval.update({"batch_size": 2, "longbench_length": 144, "retrieval_length": 128})
    config.eval.s_niah.lengths = (512,)
    config.eval.extrapolation.update({"lengths": (64, 256, 512), "bucket": 128, "texts": 2})
    config.eval.mqar.update({"lengths": (32, 64), "pairs": (2, 16)})
    config.eval.update(settings)
    return config


def run(checkpoint, folder, data, names, config=None, **options):
    return evaluate(
        config or small(),
        folder,
        checkpoint=checkpoint,
        suite=names,
        data_dir=data,
        hub=False,
        **({"limit": 2} | options),
    )


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    short = {name: task._replace(tokens=16) for name, task in longbench.TASKS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(longbench, "TASKS", short)
        yield


@pytest.fixture(scope="module")
def local(checkpoint, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return run(checkpoint, folder, data, LOCAL), folder


def test_every_part_leaves_figures_tables_and_pictures(local):
    found, folder = local
    assert list(found) == list(LOCAL)
    for name in LOCAL:
        saved = json.loads((folder / "eval" / f"{name}.json").read_text())
        assert saved == json.loads(json.dumps(found[name]))
        assert saved["missing"] == []
        assert saved["settings"]["limit"] == 2
        assert saved["versions"]["jax"]
        assert saved["config"]["eval"]["bos"] == "none"
        with (folder / "eval" / f"{name}.csv").open() as file:
            rows = list(csv.reader(file))
        assert len(rows) > 1
        assert (folder / "eval" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    tables = (folder / "eval" / "tables.md").read_text()
    assert tables.count("\n## ") + tables.startswith("## ") == len(LOCAL)


def test_figures_are_the_means_of_their_examples(local):
    found, _ = local
    for part, figure in (
        ("s_niah", "2/512"),
        ("longbench", "qmsum"),
        ("retrieval", "nq"),
        ("mqar", "64/2"),
    ):
        value = found[part]["results"]
        for name in figure.split("/"):
            value = value[name]
        values = found[part]["examples"][figure]["values"]
        assert len(values) == 2
        assert value == pytest.approx(np.mean(values))
    results = found["longbench"]["results"]
    scores = [results[task] for task in benchmark_files.LONGBENCH]
    assert results["mean"] == pytest.approx(np.mean(scores))
    assert {"prompt_tokens_per_second", "output_tokens_per_second"} <= found["s_niah"]["timing"][
        "1/512"
    ].keys()


def test_what_was_measured_is_not_measured_again(local, checkpoint, data, monkeypatch):
    found, folder = local

    def fail(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(extrapolation, "score", fail)
    config = small()
    config.eval.longbench_length = 100  # is none of this part's settings
    again = run(checkpoint, folder, data, ["extrapolation"], config)
    assert again["extrapolation"]["results"] == found["extrapolation"]["results"]
    assert again["extrapolation"]["examples"] == found["extrapolation"]["examples"]
    with pytest.raises(AssertionError, match="measured again"):
        run(checkpoint, folder, data, ["extrapolation"], again=True)


def test_an_interrupted_part_goes_on_where_it_stopped(checkpoint, data, tmp_path, monkeypatch):
    measured = []
    score = extrapolation.score

    def interrupted(*inputs):
        measured.append(1)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return score(*inputs)

    monkeypatch.setattr(extrapolation, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, tmp_path, data, ["extrapolation"])
    found = run(checkpoint, tmp_path, data, ["extrapolation"])["extrapolation"]["results"]
    assert list(found["corpora"]) == list(extrapolation.CORPORA)
    assert len(measured) == 3 + 4  # six corpora, of which two were known


def test_another_setting_is_measured_anew(checkpoint, data, tmp_path):
    config = small()
    plain = run(checkpoint, tmp_path, data, ["extrapolation"], config)
    config.eval.bos = "eos"
    fronted = run(checkpoint, tmp_path, data, ["extrapolation"], config)
    losses = [
        found["extrapolation"]["results"]["corpora"]["pg19"]["by_position"]["loss"]
        for found in (plain, fronted)
    ]
    assert losses[0] != losses[1]
    assert fronted["extrapolation"]["settings"]["eval.bos"] == "eos"


def test_curves_of_other_runs_share_the_picture(local, checkpoint, data, tmp_path, monkeypatch):
    _, folder = local
    drawn = []
    picture = extrapolation.draw
    part = parts.PARTS["extrapolation"]
    draw = parts.all_runs(lambda runs: drawn.append(list(runs)) or picture(runs))
    monkeypatch.setitem(parts.PARTS, "extrapolation", part.__class__(
        part.about, part.find, part.run, part.table, draw, part.settings
    ))  # fmt: skip
    other = folder / "eval" / "extrapolation.json"
    result = json.loads(other.read_text()) | {"checkpoint": "the other"}
    (tmp_path / "other" / "eval").mkdir(parents=True)
    (tmp_path / "other" / "eval" / "extrapolation.json").write_text(json.dumps(result))
    run(checkpoint, folder, data, ["extrapolation"], beside=[str(tmp_path / "other")])
    assert drawn == [[checkpoint, "the other"]]


def test_a_mesh_reads_and_writes_as_one_device_does(checkpoint):
    prompts = [list(b"The river"), list(b"A"), list(b"stone house"), list(b"x" * 40), [7]]
    texts, losses = [], []
    for shape in ((1, 1), (2, 2)):
        config = small(batch_size=1)
        config.mesh.data, config.mesh.fsdp = shape
        config = subjects.describe(checkpoint, config)
        context = Context(subjects.load(checkpoint, config), title="test")
        assert context.subject.devices == shape[0] * shape[1]
        texts.append(context.generate(prompts, 8))
        with context.subject.on_devices():
            inputs = np.resize(np.arange(256, dtype=np.int32), (4, 64))
            losses.append(scoring.score(context.model, inputs, inputs).loss)
    assert texts[0] == texts[1]
    assert models.error(losses[1], losses[0]) < 1e-5


def test_missing_data_are_named_before_a_model_is_loaded(checkpoint, tmp_path, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(subjects, "load", lambda *_, **__: loaded.append(1))
    with pytest.raises(ValueError) as error:
        run(checkpoint, tmp_path, tmp_path, ["longbench", "retrieval"])
    message = str(error.value)
    assert not loaded
    assert (
        f"hotpotqa: THUDM/LongBench (config hotpotqa, split test): put a copy into {tmp_path}"
        in (message)
    )
    assert "hazyresearch/based-fda" in message


def test_parts_with_data_are_measured_without_those_that_lack_them(checkpoint, tmp_path, capsys):
    found = run(checkpoint, tmp_path, None, ["s_niah", "retrieval"])
    assert list(found) == ["s_niah"]
    assert list(found["s_niah"]["results"]) == ["depths", "1"]
    printed = capsys.readouterr().err
    assert "s_niah, 2 and 3 need essays; essays: baber/paul_graham_essays" in printed
    assert "of --data_dir=DATA_DIR" in printed
    assert "2 and 3 need essays" in (tmp_path / "eval" / "tables.md").read_text()


def test_what_cannot_be_evaluated_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="suite has 'lamda'"):
        run(checkpoint, tmp_path, None, ["lamda"])
    with pytest.raises(ValueError, match="nowhere"):
        run("hf:nowhere", tmp_path, None, ["s_niah"])
    with pytest.raises(ValueError, match="data_dir is absent"):
        run(checkpoint, tmp_path, "absent", ["s_niah"])
    config = small()
    config.data.tokenizer = "mistral"
    with pytest.raises(ValueError, match=r"320 token ids.*32000"):
        run(checkpoint, tmp_path, None, ["s_niah"], config)
    with pytest.raises(ValueError, match="'bytes' has no such id"):
        run(checkpoint, tmp_path, None, ["s_niah"], small(bos="bos"))
    config = small()
    config.eval.s_niah.lengths = (4096, 100)
    with pytest.raises(ValueError, match="100 tokens has no room"):
        run(checkpoint, tmp_path, None, ["s_niah"], config)
    config.eval.mqar.pairs = (1000,)
    with pytest.raises(ValueError, match=r"no length has room for any of eval\.mqar"):
        run(checkpoint, tmp_path, None, ["mqar"], config)
    with pytest.raises(ValueError, match="no such id"):
        prefix(make_tokenizer("bytes"), "bos")
    assert prefix(make_tokenizer("mistral"), "bos") == [1]


def test_a_config_of_a_size_may_leave_its_data_unsaid(checkpoint, data, tmp_path):
    config = default(size="1.3B")
    config.mesh.data = 1
    config.data.tokenizer = "bytes"
    config.eval.update(small().eval)
    config.eval.mqar.update({"lengths": (32,), "pairs": (2,)})
    assert run(checkpoint, tmp_path, data, ["mqar"], config)["mqar"]["results"].keys() == {"32"}
    with pytest.raises(ValueError, match=r"data\.source is 'arrayrecord:'"):
        run(checkpoint, tmp_path, data, ["language"], config)


def test_suites_name_parts():
    assert all(name in parts.PARTS for suite in parts.SUITES.values() for name in suite)
    assert parts.choose(["paper", "lm"]) == list(parts.SUITES["paper"])
    assert parts.choose(["all"]) == list(parts.PARTS)
    assert callable(evaluation)


@pytest.mark.parametrize(
    ("dataset", "path", "owned"),
    [
        (Dataset("a/b", "test"), "test.jsonl", True),
        (Dataset("a/b", "test"), "data/test-00000-of-00001.parquet", True),
        (Dataset("a/b", "test"), "test/data-00000-of-00001.arrow", True),
        (Dataset("a/b", "test"), "test/dataset_info.json", False),
        (Dataset("a/b", "test"), "data/train-00000-of-00001.parquet", False),
        (Dataset("a/b", "test"), "data/latest.jsonl", False),
        (Dataset("a/b", "test"), "b.py", False),
        (Dataset("a/b", "test"), "test.pkl", False),
        (Dataset("a/b", "test"), ".cache/test.jsonl", False),
        (Dataset("a/b", "test", "one"), "one/test-0.jsonl.gz", True),
        (Dataset("a/b", "test", "one"), "two/test-0.jsonl.gz", False),
        (Dataset("a/b", "test", "one"), "data/one.jsonl", True),
        (Dataset("a/b", "test", "one"), "test.jsonl", True),
    ],
)
def test_only_a_splits_data_files_are_read(dataset, path, owned):
    assert dataset.owns(path) is owned


def test_damaged_data_leave_a_task_out_before_a_model_is_loaded(tmp_path):
    benchmark_files.write_retrieval(tmp_path)
    (tmp_path / "hazyresearch/based-fda/validation.jsonl").write_text('{"text":')
    request = Request(small(), DataFolder(tmp_path, hub=False))
    found = parts.PARTS["retrieval"].find(request)
    assert list(found.tasks) == ["swde", "squad", "triviaqa", "nq", "drop"]
    assert "fda: hazyresearch/based-fda" in found.missing[0]


def test_a_corpus_that_is_too_short_leaves_the_others(checkpoint, tmp_path):
    data = benchmark_files.write_all(tmp_path / "data")
    benchmark_files.write(data, "tau/scrolls/qmsum/test.jsonl", [{"input": "short"}])
    found = run(checkpoint, tmp_path, data, ["extrapolation"])["extrapolation"]["results"]
    assert "qmsum" not in found["corpora"]
    assert len(found["corpora"]) == 5
    assert "its longest text has 6 tokens" in found["left_out"]["qmsum"]


def test_damaged_data_are_named(tmp_path):
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    folder = DataFolder(tmp_path, hub=False)
    for text, problem in (("{", "Expecting"), ("3\n", "must be an object"), ("\n", "no example")):
        (place / "test.jsonl").write_text(text)
        with pytest.raises(ValueError, match=problem):
            folder.find(Dataset("a/b", "test")).rows()
    with pytest.raises(MissingDataError, match=r"a/c: put a copy into"):
        folder.find(Dataset("a/c"))


@pytest.mark.parametrize("length", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 14])
def test_windows_predict_each_token_once_from_as_much_as_fits(count, length):
    tokens = list(range(1, count + 1))
    cut = list(likelihood.windows(tokens, [0], length))
    assert [t for _, predicted in cut for t in predicted] == tokens
    for i, (context, predicted) in enumerate(cut):
        assert context
        together = [*context, *predicted]
        assert together == list(range(together[0], together[-1] + 1))
        full = length if i else min(length, count)
        assert len(together) - 1 == full
    whole = list(likelihood.windows(tokens, [0], 0))
    assert whole == ([([0], tokens)] if tokens else [])


def test_texts_of_a_corpus_are_joined_or_long_enough(tmp_path):
    rows = [{"text": "a" * n} for n in (5, 30, 12)]
    benchmark_files.write(tmp_path, "a/b/test.jsonl", rows)
    found = DataFolder(tmp_path, hub=False).find(Dataset("a/b", "test"))
    tokenizer = make_tokenizer("bytes")

    def texts(lengths, joined):
        return extrapolation.long_texts(found, tokenizer, lengths, 2, joined=joined, front=[9])

    joined = texts([19], True)
    assert joined.shape == (2, 20)
    assert joined[0].tolist() == [9, *[97] * 5, 256, *[97] * 13]
    assert joined[1].tolist() == [9, *[97] * 17, 256, 97]
    assert texts([10], False).tolist() == [[9] + [97] * 10] * 2
    assert texts([10, 40, 400], True).shape == (1, 41)
    with pytest.raises(ValueError, match="has 30 tokens"):
        texts([100], False)


def test_perplexities_are_of_mean_losses():
    losses = np.log(np.array([[2.0, 2, 4, 4], [2, 2, 1, 1]]))
    figures, examples = extrapolation.summarise(losses, [2, 4, 8], 2)
    assert figures["lengths"]["2"]["perplexity"] == pytest.approx(2)
    assert list(figures["lengths"]) == ["2", "4"]
    assert figures["by_position"]["ends"] == [2, 4]
    np.testing.assert_allclose(figures["by_position"]["perplexity"], [2, 2])
    np.testing.assert_allclose(examples["lengths/4/loss"]["values"], np.log([8**0.5, 2**0.5]))


def test_request_says_what_is_where(data):
    request = Request(small(), DataFolder(data, hub=False))
    found = request.find({"here": Dataset("baber/piqa", "validation"), "away": Dataset("a/b")})
    assert list(found.tasks) == ["here"]
    assert found.missing[0].startswith("away: a/b")


class Hub:
    """The hub's client, with files by revision; asks are noted."""

    def __init__(self, folder, revisions, error=None):
        self.folder, self.revisions, self.error = folder, revisions, error
        self.asked = []

    def dataset_info(self, name, revision, timeout):
        self.asked.append((name, revision))
        if self.error:
            raise self.error
        names = self.revisions.get(revision, ())
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path) for path in names])

    def download(self, name, path, *, repo_type, revision):
        assert repo_type == "dataset"
        return str(self.folder / path)


def on_hub(monkeypatch, hub):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)


def test_the_hubs_converted_files_serve_where_a_dataset_is_a_script(tmp_path, monkeypatch):
    benchmark_files.write(tmp_path, "one/test/0000.jsonl", [{"a": 1}])
    hub = Hub(
        tmp_path,
        {"main": ["b.py", "README.md"], "refs/convert/parquet": ["one/test/0000.jsonl"]},
    )
    on_hub(monkeypatch, hub)
    found = DataFolder(None).find(Dataset("a/b", "test", "one"))
    assert found.rows() == [{"a": 1}]
    assert [revision for _, revision in hub.asked] == ["main", "refs/convert/parquet"]


def test_a_hub_out_of_reach_is_asked_once(monkeypatch, tmp_path):
    hub = Hub(tmp_path, {}, OSError("no route"))
    on_hub(monkeypatch, hub)
    folder = DataFolder(None)
    for name in ("a/b", "a/c"):
        with pytest.raises(MissingDataError, match="OSError: no route"):
            folder.find(Dataset(name))
    assert hub.asked == [("a/b", "main")]


def test_a_dataset_that_the_hub_lacks_says_so(monkeypatch, tmp_path):
    on_hub(monkeypatch, Hub(tmp_path, {"main": ["README.md"]}))
    with pytest.raises(MissingDataError, match="the hub has no data file of it"):
        DataFolder(None).find(Dataset("a/b"))


def test_a_model_that_knows_the_answers_has_all_of_them_right(
    checkpoint, data, tmp_path, monkeypatch
):
    tokenizer = make_tokenizer("bytes")

    def oracle(context, prompts, max_tokens, *, stop=(), sampling=None):
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        values = [re.search(r"special magic \w+ for \S+ is: (\S+)\.", text) for text in texts]
        return [f" it is {value[1]}, surely" if value else "a green river" for value in values]

    monkeypatch.setattr(Context, "generate", oracle)
    found = run(checkpoint, tmp_path, data, ["s_niah", "retrieval", "longbench"])
    needles = found["s_niah"]["results"]
    assert [needles[task]["512"] for task in ("1", "2", "3")] == [100.0] * 3
    assert set(needles["depths"]["3"]["512"]) == {100.0, None}
    assert found["retrieval"]["results"]["mean"] == 100.0
    scores = found["longbench"]["results"]
    assert scores["trec"] == 100.0
    assert scores["hotpotqa"] == pytest.approx(100 * 2 / 3)  # river, of the two words that count
