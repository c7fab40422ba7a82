"""Perplexity at lengths beyond those of training, on six corpora of long documents.

The state is carried through a text in segments, nothing slides and nothing is dropped: a text of a
million tokens takes the memory of a thousand. (Softmax attention still keeps all keys and values.)
As elsewhere the texts of a corpus are its documents joined, an end of document between them, so that
corpora of shorter documents reach every length; `eval.extrapolation.joined` False reads the beginnings
of documents that are long enough by themselves.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32
from matplotlib.figure import Figure

from ccq_jax.data import Tokenizer
from ccq_jax.evaluation.benchmark_data import Dataset, Found, field
from ccq_jax.evaluation.context import ROW, Context, Material, Measured, Request, prefix
from ccq_jax.evaluation.scoring import score
from ccq_jax.evaluation.tables import Table
from ccq_jax.plots import BASELINE, TRAIN, VALIDATION

COLOURS = (TRAIN, VALIDATION, "#2e8b57", "#e08e0b", "#7b4fa3", BASELINE)
FIELDS = ("text", "input", "content", "report", "context", "document")
"""Of an example, in which its text may be."""


class Corpus(NamedTuple):
    """A corpus and its name in plots."""

    label: str
    dataset: Dataset


CORPORA = {
    "gov_report": Corpus("GovReport", Dataset("tau/scrolls", "test", "gov_report")),
    "qmsum": Corpus("QMSum", Dataset("tau/scrolls", "test", "qmsum")),
    "narrative_qa": Corpus("NarrativeQA", Dataset("tau/scrolls", "test", "narrative_qa")),
    "qasper": Corpus("Qasper", Dataset("tau/scrolls", "test", "qasper")),
    "codeparrot": Corpus("CodeParrot", Dataset("codeparrot/codeparrot-clean-valid")),
    "pg19": Corpus("PG19", Dataset("emozilla/pg19", "test")),
}


def find(request: Request) -> Material:
    """Where the corpora are."""
    return request.find({name: corpus.dataset for name, corpus in CORPORA.items()})


def run(context: Context, material: Material) -> dict[str, Any]:
    """For each corpus: perplexity of a text's first tokens at each length, and by position.

    Corpora without a text that is long enough are named under "left_out".
    """
    results = {
        name: context.once(name, functools.partial(_measure, context, found), found.identity)
        for name, found in material.tasks.items()
    }
    return {
        "trained": context.config.train.seq_len,
        "corpora": {name: found for name, found in results.items() if "lengths" in found},
        "left_out": {
            name: found["left_out"] for name, found in results.items() if "left_out" in found
        },
    }


def _measure(context: Context, found: Found) -> Measured:
    settings = context.settings.extrapolation
    lengths = sorted(settings.lengths)
    count = min(settings.texts, context.limit) if context.limit else settings.texts
    front = prefix(context.tokenizer, context.settings.bos)
    try:
        texts = long_texts(
            found, context.tokenizer, lengths, count, joined=settings.joined, front=front
        )
    except ValueError as error:
        return Measured({"left_out": str(error)})
    size = min(
        context.rows(ROW), -(-len(texts) // context.subject.devices) * context.subject.devices
    )
    losses = []
    with context.subject.on_devices():
        for start in context.track(range(0, len(texts), size), "texts"):
            batch = texts[start : start + size]
            filled = np.concatenate([batch, np.repeat(batch[:1], size - len(batch), axis=0)])
            found_losses = score(context.model, filled[:, :-1], filled[:, 1:]).loss
            losses.append(found_losses[: len(batch)].astype(np.float64))
    return summarise(np.concatenate(losses), lengths, settings.bucket)


def summarise(losses: np.ndarray, lengths: list[int], bucket: int) -> Measured:
    """Figures from the losses [texts, tokens], in nats.

    The perplexity of a length is that of a text's tokens up to there; that of a position, of the
    `bucket` tokens that end there.
    """
    figures: dict[str, Any] = {"texts": len(losses), "lengths": {}}
    examples = {}
    for length in lengths:
        if length <= losses.shape[1]:
            values = losses[:, :length].mean(axis=1)
            mean = float(values.mean())
            figures["lengths"][str(length)] = {"loss": mean, "perplexity": float(np.exp(mean))}
            examples[f"lengths/{length}/loss"] = {"values": values.tolist()}
    starts = np.arange(0, losses.shape[1], bucket)
    ends = np.append(starts[1:], losses.shape[1])
    means = np.add.reduceat(losses, starts, axis=1).mean(axis=0) / (ends - starts)
    figures["by_position"] = {
        "ends": ends.tolist(),
        "loss": means.tolist(),
        "perplexity": np.exp(means).tolist(),
    }
    return Measured(figures, examples)


def long_texts(
    found: Found,
    tokenizer: Tokenizer,
    lengths: list[int],
    count: int,
    *,
    joined: bool,
    front: list[int],
) -> Int32[np.ndarray, "texts tokens"]:
    """Up to `count` texts of the greatest of the lengths that the corpus has a text of, plus 1.

    Raises:
      ValueError: it has no text of any of the lengths.
    """
    longest = max(lengths) + 1 - len(front)
    kept: list[np.ndarray] = []
    rest = np.zeros(0, np.int32)
    for ids in _documents(found, tokenizer):
        if joined:
            rest = np.concatenate([rest, ids, np.array([tokenizer.eos_id], np.int32)])
            while len(rest) >= longest and len(kept) < count:
                kept.append(rest[:longest])
                rest = rest[longest:]
        elif len(ids) >= longest:
            kept.append(ids[:longest])
        elif len(ids) > len(rest):
            rest = ids
        if len(kept) == count:
            break
    if not kept:  # one text, of the greatest length that there is
        fits = [n + 1 - len(front) for n in lengths if n + 1 - len(front) <= len(rest)]
        if not fits:
            raise ValueError(
                f"{found.dataset}: its longest text has {len(rest)} tokens, fewer than "
                f"eval.extrapolation.lengths ask for, {min(lengths)} or more"
            )
        kept = [rest[: max(fits)]]
    return np.stack([np.concatenate([np.array(front, np.int32), ids]) for ids in kept])


def _documents(found: Found, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for row in found.stream():
        text = str(field(row, *FIELDS))
        if text:
            yield tokenizer.encode_batch([text])[0]


def draw(runs: dict[str, dict[str, Any]]) -> Figure:
    """A picture a corpus: a curve a run, perplexity by position."""
    names = [n for n in CORPORA if any(n in results["corpora"] for results in runs.values())]
    names = names or list(CORPORA)
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(1.0 + 3.6 * columns, 0.8 + 2.7 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        for (run, results), colour in zip(runs.items(), COLOURS, strict=False):
            if name in results["corpora"]:
                found = results["corpora"][name]["by_position"]
                axes.plot(found["ends"], found["perplexity"], "o-", color=colour, ms=3, label=run)
            axes.axvline(results["trained"], color=BASELINE, ls="--", lw=1)
        axes.set_title(CORPORA[name].label)
        axes.set_xlim(0, None)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("position (tokens); dashed: length of training")
    figure.supylabel("perplexity")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def table(results: dict[str, Any]) -> Table:
    """A row for each corpus, a column for each length."""
    corpora = results["corpora"]
    lengths = sorted({int(n) for found in corpora.values() for n in found["lengths"]})
    rows = [
        [CORPORA[name].label, found["texts"]]
        + [found["lengths"].get(str(n), {}).get("perplexity") for n in lengths]
        for name, found in corpora.items()
    ]
    return Table("Perplexity by length", ("corpus", "texts", *map(str, lengths)), rows)
