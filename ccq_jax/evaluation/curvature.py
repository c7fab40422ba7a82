"""Whether CCQ does what it claims in a model: `geometry`, and `sweep` over fixed lambdas.

Both use recall tasks at the length that the run was trained at: those among its data, or else all that
there is room for. `sweep` uses its validation data too.
"""

import functools
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ccq_jax.data import make_tokenizer, recall_options
from ccq_jax.data.recall import make_task
from ccq_jax.data.sources import parse_source
from ccq_jax.evaluation import held_out
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.geometry import measure
from ccq_jax.evaluation.statistics import Examples
from ccq_jax.evaluation.sweep import LAMBDAS, read_with
from ccq_jax.evaluation.tables import Table
from ccq_jax.plots import BASELINE, LAYERS, TRAIN, VALIDATION
from ccq_jax.validation import validation_batches


def find_any(request: Request) -> Material:
    """The recall tasks that the run was trained on, or else all; of them, those that fit its length."""
    held_out.find(request)
    config = request.config
    tokenizer = make_tokenizer(config.data.tokenizer)
    trained = {source.kind for source in parse_source(config.data.source)}
    tasks: dict[str, None] = {}
    missing = []
    for task in [x for x in held_out.TASKS if x in trained] or held_out.TASKS:
        options = recall_options(config, task)
        try:
            make_task(task, tokenizer, config.train.seq_len + 1, **options)
            tasks[task] = None
        except ValueError as error:
            missing.append(f"{task}: train.seq_len is too short: {error}")
    return Material(tasks, missing)


def find_linear(request: Request) -> Material:
    """The recall tasks, where CCQ could be attached to the model."""
    mixer = request.config.model.mixer
    if mixer == "attention":
        return Material({}, [f"model.mixer is {mixer!r}: CCQ attaches to linear mixers alone"])
    return find_any(request)


def geometry(context: Context, material: Material) -> dict[str, Any]:
    """See `geometry.measure`, for each task."""

    def measured(task: str) -> Measured:
        with context.subject.on_devices():
            figures, examples = measure(context.model, _batches(context, task))
        return Measured(figures, _as_json(examples))

    length = context.config.train.seq_len
    tasks = {
        task: context.once(f"tasks/{task}", functools.partial(measured, task))
        for task in material.tasks
    }
    return {"length": length, "tasks": tasks}


def sweep(context: Context, material: Material) -> dict[str, Any]:
    """See `sweep.read_with`: recall and the loss on text, at each lambda and as the model reads."""
    recall = {task: list(_batches(context, task)) for task in material.tasks}
    text = validation_batches(context.config)

    def measured(value: float | None) -> Measured:
        with context.subject.on_devices():
            examples = read_with(context.model, value, recall, text)
        figures = {name: found.mean for name, found in examples.items()}
        figures["perplexity"] = float(np.exp(figures["loss"]))
        return Measured(figures, _as_json(examples))

    values: dict[str, float | None] = {"own": None} | {f"{x:g}": x for x in LAMBDAS}
    return {
        name: context.once(name, functools.partial(measured, value))
        for name, value in values.items()
    }


def _batches(context: Context, task: str):
    return held_out.recall_batches(context, task, context.config.train.seq_len)


def _as_json(examples: dict[str, Examples]) -> dict[str, dict[str, list[float]]]:
    return {
        name: {"values": x.values.tolist(), "weights": x.weights.tolist()}
        for name, x in examples.items()
    }


def geometry_table(results: dict[str, Any]) -> Table:
    """A row a task, means over layers and heads."""
    rows = []
    for task, found in results["tasks"].items():
        shares = [float(np.mean(found[name])) for name in ("needle_share", "other_share")]
        rows.append([task, found["examples"], found["mean_gain"], *shares, found["share_gap"]])
    columns = ("task", "examples", "gain, dB", "needle in top", "others in top", "gap")
    top = next(iter(results["tasks"].values()))["top"]
    return Table(f"Reads of a needle; keys in the top {top} directions", columns, rows)


