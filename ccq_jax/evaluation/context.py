"""What a part of an evaluation is given to work with, and how its results are kept as they come."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import track

from ccq_jax.data import Tokenizer
from ccq_jax.evaluation.benchmark_data import DataFolder, Dataset, Found
from ccq_jax.evaluation.subject import Subject
from ccq_jax.generator import Generator
from ccq_jax.sampling import Sampling
from ccq_jax.workdir import write_atomically

GREEDY = Sampling(temperature=0)
ROW = 1024
"""Tokens of a row that counts as one in `eval.batch_size`."""


class Measured(NamedTuple):
    """Figures, and what they are means of.

    Attributes:
      figures: what JSON holds.
      examples: for figures by path, such as "acc": {"values": [...], "weights": [...]}, whose
        weighted mean they are.
    """

    figures: dict[str, Any]
    examples: dict[str, dict[str, list[float]]] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, before a model is loaded.

    Attributes:
      config: the run's, with the `eval` that was asked for.
      data: where the benchmarks' examples lie.
      limit: examples of a task that are used, at most; 0 is all.
    """

    config: ConfigDict
    data: DataFolder
    limit: int = 0

    def find(self, wanted: dict[str, Dataset]) -> "Material":
        """Where each of the datasets is, and what is to be said of those that are nowhere."""
        found: dict[str, Any] = {}
        missing = []
        for name, dataset in wanted.items():
            try:
                place = self.data.find(dataset)
                place.rows(limit=1)  # whether it can be read at all
                found[name] = place
            except ValueError as error:
                missing.append(f"{name}: {error}")
        return Material(found, missing)


class Material(NamedTuple):
    """What a part has to work on, by task, and a message for each task that lacks its data."""

    tasks: dict[str, Any]
    missing: Sequence[str] = ()


class Results:
    """A part's results as they come, in a file, so that what was measured is not measured again.

    Args:
      path: of the file; None is none.
      key: what all results depend on; results under another key are forgotten.
    """

    def __init__(self, path: Path | None = None, key: str = ""):
        self._path, self._key = path, key
        self._tasks: dict[str, dict[str, Any]] = {}
        self.timing: dict[str, dict[str, float]] = {}
        self.examples: dict[str, Any] = {}
        if path is None:
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
            before = json.loads(path.read_text())
            self._tasks = before["tasks"] if before["key"] == key else {}

    def get(self, name: str, identity: str) -> dict[str, Any] | None:
        """The figures of a task, if they are known for the same data."""
        task = self._tasks.get(name)
        if task is None or task["identity"] != identity:
            return None
        self._include(name, task)
        return task["figures"]

    def put(
        self, name: str, identity: str, measured: Measured, timing: dict[str, float]
    ) -> dict[str, Any]:
        """Keeps the figures of a task, and returns them as JSON does."""
        task = json.loads(
            json.dumps({"identity": identity, "timing": timing, **measured._asdict()})
        )
        self._tasks[name] = task
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"key": self._key, "tasks": self._tasks})
            write_atomically(self._path, text + "\n")
        self._include(name, task)
        return task["figures"]

    def _include(self, name: str, task: dict[str, Any]) -> None:
        self.timing[name] = task["timing"]
        for path, values in (task["examples"] or {}).items():
            self.examples["/".join(filter(None, (name, path)))] = values


