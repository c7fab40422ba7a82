"""Evaluates a checkpoint of a run part by part: results as JSON, a table, plots.

Written to WORKDIR/eval: language.json, length.json and recall.json, each with the step, the
configuration and the versions that gave its figures; length.png and recall.png.
"""

import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ccq_jax import checkpoint, plots
from ccq_jax.config import validate
from ccq_jax.data import (
    long_documents,
    make_recall_batch,
    make_tokenizer,
    recall_options,
    validate_data,
)
from ccq_jax.evaluation import pictures
from ccq_jax.evaluation.length import perplexity_by_position
from ccq_jax.evaluation.recall import recall_accuracy
from ccq_jax.model import LanguageModel
from ccq_jax.validation import make_loss_sums, unigram_loss, validation_batches, validation_loss
from ccq_jax.workdir import write_atomically

TASKS = ("mqar", "niah")


def language(config: ConfigDict, model: LanguageModel) -> dict:
    """Loss, perplexity and bits per byte of the validation data, and a unigram model's loss.

    The data are `eval.batches` batches, those of the validation losses in training.
    """
    graph, params = nnx.split(model)
    tokenizer = make_tokenizer(config.data.tokenizer)
    sums = make_loss_sums(graph, tokenizer.bytes_per_token, config.train.loss_chunk)
    batches = validation_batches(config)
    found = validation_loss(sums, nnx.to_pure_dict(params), _track(batches, "language"))
    return {
        "targets": int(sum(batch["loss_mask"].sum() for batch in batches)),
        "loss": found["loss"],
        "perplexity": float(np.exp(found["loss"])),
        "bits_per_byte": found["bits_per_byte"],
        "unigram_loss": unigram_loss(batches),
    }


def length(config: ConfigDict, model: LanguageModel) -> dict:
    """Perplexity by position of held-out documents, at each of `eval.contexts`."""
    contexts = {}
    bucket = max(1, min(config.eval.contexts) // 2)
    for context in _track(sorted(config.eval.contexts), "length"):
        documents = long_documents(config, context + 1, limit=config.eval.documents)
        if documents:
            # As many tokens at a time as in training, so that memory is as it was.
            size = max(1, config.train.batch_size * config.train.seq_len // context)
            batches = (np.stack(documents[i : i + size]) for i in range(0, len(documents), size))
            contexts[str(context)] = perplexity_by_position(model, batches, bucket)
    return {"trained": config.train.seq_len, "contexts": contexts}


def recall(config: ConfigDict, model: LanguageModel) -> dict:
    """Accuracy on each recall task at each of `eval.recall_lengths`."""
    tokenizer = make_tokenizer(config.data.tokenizer)
    tasks: dict[str, dict[str, dict]] = {task: {} for task in TASKS}
    grid = list(itertools.product(TASKS, sorted(config.eval.recall_lengths)))
    for task, tokens in _track(grid, "recall"):
        count, size = config.eval.recall_examples, config.train.batch_size
        batches = (
            make_recall_batch(
                task,
                tokenizer=tokenizer,
                batch=min(size, count - start),
                length=tokens,
                seed=config.seed,
                start=start,
                **recall_options(config, task),
            )
            for start in range(0, count, size)
        )
        tasks[task][str(tokens)] = recall_accuracy(model, batches)
    return {"trained": config.train.seq_len, "tasks": tasks}


PARTS: dict[str, Callable[[ConfigDict, LanguageModel], dict]] = {
    "language": language,
    "length": length,
    "recall": recall,
}


def evaluate(
    config: ConfigDict,
    workdir: str | Path,
    *,
    step: int | str = "latest",
    parts: Sequence[str] = tuple(PARTS),
) -> dict[str, dict]:
    """Evaluates a checkpoint; returns the results of each part, as its JSON file holds them.

    Args:
      config: its `eval`, `model.implementation`, `model.chunk_size` and `model.ccq.fixed_lambda`
        are used. The rest of the model must be the run's; data and training are the run's.
      workdir: the run's directory.
      step: "latest", "best" or the step of a checkpoint.
      parts: names in `PARTS`.

    Raises:
      ValueError: an unknown part, a config that cannot be or is another model's, no checkpoint.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"parts has {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    validate(config)
    validate_data(config)
    workdir = Path(workdir).expanduser()
    run = checkpoint.load_model(workdir, step=step, model=config.model)
    config = ConfigDict({**run.config.to_dict(), "eval": config.eval.to_dict()})
    folder = workdir / "eval"
    folder.mkdir(exist_ok=True)
    results = {}
    for part in parts:
        began = time.monotonic()
        figures = PARTS[part](config, run.model)
        results[part] = {
            "step": run.step,
            "results": figures,
            "seconds": round(time.monotonic() - began, 1),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind,
            "versions": checkpoint.versions(),
            "config": config.to_dict(),
        }
        write_atomically(folder / f"{part}.json", json.dumps(results[part], indent=2) + "\n")
        if draw := getattr(pictures, part, None):
            plots.save(draw, figures, folder / f"{part}.png")
    _print(results)
    return results


def _track(items: Sequence, part: str) -> Iterable:
    console = Console(stderr=True)
    return track(items, part, console=console, transient=True, disable=not console.is_terminal)


def _print(results: dict[str, dict]) -> None:
    step = next(iter(results.values()))["step"]
    table = Table("part", "what", "figure", title=f"Evaluation of step {step}")
    for part, found in results.items():
        for what, figure in _rows(part, found["results"]):
            table.add_row(part, what, figure)
        table.add_section()
    Console(width=None if Console().is_terminal else 120).print(table)


def _rows(part: str, results: dict) -> Iterator[tuple[str, str]]:
    if part == "language":
        yield "loss, nats/token", f"{results['loss']:.4f}"
        yield "loss of a unigram model, nats/token", f"{results['unigram_loss']:.4f}"
        yield "perplexity", f"{results['perplexity']:.3f}"
        yield "bits per byte", f"{results['bits_per_byte']:.4f}"
    elif part == "length":
        for context, row in results["contexts"].items():
            what = f"perplexity by position to {context} ({row['documents']} documents)"
            yield what, "  ".join(f"{x:.2f}" for x in row["perplexity"])
    else:
        for task, rows in results["tasks"].items():
            for tokens, row in rows.items():
                what = f"{task}, {tokens} tokens ({row['examples']} examples)"
                shares = row["token_accuracy"], row["example_accuracy"]
                yield what, "{:.1%} of answer tokens, {:.1%} whole".format(*shares)
