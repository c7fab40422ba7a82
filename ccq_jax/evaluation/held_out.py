"""What a run's own data say of its model: `language`, `length` and `recall`.

The validation data are those of training, so these parts need nothing else.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ccq_jax.checks import Section
from ccq_jax.data import long_documents, make_recall_batch, recall_options, validate_data
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.length import perplexity_by_position
from ccq_jax.evaluation.recall import accuracy, read_answers
from ccq_jax.evaluation.scoring import score
from ccq_jax.evaluation.tables import Table
from ccq_jax.validation import unigram_loss, validation_batches

TASKS = ("mqar", "niah")


def find(request: Request) -> Material:
    """Checks that the run's data are there; raises ValueError if not."""
    problems = Section("data", request.config.data).data()
    if problems:
        raise ValueError("\n  ".join(["the run's data cannot be read:", *problems]))
    validate_data(request.config)
    return Material({"": None})


def language(context: Context, material: Material) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of the validation data, and a unigram model's loss.

    The data are `eval.batches` batches, those of the validation losses in training.
    """
    return context.once("", lambda: _language(context))


def _language(context: Context) -> Measured:
    batches = validation_batches(context.config)
    sizes = context.tokenizer.bytes_per_token
    nats, targets, size = [], [], 0
    with context.subject.on_devices():
        for batch in context.track(batches):
            mask = batch["loss_mask"].astype(bool)
            scores = score(context.model, batch["inputs"], batch["targets"], batch["segment_ids"])
            nats.append(np.where(mask, scores.loss, 0).sum(axis=1, dtype=np.float64))
            targets.append(mask.sum(axis=1))
            known = np.minimum(batch["targets"], len(sizes) - 1)
            size += int((sizes[known] * mask).sum())
    nats_of, targets_of = np.concatenate(nats), np.concatenate(targets)
    used = targets_of > 0
    loss = float(nats_of.sum() / targets_of.sum())
    figures = {
        "targets": int(targets_of.sum()),
        "loss": loss,
        "perplexity": float(np.exp(loss)),
        "bits_per_byte": float(nats_of.sum() / np.log(2) / max(size, 1)),
        "unigram_loss": unigram_loss(batches),
    }
    values = (nats_of[used] / targets_of[used]).tolist()
    return Measured(figures, {"loss": {"values": values, "weights": targets_of[used].tolist()}})


def length(context: Context, material: Material) -> dict[str, Any]:
    """Perplexity by position of held-out documents, at each of `eval.contexts`."""
    return context.once("", lambda: Measured(_length(context)))


def _length(context: Context) -> dict[str, Any]:
    config = context.config
    contexts = {}
    bucket = max(1, min(config.eval.contexts) // 2)
    for tokens in context.track(sorted(config.eval.contexts)):
        documents = long_documents(config, tokens + 1, limit=config.eval.documents)
        if documents:
            # As many tokens at a time as in training, so that memory is as it was.
            size = max(1, config.train.batch_size * config.train.seq_len // tokens)
            batches = (np.stack(documents[i : i + size]) for i in range(0, len(documents), size))
            with context.subject.on_devices():
                found = perplexity_by_position(context.model, batches, bucket)
            contexts[str(tokens)] = found
    return {"trained": config.train.seq_len, "contexts": contexts}


def recall(context: Context, material: Material) -> dict[str, Any]:
    """Accuracy on each recall task at each of `eval.recall_lengths`."""
    tasks: dict[str, dict[str, dict]] = {}
    for task in TASKS:
        for tokens in sorted(context.settings.recall_lengths):
            tasks.setdefault(task, {})[str(tokens)] = context.once(
                f"tasks/{task}/{tokens}",
                functools.partial(_recall, context, task, tokens),
            )
    return {"trained": context.config.train.seq_len, "tasks": tasks}


def recall_batches(context: Context, task: str, tokens: int) -> Iterator[dict[str, np.ndarray]]:
    """`eval.recall_examples` examples of a recall task, of so many tokens."""
    config = context.config
    count, size = config.eval.recall_examples, config.train.batch_size
    for start in range(0, count, size):
        yield make_recall_batch(
            task,
            tokenizer=context.tokenizer,
            batch=min(size, count - start),
            length=tokens,
            seed=config.seed,
            start=start,
            **recall_options(config, task),
        )


def _recall(context: Context, task: str, tokens: int) -> Measured:
    batches = recall_batches(context, task, tokens)
    with context.subject.on_devices():
        found = read_answers(context.model, batches)
    examples = {
        "token_accuracy": {
            "values": (found.right / found.asked).tolist(),
            "weights": found.asked.tolist(),
        },
        "example_accuracy": {"values": (found.right == found.asked).astype(float).tolist()},
    }
    return Measured(accuracy(found), examples)


def language_table(results: dict[str, Any]) -> Table:
    """A row a figure."""
    rows = [
        ("loss, nats/token", results["loss"]),
        ("loss of a unigram model, nats/token", results["unigram_loss"]),
        ("perplexity", results["perplexity"]),
        ("bits per byte", results["bits_per_byte"]),
    ]
    return Table("Validation data", ("what", "figure"), rows)


def length_table(results: dict[str, Any]) -> Table:
    """A row a context length, perplexities by position in it."""
    rows = [
        (
            f"perplexity by position to {context}",
            row["documents"],
            "  ".join(f"{x:.2f}" for x in row["perplexity"]),
        )
        for context, row in results["contexts"].items()
    ]
    return Table("Held-out documents", ("what", "documents", "perplexity"), rows)


def recall_table(results: dict[str, Any]) -> Table:
    """A row a task and length."""
    return Table(
        "Recall tasks",
        ("task", "tokens", "examples", "answer tokens %", "whole examples %"),
        list(_recall_rows(results)),
    )


def _recall_rows(results: dict[str, Any]) -> Iterator[list[Any]]:
    for task, rows in results["tasks"].items():
        for tokens, row in rows.items():
            shares = (100 * row[name] for name in ("token_accuracy", "example_accuracy"))
            yield [task, int(tokens), row["examples"], *shares]
