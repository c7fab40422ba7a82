"""Pictures of a run, drawn from its metrics.jsonl alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ccq_jax import metrics

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "savefig.dpi": 144,
    "savefig.bbox": "tight",
    "figure.constrained_layout.use": True,
}
TRAIN, VALIDATION, BASELINE = "#1f5fa8", "#d1495b", "#6b6b6b"
LAYERS = "viridis"

# Diagnostics of CCQ: name in metrics.jsonl, title, label of the axis.
CURVATURE = (
    ("lambda_mean", "Strength of the contraction", r"mean $\lambda$"),
    (
        "lambda_sigma_max",
        "Contraction along the strongest direction",
        r"$\lambda\,\sigma_{\max}(\Sigma)$",
    ),
    ("effective_rank", "Directions that the keys fill", r"effective rank of $\Sigma$"),
    ("query_moved", "How far the query moves", r"$\|q_{clean} - q\|\;/\;\|q\|$"),
)


def draw(workdir: Path) -> list[Path]:
    """Draws loss.png, learning_rate.png and, with CCQ, ccq.png into `workdir`/plots.

    Returns the files. Nothing is drawn of a run that has not written two lines yet.
    """
    lines = metrics.read(workdir)
    if len(lines) < 2:
        return []
    pictures: dict[str, Callable[[list[metrics.Line]], Figure]] = {
        "loss": loss,
        "learning_rate": learning_rate,
    }
    if any("ccq/lambda_mean" in line for line in lines):
        pictures["ccq"] = curvature
    return [save(make, lines, workdir / "plots" / f"{name}.png") for name, make in pictures.items()]


def save(make: Callable[..., Figure], data, path: Path) -> Path:
    """Writes the figure `make(data)` to `path`, replacing what is there as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with matplotlib.rc_context(STYLE):
        make(data).savefig(temporary, format="png")
    temporary.replace(path)
    return path


def loss(lines: list[metrics.Line]) -> Figure:
    """Training and validation loss over the steps, with the unigram model's as a line."""
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.subplots()
    steps, values = metrics.series(lines, "loss")
    smooth = _smooth(values)
    axes.plot(steps, values, color=TRAIN, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth, color=TRAIN, label=f"training: {smooth[-1]:.3f}")
    at, validation = metrics.series(lines, "eval/loss")
    if len(at):
        label = f"validation: {validation[-1]:.3f}"
        axes.plot(at, validation, "o-", color=VALIDATION, markersize=4, label=label)
    _, unigram = metrics.series(lines, "eval/unigram_loss")
    if len(unigram):
        label = f"unigram model: {unigram[-1]:.3f}"
        axes.axhline(unigram[-1], color=BASELINE, linestyle="--", linewidth=1.2, label=label)
    axes.set(title="Loss", xlabel="step", ylabel="cross-entropy (nats / token)")
    axes.set_xlim(0, None)
    axes.legend(loc="upper right")
    _add_tokens(axes, lines)
    return figure


def learning_rate(lines: list[metrics.Line]) -> Figure:
    """Learning rate and gradient norm over the steps."""
    figure = Figure(figsize=(7.2, 4.8))
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(*metrics.series(lines, "learning_rate"), color=TRAIN)
    top.set(title="Learning rate", ylabel="learning rate")
    top.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    top.set_ylim(0, None)
    steps, norms = metrics.series(lines, "grad_norm")
    bottom.plot(steps, norms, color=TRAIN, alpha=0.3, linewidth=1)
    bottom.plot(steps, np.exp(_smooth(np.log(np.maximum(norms, 1e-30)))), color=TRAIN)
    bottom.set(title="Gradient norm, before clipping", xlabel="step", ylabel=r"$\|g\|$")
    bottom.set_yscale("log")
    bottom.set_xlim(0, None)
    return figure


def curvature(lines: list[metrics.Line]) -> Figure:
    """CCQ's diagnostics: over the steps by layer, and at the last step by layer and head."""
    figure = Figure(figsize=(10.5, 2.5 * len(CURVATURE)))
    grid = figure.subplots(len(CURVATURE), 2, width_ratios=(1.7, 1))
    for row, (name, title, label) in zip(grid, CURVATURE, strict=True):
        steps, values = metrics.series(lines, f"ccq/{name}")
        _by_layer(row[0], steps, values)
        row[0].set(title=title, ylabel=label)
        if name == "lambda_sigma_max":
            _mark_limit(row[0], values)
        _by_head(row[1], values[-1])
        row[1].set_title(f"{label}, step {steps[-1]}", fontweight="normal")
    grid[-1, 0].set_xlabel("step")
    grid[-1, 1].set_xlabel("head")
    lines_of_layers = grid[0, 0].get_legend_handles_labels()
    title = "mean of a layer's heads (thin: each head)"
    figure.legend(*lines_of_layers, loc="outside upper center", ncols=6, title=title)
    return figure


def _by_layer(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """One colour a layer: its heads thin, their mean bold. `values` are [n, L, H]."""
    count = values.shape[1]
    colours = matplotlib.colormaps[LAYERS](np.linspace(0, 0.9, count))
    named = set(np.linspace(0, count - 1, min(count, 6)).round().astype(int))
    for layer, colour in enumerate(colours):
        axes.plot(steps, values[:, layer], color=colour, alpha=0.35, linewidth=0.7)
        label = f"layer {layer}" if layer in named else None
        axes.plot(steps, values[:, layer].mean(axis=1), color=colour, label=label)
    axes.set_xlim(0, None)


def _by_head(axes: Axes, values: np.ndarray) -> None:
    """A map of `values` [L, H], with the numbers where there is room for them."""
    image = axes.imshow(values, cmap=LAYERS, aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("layer")
    layers, heads = values.shape
    axes.set_xticks(range(heads))
    axes.set_yticks(range(0, layers, math.ceil(layers / 8)))
    if layers <= 8 and heads <= 8:
        middle = (values.min() + values.max()) / 2
        for (layer, head), value in np.ndenumerate(values):
            colour = "black" if value > middle else "white"
            axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=colour, size=8)


def _mark_limit(axes: Axes, values: np.ndarray) -> None:
    """Beyond 2, I - λΣ turns a query's component round and makes it longer."""
    if values.max() > 1:
        axes.axhline(2, color=VALIDATION, linestyle="--", linewidth=1.2)
        axes.annotate(
            "above 2 the query is no longer contracted",
            (1, 2),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            size=8,
            color=VALIDATION,
        )


def _smooth(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """A running mean that forgets over `share` of the points, unbiased at the start."""
    keep = math.exp(-1 / (share * len(values)))
    total, weight, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        out[i] = total / weight
    return out


def _add_tokens(axes: Axes, lines: list[metrics.Line]) -> None:
    """A second scale above: the tokens that were trained on."""
    tokens_per_step = lines[-1]["tokens"] / lines[-1]["step"]
    exponent = int(math.log10(max(lines[-1]["tokens"], 1))) // 3 * 3
    unit = {0: "", 3: "thousands", 6: "millions", 9: "billions", 12: "trillions"}[exponent]
    scale = tokens_per_step / 10**exponent
    top = axes.secondary_xaxis("top", functions=(lambda x: x * scale, lambda x: x / scale))
    top.set_xlabel(f"tokens ({unit})" if unit else "tokens", color=BASELINE)
    top.tick_params(colors=BASELINE)
    top.spines["top"].set_visible(False)
