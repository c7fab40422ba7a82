"""The loader: one number is its state, and processes, workers and resuming change no batch."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ccq_jax import config as config_module
from ccq_jax.data import (
    long_documents,
    make_loader,
    make_tokenizer,
    prepare,
    required_vocab_size,
    validate_data,
)

BYTES = make_tokenizer("bytes")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A pattern of text of which every line says which document and line it is."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        json.dumps({"text": "".join(f"{document}:{line};" for line in range(document % 40 + 1))})
        for document in range(300)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return f"text:{folder}/*.jsonl"


def make_config(source, *, batch_size=8, seq_len=64, seed=0, **data):
    config = config_module.default()
    config.seed = seed
    config.train.batch_size = batch_size
    config.train.seq_len = seq_len
    config.data.source = source
    for name, value in data.items():
        config.data[name] = value
    return config


def take(loader, count):
    return list(itertools.islice(loader, count))


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def rows_of(batches):
    return [row.tobytes() for batch in batches for row in batch["inputs"]]


SOURCES = ("CORPUS", "mqar", "niah", "0.5*CORPUS,0.3*mqar,0.2*niah")


@pytest.fixture(params=SOURCES)
def source(request, corpus):
    return request.param.replace("CORPUS", corpus)


def sized(source, **options):
    return make_config(source, seq_len=128, **options)


# Determinism


def test_the_seed_decides_the_batches(source):
    first = take(make_loader(sized(source)), 5)
    assert_same(first, take(make_loader(sized(source)), 5))
    other = take(make_loader(sized(source, seed=1)), 5)
    assert not set(rows_of(first)) & set(rows_of(other))


def test_batches_have_the_shapes_and_types_that_training_reads(source):
    (batch,) = take(make_loader(sized(source)), 1)
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        "inputs": ((8, 128), "int32"),
        "targets": ((8, 128), "int32"),
        "segment_ids": ((8, 128), "int32"),
        "loss_mask": ((8, 128), "bool"),
    }
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_every_epoch_holds_every_row_once_in_another_order(corpus):
    config = make_config(corpus, batch_size=1)
    rows = rows_of(take(make_loader(config), 2000))
    epoch = len(set(rows))
    assert 300 < epoch < 1000
    first, second = rows[:epoch], rows[epoch : 2 * epoch]
    assert len(set(first)) == epoch
    assert sorted(first) == sorted(second)
    assert first != second


def test_no_document_is_in_both_splits(corpus):
    def documents(split):
        loader = make_loader(make_config(corpus, batch_size=1), split=split)
        names = set()
        for batch in take(loader, loader.num_batches or 1200):
            row = batch["inputs"][0]
            text = BYTES.decode(np.where(row == BYTES.eos_id, ord(";"), row).tolist())
            names |= {part.split(":")[0] for part in text.split(";")[1:-1] if ":" in part}
        return names

    train, validation = documents("train"), documents("validation")
    assert len(train) > 200
    assert 5 <= len(validation) < 40
    assert not train & validation


# Resuming


@pytest.mark.parametrize("position", [1, 2, 7, 61])
def test_start_continues_where_a_run_stopped(source, position):
    whole = take(make_loader(sized(source)), position + 3)
    loader = make_loader(sized(source), start=position)
    assert loader.position == position
    assert_same(take(loader, 3), whole[position:])
    assert loader.position == position + 3


@given(position=st.integers(0, 10**9), count=st.sampled_from([1, 2, 4]))
@settings(max_examples=15, deadline=None)
def test_any_position_on_any_number_of_processes_is_the_same_global_batch(corpus, position, count):
    config = make_config(f"0.7*{corpus},0.3*mqar")
    (whole,) = take(make_loader(config, start=position), 1)
    parts = [
        take(make_loader(config, process_index=i, process_count=count, start=position), 1)[0]
        for i in range(count)
    ]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
    assert_same([joined], [whole])


def test_the_state_goes_through_json_forwards_and_back(source):
    loader = make_loader(sized(source))
    first = take(loader, 3)
    state = json.loads(json.dumps(loader.get_state()))
    then = take(loader, 3)
    other = make_loader(sized(source))
    other.set_state(state)
    assert_same(take(other, 3), then)
    loader.set_state({"position": 0})
    assert_same(take(loader, 3), first)


def test_closing_keeps_the_position(corpus):
    loader = make_loader(make_config(corpus))
    whole = take(make_loader(make_config(corpus)), 4)
    with loader:
        assert_same(take(loader, 2), whole[:2])
    assert_same(take(loader, 2), whole[2:])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_reading_ahead_changes_nothing(corpus, prefetch):
    config = make_config(f"0.7*{corpus},0.3*mqar", prefetch=prefetch)
    assert_same(take(make_loader(config), 6), take(make_loader(make_config(config.data.source)), 6))


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(corpus, workers):
    source = f"0.5*{corpus},0.3*mqar,0.2*niah"
    options = {"tokenizer": "mistral", "seq_len": 128}
    whole = take(make_loader(make_config(source, **options)), 6)
    loader = make_loader(make_config(source, workers=workers, **options), start=2)
    batches = take(loader, 4)
    loader.close()
    assert_same(batches, whole[2:6])


SCRIPT = """
import os, signal, sys
from ccq_jax import config
from ccq_jax.data import make_loader

