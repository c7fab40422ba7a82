r"""Puts evaluated runs beside each other, and beside published figures.

    python -m ccq_jax.compare runs/gdn runs/ccq_gdn
    python -m ccq_jax.compare runs/gdn runs/ccq_gdn --figures='recall/*,language/*' --out=comparison
    python -m ccq_jax.compare runs/gdn-[0-4] runs/ccq_gdn-[0-4] --seeds

Reads RUN/eval/*.json, as eval.py writes them. Every run is compared with the first: where both were
measured on the same examples, the difference comes with a bootstrap interval (95 %), the p of a paired
permutation test, and q, Benjamini and Hochberg's, which allows for the number of figures compared.
Intervals and tests are over examples: they say nothing of what another training seed would give.

With --seeds, runs whose folders differ in a number at the end are one model, trained with several seeds:
figures are means over seeds, and differences are taken seed by seed, so that intervals (Student's, as
seeds are few) and tests are over seeds.
"""

import argparse
import contextlib
import fnmatch
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from ccq_jax import plots
from ccq_jax.evaluation import statistics
from ccq_jax.evaluation.published import PUBLISHED
from ccq_jax.evaluation.statistics import Difference, Examples, Interval
from ccq_jax.evaluation.tables import Table
from ccq_jax.workdir import write_atomically

# Names of what results say beside figures.
DESCRIPTIONS = (
    "examples",
    "documents",
    "prompts",
    "targets",
    "trained",
    "length",
    "top",
    "version",
)
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


Compared = tuple[Sequence["Run"], dict[str, list["Cell | None"]]]


class Run(NamedTuple):
    """What was measured of a run: figures by path, such as "language/loss", and their examples."""

    name: str
    figures: dict[str, float]
    examples: dict[str, Examples]


class Cell(NamedTuple):
    """One run's figure, its interval, and how it differs from the first run's."""

    value: float
    interval: Interval | None
    difference: Difference | None
    q: float | None