class Context:
    """A loaded model and what surrounds it.

    Args:
      subject: the model.
      title: for the progress that is shown.
      limit: as in `Request`.
      results: of the part that works with this context; None keeps them in no file.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        title: str,
        limit: int = 0,
        results: Results | None = None,
    ):
        self.subject, self.limit, self.results = subject, limit, results or Results()
        self.config: ConfigDict = subject.config
        self.model = subject.model
        self.tokenizer: Tokenizer = subject.tokenizer
        self._title = title
        self._console = Console(stderr=True, highlight=False, quiet=jax.process_index() != 0)
        self._generator: Generator | None = None
        self._speed: dict[str, float] = {}

    @property
    def settings(self) -> ConfigDict:
        """`config.eval`."""
        return self.config.eval

    def once(
        self, name: str, measure: Callable[[], Measured], identity: str = ""
    ) -> dict[str, Any]:
        """The figures of a task: those of an earlier call with the same data, or measured now."""
        known = self.results.get(name, identity)
        if known is not None:
            self._say(f"{self._title} {name}: known")
            return known
        began, self._speed = time.monotonic(), {}
        measured = measure()
        seconds = round(time.monotonic() - began, 2)
        self._say(f"{self._title} {name}: {seconds:.1f} s")
        return self.results.put(name, identity, measured, {"seconds": seconds} | self._rates())

    def examples(self, found: Found) -> list[dict[str, Any]]:
        """The examples of a dataset that are used."""
        return found.rows(self.limit)

    def encode(self, text: str) -> list[int]:
        """Token ids with what `eval.bos` puts in front of a text."""
        return prefix(self.tokenizer, self.settings.bos) + self.tokenizer.encode(text)

    def rows(self, tokens: int) -> int:
        """How many rows of so many tokens are worked on together."""
        share = max(1, self.settings.batch_size * ROW // max(1, min(tokens, ROW)))
        return share * self.subject.devices

    def track(self, items: Iterable, what: str = "", total: int | None = None) -> Iterator:
        """The items, with a bar on a terminal."""
        return iter(
            track(
                items,
                f"{self._title} {what}",
                total=total,
                console=self._console,
                transient=True,
                disable=not self._console.is_terminal,
            )
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, stop: Sequence[str] = (),
        sampling: Sampling = GREEDY,
    ) -> list[str]:  # fmt: skip
        """Continues prompts of any lengths, those of similar length together."""
        if self._generator is None:
            self._generator = Generator(self.model, self.tokenizer)
        size = self.rows(ROW)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        texts: dict[int, str] = {}
        for batch in self.track(batches, "texts"):
            filled = [prompts[i] for i in batch] + [prompts[batch[0]]] * (size - len(batch))
            with self.subject.on_devices():
                made = self._generator.generate(
                    filled, max_tokens=max_tokens, stop=stop, sampling=sampling
                )
            texts |= dict(zip(batch, made.texts, strict=False))
            for field, value in (
                ("prompt_tokens", sum(len(prompts[i]) for i in batch)),
                ("output_tokens", sum(map(len, made.tokens[: len(batch)]))),
                ("prompt_seconds", made.prompt_seconds),
                ("output_seconds", made.output_seconds),
            ):
                self._speed[field] = self._speed.get(field, 0) + value
        return [texts[i] for i in range(len(prompts))]

    def _rates(self) -> dict[str, float]:
        """Tokens of prompts and of output that were read and made in a second."""
        return {
            f"{kind}_tokens_per_second": round(
                self._speed[f"{kind}_tokens"] / max(self._speed[f"{kind}_seconds"], 1e-9), 1
            )
            for kind in ("prompt", "output")
            if f"{kind}_tokens" in self._speed
        }

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def prefix(tokenizer: Tokenizer, bos: str) -> list[int]:
    """The tokens in front of a text.

    Args:
      tokenizer: the model's.
      bos: "none", "bos" (the tokenizer's, which it must have) or "eos" (end of document).

    Raises:
      ValueError: there is no such token.
    """
    if bos == "bos" and tokenizer.bos_id is None:
        raise ValueError(f"eval.bos is 'bos', and the tokenizer {tokenizer.name!r} has no such id")
    tokens = {"none": None, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    if bos not in tokens:
        raise ValueError(f"eval.bos is {bos!r}: it must be one of {', '.join(tokens)}")
    token = tokens[bos]
    return [] if token is None else [token]


def key_of(*parts: Any) -> str:
    """A hash of what JSON can hold."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
