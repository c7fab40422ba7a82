"""Language modelling and zero-shot tasks of the paper, by EleutherAI's lm-evaluation-harness.

The mean is that of the published tables: the accuracy of LAMBADA, PIQA, WinoGrande, ARC-easy, SIQA and
BoolQ, and the length-normalised one of HellaSwag and ARC-challenge.
"""

import functools
import importlib.util
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ccq_jax.evaluation.benchmark_data import Dataset, Found
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.tables import Table
from ccq_jax.plots import BASELINE, TRAIN, VALIDATION

TASKS = {
    "wikitext": Dataset("EleutherAI/wikitext_document_level", "test", "wikitext-2-raw-v1"),
    "lambada_openai": Dataset("EleutherAI/lambada_openai", "test", "default"),
    "piqa": Dataset("baber/piqa", "validation"),
    "hellaswag": Dataset("Rowan/hellaswag", "validation"),
    "winogrande": Dataset("allenai/winogrande", "validation", "winogrande_xl"),
    "arc_easy": Dataset("allenai/ai2_arc", "test", "ARC-Easy"),
    "arc_challenge": Dataset("allenai/ai2_arc", "test", "ARC-Challenge"),
    "social_iqa": Dataset("lighteval/siqa", "validation"),
    "boolq": Dataset("aps/super_glue", "validation", "boolq"),
}
# What the published tables show of each task.
PUBLISHED = {
    "wikitext": "word_perplexity",
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "social_iqa": "acc",
    "boolq": "acc",
}
# Of one answer at random, in %.
CHANCE = {
    "lambada_openai": 0.0,
    "piqa": 50.0,
    "hellaswag": 25.0,
    "winogrande": 50.0,
    "arc_easy": 25.0,
    "arc_challenge": 25.0,
    "social_iqa": 100 / 3,
    "boolq": 50.0,
}
ACCURACIES = ("acc", "acc_norm")
OTHERS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


def find(request: Request) -> Material:
    """Where the datasets are, if lm-evaluation-harness is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        return Material({}, ["all of it needs lm-evaluation-harness: pip install 'ccq_jax[eval]'"])
    return request.find(TASKS)


def run(context: Context, material: Material) -> dict[str, Any]:
    """Accuracies in %, perplexities, and the mean of the published accuracies.

    A standard error of an accuracy is that over examples, in %.
    """
    results: dict[str, Any] = {}
    for task, found in material.tasks.items():
        results[task] = context.once(
            task, functools.partial(_measure, context, task, found), found.identity
        )
    shown = [results[t][m] for t, m in PUBLISHED.items() if m in ACCURACIES and t in results]
    if len(shown) == len(PUBLISHED) - 1:
        results["mean"] = float(np.mean(shown))
    return results


def _measure(context: Context, task: str, found: Found) -> Measured:
    import datasets
    from lm_eval.evaluator import evaluate

    from ccq_jax.evaluation.harness import HarnessModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        tasks = load_task(task, found, Path(folder))
        output = evaluate(
            HarnessModel(context=context),
            tasks,
            limit=context.limit or None,
            bootstrap_iters=0,
        )
    assert output is not None  # it is None in a process that is not the first
    figures: dict[str, Any] = {
        "version": str(output["versions"].get(task)),
        "examples": len(output["samples"][task]),
    }
    examples = {}
    for metric, value in _metrics(output["results"][task]):
        percent = 100 if metric in ACCURACIES else 1
        figures[metric] = percent * float(value)
        if metric in ACCURACIES:
            values = [100.0 * sample[metric] for sample in output["samples"][task]]
            figures[f"{metric}_stderr"] = float(np.std(values) / max(1, len(values) - 1) ** 0.5)
            examples[metric] = {"values": values}
    return Measured(figures, examples)


def _metrics(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics by their names without the filter's, as in "acc,none"."""
    for name, value in found.items():
        metric = name.partition(",")[0]
        if metric in (*ACCURACIES, *OTHERS):
            yield metric, value


def load_task(task: str, found: Found, folder: Path) -> Any:
    """The harness's task with its examples read from files, as its task manager returns it.

    Args:
      task: the harness's name.
      found: the files.
      folder: for a copy of the examples that goes with the evaluation.
    """
    manager = _task_manager()
    base = manager.task_index[task].yaml_path
    split = found.dataset.split
    endings = {".parquet": "parquet", ".arrow": "arrow"}
    kind = endings.get(found.files[0].suffix, "json")
    config = {
        "task": task,
        "include": str(base),
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: [str(file.absolute()) for file in found.files]},
            "cache_dir": str(folder / "cache"),
        },
        "training_split": None,
        "validation_split": split if split == "validation" else None,
        "test_split": split if split == "test" else None,
    }
    path = folder / f"{task}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return manager.load([str(path)])


@functools.cache
def _task_manager() -> Any:
    from lm_eval.tasks import TaskManager  # reads thousands of files

    return TaskManager()


def draw(results: dict[str, Any]) -> Figure:
    """A bar for each accuracy of the published tables, with its standard error and chance."""
    figure = Figure(figsize=(7.2, 3.8))
    axes = figure.subplots()
    names = [task for task in CHANCE if task in results]
    values = [results[task][PUBLISHED[task]] for task in names]
    errors = [results[task][f"{PUBLISHED[task]}_stderr"] for task in names]
    places = range(len(names))
    axes.bar(places, values, yerr=errors, color=TRAIN, ecolor=BASELINE, capsize=3)
    chance = [CHANCE[task] for task in names]
    axes.plot(places, chance, "_", color=VALIDATION, ms=26, mew=2, label="chance")
    labels = [f"{task}\n{PUBLISHED[task]}".replace("_", " ") for task in names]
    axes.set_xticks(places, labels, rotation=30, ha="right")
    axes.set(title="Zero-shot tasks", ylabel="accuracy (%)")
    axes.legend()
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each task, with what the published tables show of it in the last column."""
    columns = (
        "task", "examples", "acc %", "± ", "acc_norm %", "chance %", "perplexity", "published as",
    )  # fmt: skip
    rows: list[list[Any]] = []
    for task, metric in PUBLISHED.items():
        if task in results:
            found = results[task]
            perplexity = found.get("word_perplexity", found.get("perplexity"))
            shown = (found.get(name) for name in ("examples", "acc", "acc_stderr", "acc_norm"))
            rows.append([task, *shown, CHANCE.get(task), perplexity, metric])
    if "wikitext" in results:
        found = results["wikitext"]
        rows.append(
            ["wikitext, a byte", found["examples"], *[None] * 4, found["byte_perplexity"], None]
        )
    if "mean" in results:
        rows.append(["mean of the accuracies", None, results["mean"], *[None] * 5])
    return Table("Language modelling and zero-shot tasks", columns, rows)