if __name__ == "__main__":
    c = config.default()
    c.data.source, c.data.workers = sys.argv[1], 1
    loader = make_loader(c)
    batch = next(loader)
    if sys.argv[2] == "interrupted":
        signal.signal(signal.SIGINT, lambda *arguments: None)
        os.killpg(0, signal.SIGINT)
        for _ in range(10):
            batch = next(loader)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["ended", "interrupted", "killed"])
def test_workers_live_as_long_as_their_program(corpus, tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # `run` waits until the last process that could write to the pipe has ended, workers included.
    done = subprocess.run(
        [sys.executable, str(script), corpus, end],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,  # the interruption reaches the program and its workers alone
    )
    if end == "killed":
        assert done.returncode == -9
    else:
        assert (done.returncode, done.stderr) == (0, "")


# Mixtures


def test_rows_come_in_the_mixtures_proportions(corpus):
    config = make_config(f"0.7*{corpus},0.3*mqar", batch_size=50)
    batches = take(make_loader(config), 20)
    # Rows of mqar predict few targets, rows of text nearly all.
    generated = np.array([batch["loss_mask"].mean(axis=1) < 0.5 for batch in batches])
    assert abs(generated.mean() - 0.3) < 0.005
    assert (abs(generated.mean(axis=1) - 0.3) <= 0.04).all()


def test_recall_examples_never_repeat():
    rows = rows_of(take(make_loader(make_config("mqar", batch_size=100)), 20))
    assert len(set(rows)) == len(rows)


# Validation


@pytest.mark.parametrize("count", [1, 2, 4])
def test_validation_reads_each_row_once_in_order_on_any_number_of_processes(corpus, count):
    config = make_config(corpus)
    loaders = [
        make_loader(config, split="validation", process_index=i, process_count=count)
        for i in range(count)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(part) for part in batches} == {loaders[0].num_batches}
    one_by_one = list(make_loader(make_config(corpus, batch_size=1), split="validation"))
    joined = {
        name: np.concatenate([part[name] for step in zip(*batches, strict=True) for part in step])
        for name in one_by_one[0]
    }
    rows = len(one_by_one)
    for name, values in joined.items():
        np.testing.assert_array_equal(
            values[:rows], np.concatenate([batch[name] for batch in one_by_one])
        )
    assert rows <= len(joined["inputs"]) < rows + 8
    assert not joined["loss_mask"][rows:].any()


def test_validation_does_not_depend_on_the_seed_and_can_be_read_again(corpus):
    loader = make_loader(make_config(corpus), split="validation")
    first = list(loader)
    assert list(loader) == []
    loader.set_state({"position": 0})
    assert_same(list(loader), first)
    assert_same(list(make_loader(make_config(corpus, seed=5), split="validation")), first)


def test_the_bytes_of_validation_are_the_texts(tmp_path):
    texts = ["größer", "the grass is green " * 20, "€" * 50]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    config = make_config("stdlib", validation_source=f"text:{tmp_path}/*", tokenizer="mistral")
    tokenizer = make_tokenizer("mistral")
    counted = sum(
        int((tokenizer.bytes_per_token[batch["targets"]] * batch["loss_mask"]).sum())
        for batch in make_loader(config, split="validation")
    )
    # The first token of a document is given, with the space that the tokeniser puts before it.
    first = sum(int(tokenizer.bytes_per_token[tokenizer.encode(text)[0]]) for text in texts)
    assert counted == sum(len(text.encode()) + 1 for text in texts) - first


def test_validation_of_a_mixture_is_its_text(corpus):
    mixture = list(make_loader(make_config(f"0.5*{corpus},0.5*mqar"), split="validation"))
    assert_same(mixture, list(make_loader(make_config(corpus), split="validation")))


def test_validation_of_a_recall_task_alone_holds_other_examples_than_training():
    config = make_config("mqar", recall_examples=20)
    rows = rows_of(make_loader(config, split="validation"))
    assert len(rows) == 24
    assert len(set(rows)) == 21
    assert not set(rows) & set(rows_of(take(make_loader(config), 20)))


def test_long_documents_begin_held_out_documents_and_are_spread_evenly(tmp_path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(str(i) * (10 * i + 1))
    config = make_config("mqar", validation_source=f"text:{tmp_path}/*")
    texts = [BYTES.decode(ids.tolist()) for ids in long_documents(config, 40, limit=9)]
    assert texts == [str(i) * 40 for i in range(4, 10)]
    assert long_documents(config, 40, limit=3)[1].tolist() == [ord("6")] * 40
    assert long_documents(config, 92, limit=3) == []
    config.data.validation_source = ""
    assert long_documents(config, 1, limit=3) == []


# Shards and the default source


def test_shards_give_the_batches_of_one_process_to_two(corpus, tmp_path):
    prepare.main(
        [f"--source={corpus}", "--tokenizer=bytes", f"--out={tmp_path}/out", "--shard_tokens=9000"]
    )
    config = make_config(f"arrayrecord:{tmp_path}/out/*.arrayrecord")
    validate_data(config)
    whole = take(make_loader(config), 3)
    parts = [take(make_loader(config, process_index=i, process_count=2), 3) for i in range(2)]
    assert_same(
        [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*parts, strict=True)], whole
    )
    assert ":" in BYTES.decode(whole[0]["inputs"][0].tolist())
    assert len(list(make_loader(config, split="validation"))) >= 1


def test_a_shard_damaged_since_is_reported_by_its_document(corpus, tmp_path):
    prepare.main([f"--source={corpus}", "--tokenizer=bytes", f"--out={tmp_path}/out"])
    (lengths,) = tmp_path.glob("out/*.lengths.npy")
    np.save(lengths, np.load(lengths) + np.uint32(1))
    config = make_config(f"arrayrecord:{tmp_path}/out/*")
    with pytest.raises(ValueError, match=r"data\.source='arrayrecord:.* document \d+ holds \d+ by"):
        next(make_loader(config))


def test_the_default_source_is_python_text():
    config = config_module.default()
    validate_data(config)
    (batch,) = take(make_loader(config), 1)
    text = "".join(BYTES.decode(row.tolist()) for row in batch["inputs"])
    assert "def " in text or "import " in text
    assert required_vocab_size(config) == 257


# What is refused


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"source": "text:/nowhere/*.txt"}, r"data\.source='text:/nowhere/\*\.txt': no file"),
        ({"validation_source": "text:/no/*"}, r"data\.validation_source='text:/no/\*': no file"),
        ({"source": "arrayrecord:/nowhere/*"}, r"data\.source='arrayrecord:/nowhere/\*': no file"),
        ({"source": "0.5*stdlib,0.4*mqar"}, r"the weights sum to 0\.9"),
        ({"tokenizer": "/nowhere.model"}, r"data\.tokenizer='/nowhere\.model': no such file"),
        ({"source": "niah", "seq_len": 32}, r"data\.niah\.num_needles=1 needs seq_len at least"),
        ({"source": "mqar", "seq_len": 2}, r"data\.mqar\.num_pairs=1 needs seq_len at least 3"),
    ],
)
def test_data_that_cannot_be_is_refused_by_field_and_value(change, problem):
    with pytest.raises(ValueError, match=problem):
        validate_data(make_config(**({"source": "stdlib"} | change)))


def test_a_vocabulary_too_small_for_the_data_is_refused():
    config = make_config("mqar")
    config.data.mqar.vocab_size = 1024
    assert required_vocab_size(config) == 1024
    config.model.vocab_size = 512
    with pytest.raises(ValueError, match=r"model\.vocab_size=512 must be at least 1024"):
        validate_data(config)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"split": "test"}, "split='test' must be 'train' or 'validation'"),
        ({"process_index": 2, "process_count": 2}, "process_index=2 must be below"),
        ({"process_count": 3}, r"train\.batch_size=8 must be a multiple of the 3 processes"),
        ({"start": -1}, "position -1 must be"),
        ({"split": "validation", "start": 10**6}, "position 1000000 must be from 0 to"),
    ],
)
def test_a_loader_that_cannot_be_is_refused(corpus, options, problem):
    with pytest.raises(ValueError, match=problem):
        make_loader(make_config(corpus), **options)
