"""LongBench's English tasks (arXiv 2308.14508) that the Gated DeltaNet and CCQ papers report.

Prompts, lengths of the answers, scores and the cut in the middle of a prompt are LongBench's own
(github.com/THUDM/LongBench). No chat template is put around a prompt: the models are no chat models.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ccq_jax.evaluation import text_scores
from ccq_jax.evaluation.benchmark_data import Dataset, Found, Row, field
from ccq_jax.evaluation.context import Context, Material, Measured, Request
from ccq_jax.evaluation.tables import Table
from ccq_jax.plots import BASELINE, TRAIN

REPOSITORY = "THUDM/LongBench"

_STORY = (
    "Answer the question asconcisely as you can, using a single phrase if possible. "
    "Do not provide any explanation."
)
_ARTICLE = (
    "nswer the question{} as concisely as you can, using a single phrase or sentence if possible. If "
    "the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
    "Do not provide any explanation."
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any "
    "other words."
)
_QUESTION = "\n\nQuestion: {input}\nAnswer:"
_MULTIHOP = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}{_QUESTION}"
)


class Task(NamedTuple):
    """A task of LongBench.

    Attributes:
      label: in the published tables.
      prompt: with the fields {context} and {input} of an example.
      tokens: of an answer, at most.
      score: of a text against one right answer and the classes there are.
      first_line: whether only the first line of a text counts.
    """

    label: str
    prompt: str
    tokens: int
    score: Callable[[str, str, list[str]], float]
    first_line: bool = False


def _f1(text: str, answer: str, classes: list[str]) -> float:
    return text_scores.f1(text, answer)


def _rouge(text: str, answer: str, classes: list[str]) -> float:
    return text_scores.rouge_l(text, answer)


def _edit(text: str, answer: str, classes: list[str]) -> float:
    return text_scores.edit_similarity(text, answer)


TASKS = {
    "narrativeqa": Task(
        "NQA",
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"{_STORY}\n\nStory: {{context}}\n\nNow, answer the question based on the story "
        f"{_STORY.removeprefix('Answer the question ')}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        _f1,
    ),
    "qasper": Task(
        "QQA",
        f"You are given a scientific article and a question. A{_ARTICLE.format('')}"
        f"\n\nArticle: {{context}}\n\n A{_ARTICLE.format(' based on the above article')}"
        "\n\nQuestion: {input}\n\nAnswer:",
        128,
        _f1,
    ),
    "multifieldqa_en": Task(
        "MFQ",
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other words."
        + _QUESTION,
        64,
        _f1,
    ),
    "hotpotqa": Task("HQA", _MULTIHOP, 32, _f1),
    "2wikimqa": Task("2WM", _MULTIHOP, 32, _f1),
    "musique": Task("Mus", _MULTIHOP, 32, _f1),
    "gov_report": Task(
        "GvR",
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        _rouge,
    ),
    "qmsum": Task(
        "QMS",
        "You are given a meeting transcript and a query containing a question or instruction. Answer "
        "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
        "on the above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        _rouge,
    ),
    "multi_news": Task(
        "MNs",
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        _rouge,
    ),
    "trec": Task(
        "TRC",
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        64,
        text_scores.classification,
        first_line=True,
    ),
    "triviaqa": Task(
        "TQA",
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        _f1,
        first_line=True,
    ),
    "samsum": Task(
        "SSM",
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        _rouge,
        first_line=True,
    ),
    "lcc": Task(
        "LCC", "Please complete the code given below. \n{context}Next line of code:\n", 64, _edit
    ),
    "repobench-p": Task(
        "RBP",
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        _edit,
    ),
}


def find(request: Request) -> Material:
    """Where the tasks' examples are."""
    return request.find({task: Dataset(REPOSITORY, "test", task) for task in TASKS})


def run(context: Context, material: Material) -> dict[str, Any]:
    """The score of each task and, if all were measured, their mean, in %."""
    results = {
        task: context.once(
            task,
            functools.partial(_measure, context, TASKS[task], found),
            found.identity,
        )["score"]
        for task, found in material.tasks.items()
    }
    if len(results) == len(TASKS):
        results["mean"] = float(np.mean(list(results.values())))
    return results


def _measure(context: Context, task: Task, found: Found) -> Measured:
    rows = context.examples(found)
    length = context.settings.longbench_length
    prompts = [
        cut_middle(context.encode(fill(task.prompt, row)), max(2, length - task.tokens))
        for row in rows
    ]
    texts = context.generate(prompts, task.tokens)
    values = [100 * score(task, text, row) for text, row in zip(texts, rows, strict=True)]
    figures = {"score": float(np.mean(values)), "examples": len(values)}
    return Measured(figures, {"": {"values": values}})


def fill(prompt: str, row: Row) -> str:
    """A prompt with an example's fields, which may hold braces of their own, in it."""
    before, after = prompt.split("{context}")
    text = before + str(field(row, "context"))
    return text + after.replace("{input}", str(row.get("input") or ""))


def cut_middle(tokens: list[int], length: int) -> list[int]:
    """Leaves out what is in the middle of over `length` tokens: a prompt's ends say what to do."""
    half = length // 2
    return tokens if len(tokens) <= length else tokens[:half] + tokens[-half:]


def score(task: Task, text: str, row: Row) -> float:
    """The best score of a text against one of an example's answers."""
    if task.first_line:
        text = text.lstrip("\n").split("\n")[0]
    classes = list(row.get("all_classes") or ())
    return max(task.score(text, answer, classes) for answer in field(row, "answers"))


def draw(results: dict[str, Any]) -> Figure:
    """A bar a task, and their mean as a line."""
    figure = Figure(figsize=(7.2, 3.6))
    axes = figure.subplots()
    names = [task for task in TASKS if task in results]
    axes.bar([TASKS[task].label for task in names], [results[t] for t in names], color=TRAIN)
    if "mean" in results:
        axes.axhline(results["mean"], color=BASELINE, ls="--", lw=1.2)
        axes.text(0.01, results["mean"], " mean", transform=axes.get_yaxis_transform(), va="bottom")
    axes.set(title="LongBench", ylabel="score (%)")
    axes.set_ylim(0, None)
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each task."""
    rows: list[list[Any]] = [[f"{TASKS[t].label} {t}", results[t]] for t in TASKS if t in results]
    rows += [["mean", results["mean"]]] if "mean" in results else []
    return Table("LongBench, %", ("task", "score"), rows)
