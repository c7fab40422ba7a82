"""Multi-query associative recall (arXiv 2312.04927) by length and number of pairs.

Only a model that was trained on the task can know what it asks for.
"""

import functools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ccq_jax.data import make_recall_batch, make_tokenizer, recall_options
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.recall import read_answers
from ccq_jax.evaluation.tables import Table

EXAMPLES = 256
"""Sequences for each length and number of pairs, without a limit."""


def find(request: Request) -> Material:
    """The lengths with the numbers of pairs that they have room for."""
    settings = request.config.eval.mqar
    tokenizer = make_tokenizer(request.config.data.tokenizer)
    options = recall_options(request.config, "mqar")
    grid = {}
    problem = ""
    for length in sorted(settings.lengths):
        for pairs in sorted(settings.pairs):
            chosen = options | {"num_pairs": pairs}
            try:
                make_recall_batch(
                    "mqar", tokenizer=tokenizer, batch=1, length=length, seed=0, **chosen
                )
            except ValueError as error:
                problem = str(error)
                continue
            grid[f"{length}/{pairs}"] = length, chosen
    return Material(grid, [] if grid else [f"no length has room for any of eval.mqar: {problem}"])


def run(context: Context, material: Material) -> dict[str, Any]:
    """By length and number of pairs: values that the model recalls, in %."""
    results: dict[str, Any] = {}
    for name, (length, options) in material.tasks.items():
        found = context.once(name, functools.partial(_measure, context, length, options))
        results.setdefault(str(length), {})[str(options["num_pairs"])] = found["accuracy"]
    return results


def _measure(context: Context, length: int, options: dict[str, Any]) -> Measured:
    count = min(EXAMPLES, context.limit or EXAMPLES)
    size = min(context.rows(length), -(-count // context.subject.devices) * context.subject.devices)
    batches = (
        make_recall_batch(
            "mqar",
            tokenizer=context.tokenizer,
            batch=size,
            length=length,
            seed=context.config.seed,
            start=start,
            **options,
        )
        for start in range(0, count, size)
    )
    with context.subject.on_devices():
        found = read_answers(context.model, context.track(batches, total=-(-count // size)))
    values = (100 * found.right / found.asked)[:count].tolist()
    return Measured({"accuracy": float(np.mean(values))}, {"": {"values": values}})


def draw(results: dict[str, Any]) -> Figure:
    """A map of lengths and numbers of pairs."""
    pairs = sorted({int(n) for row in results.values() for n in row})
    values = np.array(
        [[row.get(str(n), np.nan) for row in results.values()] for n in pairs], dtype=float
    )
    figure = Figure(figsize=(1.6 + 1.1 * len(results), 1.4 + 0.7 * len(pairs)))
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto", origin="lower")
    axes.grid(False)
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value > 50 else "white"
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(results)), [f"{int(n):,}" for n in results])
    axes.set_yticks(range(len(pairs)), [str(n) for n in pairs])
    axes.set(title="Multi-query associative recall", xlabel="tokens", ylabel="pairs")
    figure.colorbar(image, ax=axes, format=PercentFormatter(), label="recalled")
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each number of pairs, a column for each length."""
    pairs = sorted({int(n) for row in results.values() for n in row})
    rows = [[f"{n} pairs", *(row.get(str(n)) for row in results.values())] for n in pairs]
    return Table("Multi-query associative recall, %", ("pairs", *results), rows)
