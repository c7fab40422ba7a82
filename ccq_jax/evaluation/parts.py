"""The parts of an evaluation, and the suites that name several of them."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ccq_jax import plots
from ccq_jax.evaluation import (
    curvature,
    extrapolation,
    held_out,
    lm,
    longbench,
    mqar_grid,
    pictures,
    retrieval,
    s_niah,
)
from ccq_jax.evaluation.context import Context, Material, Request
from ccq_jax.evaluation.tables import Table

Runs = dict[str, dict[str, Any]]
"""Results of this part by run: first those of the run that is evaluated, then others beside it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part; its results are kept in eval/NAME.json under the name in `PARTS`.

    Attributes:
      about: what it measures, in a line.
      find: says, before a model is loaded, what there is to work on and what is missing.
      run: measures; each task through `Context.once`, so that it is not measured twice.
      table: the results as a table.
      draw: writes pictures of the results to a path, which ends in .png.
      settings: fields of the configuration that the results depend on beside the model and seed.
    """

    about: str
    find: Callable[[Request], Material]
    run: Callable[[Context, Material], dict[str, Any]]
    table: Callable[[dict[str, Any]], Table]
    draw: Callable[[Runs, Path], None] | None = None
    settings: Sequence[str] = ()


def one(picture: Callable[[dict[str, Any]], Figure]) -> Callable[[Runs, Path], None]:
    """Draws the results of the run that is evaluated."""

    def draw(runs: Runs, path: Path) -> None:
        plots.save(picture, next(iter(runs.values())), path)

    return draw


def all_runs(picture: Callable[[Runs], Figure]) -> Callable[[Runs, Path], None]:
    """Draws the results of all runs in one picture."""

    def draw(runs: Runs, path: Path) -> None:
        plots.save(picture, runs, path)

    return draw


_DATA = ("data", "train.batch_size", "train.seq_len")

PARTS: dict[str, Part] = {
    "language": Part(
        "loss, perplexity and bits per byte of the run's validation data",
        held_out.find,
        held_out.language,
        held_out.language_table,
        settings=(*_DATA, "eval.batches"),
    ),
    "length": Part(
        "perplexity by position of the run's held-out documents",
        held_out.find,
        held_out.length,
        held_out.length_table,
        one(pictures.length),
        (*_DATA, "eval.contexts", "eval.documents"),
    ),
    "recall": Part(
        "accuracy on mqar and niah, as they are trained on, by length",
        held_out.find,
        held_out.recall,
        held_out.recall_table,
        one(pictures.recall),
        (*_DATA, "eval.recall_lengths", "eval.recall_examples"),
    ),
    "lm": Part(
        "WikiText, LAMBADA and seven zero-shot tasks, by lm-evaluation-harness",
        lm.find,
        lm.run,
        lm.table,
        one(lm.draw),
        ("eval.bos", "eval.context_length"),
    ),
    "s_niah": Part(
        "RULER's single needle in a haystack, 1 to 3, by length and depth",
        s_niah.find,
        s_niah.run,
        s_niah.table,
        one(s_niah.draw),
        ("eval.bos", "eval.s_niah.samples"),
    ),
    "extrapolation": Part(
        "perplexity by position on six corpora of long documents",
        extrapolation.find,
        extrapolation.run,
        extrapolation.table,
        all_runs(extrapolation.draw),
        ("eval.bos", "eval.extrapolation"),
    ),
    "longbench": Part(
        "LongBench's 14 English tasks",
        longbench.find,
        longbench.run,
        longbench.table,
        one(longbench.draw),
        ("eval.bos", "eval.longbench_length"),
    ),
    "retrieval": Part(
        "SWDE, SQuAD, FDA, TriviaQA, NQ and DROP as statements to be completed",
        retrieval.find,
        retrieval.run,
        retrieval.table,
        one(retrieval.draw),
        ("eval.bos", "eval.retrieval_length"),
    ),
    "mqar": Part(
        "multi-query associative recall by length and number of pairs",
        mqar_grid.find,
        mqar_grid.run,
        mqar_grid.table,
        one(mqar_grid.draw),
        ("data.mqar",),
    ),
    "geometry": Part(
        "what a needle's key is like, and what the contraction lets through of it",
        curvature.find_any,
        curvature.geometry,
        curvature.geometry_table,
        one(curvature.draw_geometry),
        (*_DATA, "eval.recall_examples"),
    ),
    "sweep": Part(
        "the same recall tasks and text at lambdas fixed at test time",
        curvature.find_linear,
        curvature.sweep,
        curvature.sweep_table,
        one(curvature.draw_sweep),
        (*_DATA, "eval.recall_examples", "eval.batches"),
    ),
}

SUITES: dict[str, tuple[str, ...]] = {
    "run": ("language", "length", "recall"),
    "paper": ("lm", "s_niah", "extrapolation", "longbench", "retrieval", "mqar"),
    "all": tuple(PARTS),
}


def choose(names: Sequence[str]) -> list[str]:
    """The parts that names of parts and suites stand for.

    Raises:
      ValueError: an unknown name, or none.
    """
    chosen: dict[str, None] = {}
    for name in names:
        if name not in PARTS and name not in SUITES:
            known = ", ".join([*SUITES, *PARTS])
            raise ValueError(f"suite has {name!r}; it takes {known}")
        chosen |= dict.fromkeys(SUITES.get(name, (name,)))
    if not chosen:
        raise ValueError(f"suite is empty; it takes {', '.join([*SUITES, *PARTS])}")
    return list(chosen)
