"""Recall from real text: SWDE, SQuAD, FDA, TriviaQA, NQ and DROP as statements to be completed.

The examples, prompts and the score are those of the Based and "Just read twice" papers (arXiv
2402.18668, 2407.05483; github.com/HazyResearch/prefix-linear-attention): the text, then the question
as the beginning of a sentence, or a key and a colon. The model goes on greedily for up to 48 tokens of
one line; it is right if an answer is in them, in whatever case. A text that is too long is cut around
its first answer, as there.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ccq_jax.data import Tokenizer
from ccq_jax.evaluation import text_scores
from ccq_jax.evaluation.benchmark_data import Dataset, Found, Row, field
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.tables import Table
from ccq_jax.plots import BASELINE, TRAIN

TOKENS = 48
"""Of an answer, at most."""
ROOM = 50
"""Tokens that a cut leaves for the answer."""


class Example(NamedTuple):
    """A text, what is asked of it, and the right answers."""

    text: str
    question: str
    answers: list[str]

    @property
    def prompt(self) -> str:
        """The text, a full stop, and the question."""
        if not self.question:
            return self.text
        return f"{self.text}. {self.question}"


def _key_value(row: Row) -> Example:
    """SWDE and FDA: a page or a form, and a key whose value is asked for."""
    key = str(field(row, "key"))
    text = str(field(row, "text")).split("Summary of information above...")[0]
    text = _without_end(text, f"{key}:").strip().strip(".")
    return Example(text, f"{key[:1].upper()}{key[1:]}:", [str(field(row, "value"))])


def _cloze(row: Row) -> Example:
    """SQuAD: the text ends where the answer belongs."""
    return Example(str(field(row, "text")).strip(), "", [str(field(row, "value"))])


def _statement(row: Row) -> Example:
    """TriviaQA, NQ, DROP: a context, and a question as the beginning of a statement."""
    question = str(field(row, "question")).strip()
    text = re.sub(r"\[(PAR|DOC|TLE)\]", "", str(field(row, "context")))
    text = _without_end(text.strip(), question).strip().strip(".")
    return Example(text, question, [str(x) for x in field(row, "answers")] or ["unanswerable"])


def _without_end(text: str, end: str) -> str:
    while end and text.lower().endswith(end.lower()):
        text = text[: -len(end)]
    return text


TASKS: dict[str, tuple[str, Dataset, Callable[[Row], Example]]] = {
    "swde": ("SWDE", Dataset("hazyresearch/based-swde-v2", "validation"), _key_value),
    "squad": ("SQuAD", Dataset("hazyresearch/based-squad", "validation"), _cloze),
    "fda": ("FDA", Dataset("hazyresearch/based-fda", "validation"), _key_value),
    "triviaqa": ("TriviaQA", Dataset("hazyresearch/based_triviaqa", "validation"), _statement),
    "nq": ("NQ", Dataset("hazyresearch/based_nq_2048", "validation"), _statement),
    "drop": ("DROP", Dataset("hazyresearch/based_drop", "validation"), _statement),
}


def find(request: Request) -> Material:
    """Where the tasks' examples are."""
    return request.find({task: dataset for task, (_, dataset, _) in TASKS.items()})


def run(context: Context, material: Material) -> dict[str, Any]:
    """The accuracy of each task and, if all were measured, their mean, in %."""
    results = {
        task: context.once(task, functools.partial(_measure, context, task, found), found.identity)[
            "accuracy"
        ]
        for task, found in material.tasks.items()
    }
    if len(results) == len(TASKS):
        results["mean"] = float(np.mean(list(results.values())))
    return results


def _measure(context: Context, task: str, found: Found) -> Measured:
    read = TASKS[task][2]
    length = context.settings.retrieval_length
    examples = [shorten(read(row), context.tokenizer, length) for row in context.examples(found)]
    prompts = [context.encode(example.prompt) for example in examples]
    texts = context.generate(prompts, TOKENS, stop=("\n",))
    values = [
        100 * text_scores.contains(text, example.answers)
        for text, example in zip(texts, examples, strict=True)
    ]
    figures = {"accuracy": float(np.mean(values)), "examples": len(values)}
    return Measured(figures, {"": {"values": values}})


def shorten(example: Example, tokenizer: Tokenizer, length: int) -> Example:
    """Cuts a text of over `length` - 50 tokens (0: none) so that its first answer is in the middle.

    Where no answer is in the text, or the text itself is to be completed, its end stays.
    """
    room = length - ROOM
    ids = tokenizer.encode(example.text)
    if not length or len(ids) <= room:
        return example
    found = _first(example.text, example.answers) if example.question else None
    if found is None:
        kept = ids[len(ids) - room :]
    else:
        at = len(tokenizer.encode(example.text[:found]))
        start = max(0, at - room // 2)
        kept = ids[start : start + room]
    return example._replace(text=tokenizer.decode(kept).strip())


def _first(text: str, answers: Sequence[str]) -> int | None:
    """Where the first answer begins that is in the text."""
    places = (text.lower().find(answer.lower()) for answer in answers if answer)
    return min((place for place in places if place >= 0), default=None)


def draw(results: dict[str, Any]) -> Figure:
    """A bar a task, and their mean as a line."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = figure.subplots()
    names = [task for task in TASKS if task in results]
    axes.bar([TASKS[task][0] for task in names], [results[t] for t in names], color=TRAIN)
    if "mean" in results:
        axes.axhline(results["mean"], color=BASELINE, ls="--", lw=1.2)
        axes.text(0.01, results["mean"], " mean", transform=axes.get_yaxis_transform(), va="bottom")
    axes.set(title="Recall from text", ylabel="right (%)")
    axes.set_ylim(0, None)
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each task."""
    rows: list[list[Any]] = [[TASKS[t][0], results[t]] for t in TASKS if t in results]
    rows += [["mean", results["mean"]]] if "mean" in results else []
    return Table("Recall from text, % right", ("task", "accuracy"), rows)
