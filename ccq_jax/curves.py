"""Draws the validation losses of several runs beside each other.

    python -m ccq_jax.curves runs/gdn runs/plain-1 runs/plain-2 runs/ccq-1 runs/ccq-2 --out=curves.png

Runs whose folders differ in a number at the end (seeds) share a colour, and their mean is drawn bold.
A run that began from another one's workdir (`init_from`) is drawn from the step where that one ended.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ccq_jax import metrics, plots
from ccq_jax.workdir import read_config


class Curve(NamedTuple):
    """Validation losses of a run."""

    label: str
    steps: np.ndarray  # with those of the run that it began from
    losses: np.ndarray  # nats a token
    start: int  # the step at which the run begins


def read_curve(workdir: Path) -> Curve:
    """A run's curve; ValueError where there is no run, or none with a validation loss."""
    config = read_config(workdir)
    steps, losses = metrics.series(metrics.read(workdir), "eval/loss")
    if config is None or not len(steps):
        raise ValueError(f"{workdir} holds no run with a validation loss")
    label = re.sub(r"[-_]\d+$", "", workdir.name)
    source = Path(config.get("init_from") or "hf:")
    before = metrics.read(source) if read_config(source) else []
    start = before[-1]["step"] if before else 0
    return Curve(label, steps + start, losses, start)


def draw(curves: Sequence[Curve]) -> Figure:
    """All curves; beside them, where runs began from others, what came after."""
    starts = [curve.start for curve in curves if curve.start]
    figure = Figure(figsize=(9.6 if starts else 7.2, 4.2))
    panels = figure.subplots(1, 2 if starts else 1, squeeze=False)[0]
    names = list(dict.fromkeys(curve.label for curve in curves))
    colours = dict(zip(names, matplotlib.colormaps["tab10"](np.arange(10)), strict=False))
    for axes in panels:
        for name in names:
            group = [curve for curve in curves if curve.label == name]
            for curve in group:
                axes.plot(curve.steps, curve.losses, color=colours[name], alpha=0.4, linewidth=0.9)
            common = min((curve.steps for curve in group), key=len)
            mean = np.mean([np.interp(common, c.steps, c.losses) for c in group], axis=0)
            label = f"{name}: {mean[-1]:.4f}" + (f" ({len(group)} runs)" if group[1:] else "")
            axes.plot(common, mean, "o-", color=colours[name], markersize=3.5, label=label)
        axes.set(xlabel="step", ylabel="validation loss (nats / token)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_title("Validation loss")
    panels[0].legend()
    if starts:
        after = [curve for curve in curves if curve.start]
        panels[1].set_title("From where they began")
        panels[1].set_xlim(min(starts) - 3, None)
        inside = np.concatenate([curve.losses for curve in after])
        margin = 0.05 * (inside.max() - inside.min())
        panels[1].set_ylim(inside.min() - margin, inside.max() + margin)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="python -m ccq_jax.curves", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("runs", type=Path, nargs="+", help="workdirs of train.py")
    parser.add_argument("--out", type=Path, required=True, help="a .png file")
    flags = parser.parse_args(argv)
    try:
        curves = [read_curve(run) for run in flags.runs]
    except ValueError as error:
        sys.exit(f"curves: {error}")
    plots.save(draw, curves, flags.out)
    for curve in curves:
        row = {"run": curve.label, "begins": curve.start, "ends": int(curve.steps[-1])}
        print(json.dumps(row | {"first": curve.losses[0], "last": curve.losses[-1]}))


if __name__ == "__main__":
    main()
