"""Single needle in a haystack: accuracy by length and depth, as RULER scores it.

The model goes on greedily for 128 tokens; an answer is right if the value is in them.
"""

import functools
import importlib.metadata
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ccq_jax.data import make_tokenizer
from ccq_jax.evaluation import needle
from ccq_jax.evaluation.benchmark_data import Dataset, Found, field
from ccq_jax.evaluation.context import Context, Material, Measured, Request, prefix
from ccq_jax.evaluation.tables import Table

ESSAYS = Dataset("baber/paul_graham_essays")
"""Or any other text in that place."""
BANDS = 10
"""Rows of the map of depths."""


def find(request: Request) -> Material:
    """S-NIAH-1, and the others where there are essays.

    Raises:
      ValueError: a length has no room for the question.
    """
    tokenizer = make_tokenizer(request.config.data.tokenizer)
    front = prefix(tokenizer, request.config.eval.bos)
    for length in request.config.eval.s_niah.lengths:
        needle.make_prompts("1", tokenizer, length, 1, prefix=front)
    found, missing = request.find({"essays": ESSAYS})
    if missing:
        return Material({"1": None}, [f"2 and 3 need essays; {missing[0]}"])
    return Material({"1": None, "2": found["essays"], "3": found["essays"]})


def run(context: Context, material: Material) -> dict[str, Any]:
    """For each task and length: accuracy in %, and accuracy by depth, in tenths of the text."""
    results: dict[str, Any] = {"depths": {}}
    texts: dict[str, str] = {}
    words = f"wonderwords {importlib.metadata.version('wonderwords')}"
    for task, essays in material.tasks.items():
        if essays is not None and not texts:
            texts["essays"] = " ".join(str(field(row, "text")) for row in essays.rows())
        for length in sorted(context.settings.s_niah.lengths):
            identity = f"{essays.identity}, {words}" if isinstance(essays, Found) else words
            text = texts.get("essays", "") if essays is not None else ""
            found = context.once(
                f"{task}/{length}",
                functools.partial(_measure, context, task, length, text),
                identity,
            )
            results.setdefault(task, {})[str(length)] = found["accuracy"]
            results["depths"].setdefault(task, {})[str(length)] = found["depths"]
    return results


def _measure(context: Context, task: str, length: int, essays: str) -> Measured:
    count = context.settings.s_niah.samples
    count = min(count, context.limit) if context.limit else count
    prompts = needle.make_prompts(
        task,
        context.tokenizer,
        length,
        count,
        prefix=prefix(context.tokenizer, context.settings.bos),
        essays=essays,
    )
    texts = context.generate([prompt.tokens for prompt in prompts], needle.ANSWER)
    right = np.array(
        [contains(text, prompt.answer) for text, prompt in zip(texts, prompts, strict=True)]
    )
    bands = np.array([min(prompt.depth * BANDS // 100, BANDS - 1) for prompt in prompts])
    depths = [
        100 * float(right[bands == band].mean()) if (bands == band).any() else None
        for band in range(BANDS)
    ]
    values = (100.0 * right).tolist()
    return Measured(
        {"accuracy": float(np.mean(values)), "depths": depths, "prompts": count},
        {"": {"values": values}},
    )


def contains(text: str, answer: str) -> bool:
    """Whether the answer is in a text, in whatever case: RULER's score."""
    return answer.lower() in text.lower()


def draw(results: dict[str, Any]) -> Figure:
    """Accuracy, a map of length and depth for each task."""
    tasks = [task for task in needle.TASKS if task in results]
    figure = Figure(figsize=(1.2 + 3.2 * len(tasks), 3.8))
    grid = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(grid, tasks, strict=True):
        depths = results["depths"][task]
        values = np.array(list(depths.values()), dtype=float).T  # [depth, length]
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(depths)), [f"{int(n):,}" for n in depths])
        axes.set_yticks(range(BANDS), [f"{100 * (i + 0.5) / BANDS:.0f} %" for i in range(BANDS)])
        means = ", ".join(f"{x:.0f}" for x in results[task].values())
        axes.set(title=f"S-NIAH-{task}", xlabel=f"tokens\nmeans: {means} %")
    grid[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(grid), format=PercentFormatter(), label="found")
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each task, a column for each length."""
    tasks = [task for task in needle.TASKS if task in results]
    lengths = list(results[tasks[0]])
    rows = [[f"S-NIAH-{task}", *results[task].values()] for task in tasks]
    return Table("Needle in a haystack, % found", ("task", *lengths), rows)