def read_run(folder: str | Path) -> Run:
    """The evaluation of a run.

    Raises:
      ValueError: no evaluation there, or a file that eval.py did not write.
    """
    place = Path(folder).expanduser() / "eval"
    files = sorted(place.glob("*.json"))
    if not files:
        raise ValueError(f"{place} holds no evaluation; run eval.py on {folder} first")
    figures: dict[str, float] = {}
    examples: dict[str, Examples] = {}
    for file in files:
        try:
            found = json.loads(file.read_text())
            figures |= dict(_flatten(found["results"], file.stem))
            for path, values in found.get("examples", {}).items():
                examples[f"{file.stem}/{path}"] = Examples.read(values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not what eval.py writes: {error!r}") from error
    return Run(str(folder), figures, examples)


def _flatten(tree: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name not in DESCRIPTIONS:
                yield from _flatten(value, f"{path}/{name}")
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)


def join_seeds(runs: Sequence[Run]) -> list[Run]:
    """A run for each model: means over its seeds, which are their examples.

    Args:
      runs: named as NAME-SEED or NAME_SEED; runs of one NAME are one model.

    Raises:
      ValueError: a model has other seeds than the first.
    """
    models: dict[str, dict[int, Run]] = {}
    for run in runs:
        found = re.fullmatch(r"(.*)[-_](\d+)/?", run.name)
        if found is None:
            raise ValueError(f"{run.name} does not end in a seed, as runs/gdn-1 does")
        models.setdefault(found[1], {})[int(found[2])] = run
    seeds = sorted(next(iter(models.values())))
    joined = []
    for name, by_seed in models.items():
        if sorted(by_seed) != seeds:
            raise ValueError(f"{name} has the seeds {sorted(by_seed)}, and not {seeds}")
        members = [by_seed[seed].figures for seed in seeds]
        values = {
            path: np.array([figures[path] for figures in members])
            for path in members[0]
            if all(path in figures for figures in members)
        }
        means = {path: float(x.mean()) for path, x in values.items()}
        examples = {path: Examples(x, np.ones_like(x)) for path, x in values.items()}
        joined.append(Run(name, means, examples))
    return joined


def compare(runs: Sequence[Run], patterns: Sequence[str] = ("*",)) -> dict[str, list[Cell | None]]:
    """A row for each figure that two runs or more have, or the only run: a cell a run.

    Args:
      runs: the first is what the others are compared with.
      patterns: shell patterns of the figures' paths.
    """
    needed = min(2, len(runs))
    paths = [
        path
        for path in dict.fromkeys(path for run in runs for path in run.figures)
        if sum(path in run.figures for run in runs) >= needed
        and any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
    ]
    rows = {path: [_cell(path, run, runs[0]) for run in runs] for path in paths}
    tested = [cell for row in rows.values() for cell in row if cell and cell.difference]
    adjusted = statistics.false_discovery([cell.difference.p for cell in tested])  # type: ignore[union-attr]
    q_of = {id(cell): q for cell, q in zip(tested, adjusted, strict=True)}
    return {
        path: [cell and cell._replace(q=q_of.get(id(cell))) for cell in row]
        for path, row in rows.items()
    }


def _cell(path: str, run: Run, first: Run) -> Cell | None:
    if path not in run.figures:
        return None
    examples, others = run.examples.get(path), first.examples.get(path)
    found = None
    if examples and others and run is not first:
        with contextlib.suppress(ValueError):  # other examples: shown beside each other, untested
            found = statistics.difference(others, examples)
    interval = statistics.interval(examples) if examples else None
    return Cell(run.figures[path], interval, found, None)


def as_texts(cell: Cell | None) -> tuple[str, str]:
    """The figure with its interval, and the difference with its own."""
    if cell is None:
        return "", ""
    value = f"{cell.value:.4g}"
    if cell.interval:
        value += f" [{cell.interval.low:.4g}, {cell.interval.high:.4g}]"
    if cell.difference is None:
        return value, ""
    mean, (low, high), p = cell.difference
    return value, f"{mean:+.4g} [{low:+.4g}, {high:+.4g}] p={p:.2g} q={cell.q:.2g}"


def table(runs: Sequence[Run], rows: dict[str, list[Cell | None]]) -> Table:
    """A row a figure; of each run its figure, and after the first how it differs from that one's."""
    columns = ["figure", runs[0].name]
    for run in runs[1:]:
        columns += [run.name, f"{run.name} - {runs[0].name}"]
    lines = []
    for path, row in rows.items():
        line = [path, as_texts(row[0])[0]]
        for cell in row[1:]:
            line += as_texts(cell)
        lines.append(line)
    return Table("Comparison", columns, lines)


def published(rows: dict[str, list[Cell | None]]) -> Table:
    """Published figures of the same names."""
    lines: list[list[str | float]] = [
        [path, row.model, row.figures[path], row.source]
        for path in rows
        for row in PUBLISHED
        if path in row.figures
    ]
    return Table("Published", ["figure", "model", "published", "source"], lines)


def draw(data: Compared) -> Figure:
    """Differences from the first run, in units of the half-width of their interval."""
    runs, rows = data
    found = [
        (path, run.name, cell.difference)
        for path, row in rows.items()
        for run, cell in zip(runs, row, strict=True)
        if cell and cell.difference
    ]
    figure = Figure(figsize=(7.2, 1.2 + 0.28 * max(3, len(found))))
    axes = figure.subplots()
    for at, (path, _, (mean, (low, high), _p)) in enumerate(found):
        name = path.rsplit("/", 1)[-1]
        sign = -1 if any(word in name for word in LOWER_IS_BETTER) else 1
        unit = (high - low) / 2 or 1.0
        ends = sorted(sign * x / unit for x in (low, high))
        good = ends[0] > 0 or ends[1] < 0
        colour = plots.TRAIN if good else plots.BASELINE
        axes.plot(ends, [at, at], color=colour)
        axes.plot(sign * mean / unit, at, "o", color=colour, markersize=4)
    axes.axvline(0, color=plots.BASELINE, linewidth=1)
    axes.set_yticks(
        np.arange(len(found)), [f"{path}, {Path(name).name}" for path, name, _ in found]
    )
    axes.invert_yaxis()
    axes.set(
        title=f"Difference from {runs[0].name}, with 95 % intervals",
        xlabel="half-widths of the interval; to the right is better",
    )
    return figure


def draw_seeds(data: Compared) -> Figure:
    """A panel a figure: a line a model, with a dot for each seed and a bar at the mean."""
    runs, rows = data
    width = min(4, len(rows))
    height = -(-len(rows) // width)
    size = (1.4 + 2.1 * width, height * (0.8 + 0.26 * len(runs)))
    figure = Figure(figsize=size)
    grid = figure.subplots(height, width, squeeze=False, sharey=True).flat
    for path, axes in zip(rows, grid, strict=False):
        for at, run in enumerate(runs):
            if path not in run.examples:
                continue
            values = run.examples[path].values
            colour = plots.BASELINE if at == 0 else plots.TRAIN
            axes.plot(values, np.full(len(values), at), "o", color=colour, alpha=0.5, markersize=4)
            axes.plot(values.mean(), at, "|", color=colour, markersize=14, markeredgewidth=2)
        axes.set_title(path, fontsize=8)
        axes.set_yticks(range(len(runs)), [Path(run.name).name for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)  # of all panels, which share it: the first model on top
    for axes in grid:
        axes.set_axis_off()
    return figure


def write(
    folder: Path,
    runs: Sequence[Run],
    rows: dict[str, list[Cell | None]],
    picture: Callable[[Compared], Figure],
) -> None:
    """comparison.md, .csv, .json and, where anything was tested, .png."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = [x for x in (table(runs, rows), published(rows)) if x.rows]
    write_atomically(folder / "comparison.md", "\n".join(x.markdown() for x in shown))
    write_atomically(folder / "comparison.csv", shown[0].csv())
    found = {
        path: {run.name: cell and cell._asdict() for run, cell in zip(runs, row, strict=True)}
        for path, row in rows.items()
    }
    write_atomically(folder / "comparison.json", json.dumps(found, indent=2) + "\n")
    if any(cell and cell.difference for row in rows.values() for cell in row):
        plots.save(picture, (runs, rows), folder / "comparison.png")


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ccq_jax.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a directory with an evaluation")
    parser.add_argument("--figures", default="*", help="shell patterns of the figures' paths")
    parser.add_argument(
        "--seeds", action="store_true", help="runs NAME-SEED of a NAME are one model"
    )
    parser.add_argument("--out", help="folder for comparison.md, .csv, .json and .png")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(folder) for folder in args.runs]
        runs = join_seeds(runs) if args.seeds else runs
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    rows = compare(runs, args.figures.split(","))
    if not rows:
        print(f"compare: no figure matches {args.figures!r} in every run", file=sys.stderr)
        return 1
    console = Console(width=None if Console().is_terminal else 200)
    for shown in (table(runs, rows), published(rows)):
        if shown.rows:
            console.print(shown.rich())
    if args.out:
        picture = draw_seeds if args.seeds else draw
        write(Path(args.out).expanduser(), runs, rows, picture)
        print(f"wrote {args.out}/comparison.md, .csv, .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