def sweep_table(results: dict[str, Any]) -> Table:
    """A row a lambda."""
    tasks = [name for name in results["own"] if name not in ("loss", "perplexity")]
    rows = [
        [name, *(100 * row[task] for task in tasks), row["loss"], row["perplexity"]]
        for name, row in results.items()
    ]
    columns = ("lambda", *(f"{task} %" for task in tasks), "loss, nats/token", "perplexity")
    return Table("Lambda fixed at test time", columns, rows)


def draw_geometry(results: dict[str, Any]) -> Figure:
    """Six views of the last task: the gain, the reads, lambda, Sigma's spectrum, shares of keys."""
    task, values = list(results["tasks"].items())[-1]
    found = {name: np.array(x) for name, x in values.items() if isinstance(x, list)}
    figure = Figure(figsize=(11, 6.4))
    axes = figure.subplots(2, 3)
    _map(axes[0, 0], found["gain"], "Gain of the contraction (dB)")
    _by_layer(axes[0, 1], {"as it reads": found["snr"], "without": found["plain_snr"]})
    axes[0, 1].set(title="Needle over rest (dB)", xlabel="layer")
    if "lambda" in found:
        _lines(
            axes[0, 2], found["lambda"].mean(axis=1), np.linspace(0, 1, found["lambda"].shape[-1])
        )
        axes[0, 2].set(title=r"$\lambda$ along the context", xlabel="share of the context")
    else:
        axes[0, 2].set_axis_off()
    spectrum = np.maximum(found["spectrum"].mean(axis=1), 1e-8)
    _lines(axes[1, 0], spectrum, np.arange(1, spectrum.shape[-1] + 1))
    axes[1, 0].set(title=r"Spectrum of $\Sigma$", xlabel="eigenvalue", yscale="log")
    shares = {"needle": found["needle_share"], "others": found["other_share"]}
    _by_layer(axes[1, 1], shares)
    axes[1, 1].set(title=f"Keys in the top {values['top']} directions", xlabel="layer", ylim=(0, 1))
    _map(axes[1, 2], found["needle_share"] - found["other_share"], "Needle less others")
    figure.suptitle(f"{task}, {results['length']} tokens", x=0.01, ha="left")
    return figure


def draw_sweep(results: dict[str, Any]) -> Figure:
    """Recall and perplexity over lambda; the model's own reading as lines across."""
    tasks = [name for name in results["own"] if name not in ("loss", "perplexity")]
    figure = Figure(figsize=(9, 3.6))
    left, right = figure.subplots(1, 2)
    for task, colour in zip(tasks, (TRAIN, VALIDATION), strict=False):
        _over_lambda(left, results, task, colour, task)
    left.set(title="Recall", xlabel=r"$\lambda$", ylabel="right answer tokens", ylim=(-0.02, None))
    left.legend()
    _over_lambda(right, results, "perplexity", TRAIN, "perplexity")
    right.set(title="Validation data", xlabel=r"$\lambda$", ylabel="perplexity", yscale="log")
    return figure


def _over_lambda(axes: Axes, results: dict, what: str, colour: str, label: str) -> None:
    fixed = {float(name): row[what] for name, row in results.items() if name != "own"}
    axes.plot(list(fixed), list(fixed.values()), "o-", color=colour, ms=4, label=label)
    axes.axhline(results["own"][what], color=colour, linestyle="--", linewidth=1)


def _map(axes: Axes, values: np.ndarray, title: str) -> None:
    limit = max(float(np.abs(values).max()), 1e-6)
    image = axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    axes.set(title=title, xlabel="head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)


def _by_layer(axes: Axes, series: dict[str, np.ndarray]) -> None:
    for (label, values), colour in zip(series.items(), (TRAIN, BASELINE), strict=True):
        layers = np.arange(len(values))
        axes.plot(layers, values.mean(axis=1), "o-", color=colour, ms=4, label=label)
        axes.plot(layers, values, ".", color=colour, alpha=0.4)
    axes.legend()


def _lines(axes: Axes, values: np.ndarray, at: np.ndarray) -> None:
    colours = matplotlib.colormaps[LAYERS](np.linspace(0, 0.9, len(values)))
    for layer, (row, colour) in enumerate(zip(values, colours, strict=True)):
        axes.plot(at, row, color=colour, label=f"layer {layer}")
    if len(values) <= 6:
        axes.legend(fontsize=8)
