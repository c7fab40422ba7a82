"""Plots of an evaluation's results."""

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ccq_jax.plots import BASELINE, TRAIN, VALIDATION

TASKS = {"mqar": TRAIN, "niah": VALIDATION}


def length(results: dict) -> Figure:
    """Perplexity by position, a curve a context length, with the trained length marked."""
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.subplots()
    colours = [TRAIN, VALIDATION, "#2e8b57", "#e08e0b", "#7b4fa3", BASELINE]
    for (context, row), colour in zip(results["contexts"].items(), colours, strict=False):
        label = f"context {context}: {row['documents']} documents"
        axes.plot(row["positions"], row["perplexity"], "o-", color=colour, ms=4, label=label)
    axes.axvline(results["trained"], color=BASELINE, linestyle="--", linewidth=1.2)
    axes.text(
        results["trained"],
        0.02,
        " trained length",
        transform=axes.get_xaxis_transform(),
        fontsize=8,
        color=BASELINE,
    )
    axes.set(title="Perplexity by position", xlabel="position (tokens)", ylabel="perplexity")
    axes.set_xlim(0, None)
    axes.legend()
    return figure


def recall(results: dict) -> Figure:
    """Accuracy by length, a curve a task."""
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.subplots()
    for task, colour in TASKS.items():
        rows = results["tasks"][task]
        lengths = [int(x) for x in rows]
        for name, style in (("token_accuracy", "o-"), ("example_accuracy", "s:")):
            values = [row[name] for row in rows.values()]
            label = f"{task}, {name.replace('_accuracy', 's')}"
            axes.plot(lengths, values, style, color=colour, ms=4, label=label)
    axes.axvline(results["trained"], color=BASELINE, linestyle="--", linewidth=1.2)
    axes.set(title="Recall by length", xlabel="length (tokens)", ylabel="right answers")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend()
    return figure
