"""Evaluates a checkpoint part by part: results as JSON, tables, plots.

Written to WORKDIR/eval: for each part NAME.json, with the step, the configuration, the settings and the
versions that gave its figures, and what each figure is the mean of; NAME.csv; NAME.png; and tables.md
with the tables of all parts. cache/ keeps the results of each task as they come: an evaluation that
was interrupted goes on where it stopped, and what was measured is not measured again.
"""

import contextlib
import datetime
import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.console import Console

from ccq_jax.checkpoint import versions
from ccq_jax.config import default, validate
from ccq_jax.data import make_tokenizer
from ccq_jax.evaluation import subject as subjects
from ccq_jax.evaluation.benchmark_data import DataFolder, Found
from ccq_jax.evaluation.context import Context, Material, Request, Results, key_of, prefix
from ccq_jax.evaluation.parts import PARTS, Part, choose
from ccq_jax.evaluation.subject import Subject
from ccq_jax.interop import hf_folder
from ccq_jax.workdir import write_atomically

HINT = "A copy is what `hf download --repo-type dataset NAME --local-dir DATA_DIR/NAME` makes."
PACKAGES = ("lm_eval", "datasets", "scipy", "tokenizers", "sentencepiece", "wonderwords")


def evaluate(
    config: ConfigDict,
    workdir: str | Path = "",
    *,
    step: int | str = "latest",
    suite: Sequence[str] = ("run",),
    checkpoint: str = "",
    data_dir: str | Path | None = None,
    hub: bool = True,
    limit: int = 0,
    again: bool = False,
    beside: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Evaluates a checkpoint; returns the results of each part, as its JSON file holds them.

    Args:
      config: its `eval`, `mesh`, `model.implementation`, `model.chunk_size` and
        `model.ccq.fixed_lambda` are used. The rest of the model must be the run's; data and training
        are the run's.
      workdir: the run's directory; results go into its folder `eval`.
      step: "latest", "best" or the step of a checkpoint.
      suite: names in `parts.PARTS` and `parts.SUITES`.
      checkpoint: "hf:" and a folder in Hugging Face form, to be evaluated in place of a run; without
        a workdir, results go into that folder. Data and training are then those of `config`.
      data_dir: copies of the benchmarks' datasets, see `benchmark_data`.
      hub: whether datasets without a copy are fetched from the Hugging Face hub.
      limit: examples of a task that are used, at most; 0 is all.
      again: measure also what is known.
      beside: directories of other evaluated runs, that share the pictures.

    Raises:
      ValueError: an unknown part, a config that cannot be or is another model's, no checkpoint, or
        no data for any of the parts.
    """
    names = choose(suite)
    _check(config)
    if limit < 0:
        raise ValueError(f"limit is {limit}: it must be 0 (all examples) or more")
    source = checkpoint or str(workdir)
    if not source:
        raise ValueError("give a workdir, or a checkpoint as hf:FOLDER")
    if checkpoint and hf_folder(checkpoint) is None:
        raise ValueError(f"checkpoint is {checkpoint!r}: it must be hf: and a folder")
    request = Request(subjects.describe(source, config), DataFolder(data_dir, hub=hub), limit)
    prefix(make_tokenizer(request.config.data.tokenizer), config.eval.bos)  # there is such a token
    material = find_all(names, request)
    subject = subjects.load(source, config, step=step)
    folder = (hf_folder(str(workdir) or source) or Path(str(workdir)).expanduser()) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in material:
        found[name] = _run(name, subject, material[name], folder, limit=limit, again=again)
        _write(name, subject, found[name], folder, beside)
    return found


def _check(config: ConfigDict) -> None:
    """As `validate`, for what counts here: the data may be unsaid, which most parts do not need."""
    checked = ConfigDict(config.to_dict())
    checked.data = default().data
    validate(checked)


def find_all(names: Sequence[str], request: Request) -> dict[str, Material]:
    """What each part works on; parts that lack all of it are left out, with a message.

    Raises:
      ValueError: a part cannot work as it is asked to, or no part has anything to work on.
    """
    material = {}
    messages = []
    for name in names:
        found = PARTS[name].find(request)
        messages += [f"{name}, {message}" for message in found.missing]
        if found.tasks:
            material[name] = found
    if not material:
        raise ValueError("\n  ".join(["there are no data to evaluate on:", *messages, HINT]))
    console = Console(stderr=True, highlight=False)
    for message in messages:
        console.print(f"left out: {message}", markup=False, soft_wrap=True)
    if messages:
        console.print(HINT, markup=False, soft_wrap=True)
    return material


def _run(
    name: str, subject: Subject, material: Material, folder: Path, *, limit: int, again: bool
) -> dict[str, Any]:
    part = PARTS[name]
    settings = settings_of(part, subject.config) | {"limit": limit, "seed": subject.config.seed}
    key = key_of(name, subject.identity, subject.tokenizer.fingerprint, settings)
    cache = folder / "cache" / f"{name}.json"
    if again:
        cache.unlink(missing_ok=True)
    results = Results(cache, key)
    context = Context(subject, title=name, limit=limit, results=results)
    began = time.monotonic()
    figures = part.run(context, material)
    return {
        "step": subject.step,
        "checkpoint": subject.name,
        "parameters": subject.identity,
        "results": figures,
        "examples": results.examples,
        "missing": list(material.missing),
        "settings": settings | {"devices": subject.devices},
        "data": {
            task: {"dataset": str(x.dataset), "identity": x.identity}
            for task, x in material.tasks.items()
            if isinstance(x, Found)
        },
        "timing": results.timing,
        "seconds": round(time.monotonic() - began, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "versions": versions() | _versions(),
        "config": subject.config.to_dict(),
    }


def settings_of(part: Part, config: ConfigDict) -> dict[str, Any]:
    """The values of the fields that a part's results depend on."""
    values = {}
    for name in part.settings:
        value: Any = config
        for field in name.split("."):
            value = value[field]
        values[name] = value.to_dict() if isinstance(value, ConfigDict) else value
    return json.loads(json.dumps(values))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _write(
    name: str, subject: Subject, result: dict[str, Any], folder: Path, beside: Sequence[str]
) -> None:
    """The part's files, and its table on the terminal."""
    part = PARTS[name]
    if jax.process_index() != 0:
        return
    write_atomically(folder / f"{name}.json", json.dumps(result, indent=2) + "\n")
    table = part.table(result["results"])
    write_atomically(folder / f"{name}.csv", table.csv())
    if part.draw is not None:
        runs = {subject.name: result["results"]} | _others(name, beside)
        part.draw(runs, folder / f"{name}.png")
    write_atomically(folder / "tables.md", _tables(folder))
    Console(width=None if Console().is_terminal else 120).print(table.rich())


def _others(name: str, folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Results of other runs that were evaluated on the same part."""
    found = {}
    for folder in folders:
        path = Path(folder).expanduser() / "eval" / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            result = json.loads(path.read_text())
            found[result["checkpoint"]] = result["results"]
    return found


def _tables(folder: Path) -> str:
    """All parts' tables that lie in a folder."""
    texts = []
    for name, part in PARTS.items():
        with contextlib.suppress(FileNotFoundError):
            result: Mapping[str, Any] = json.loads((folder / f"{name}.json").read_text())
            if "settings" not in result:  # of an earlier version
                continue
            note = ", ".join(f"{what} {value}" for what, value in result["settings"].items())
            lines = [f"{result['checkpoint']}; {note}."]
            lines += [f"Left out: {message}" for message in result["missing"]]
            texts.append(
                part.table(result["results"]).markdown() + "\n" + "\n\n".join(lines) + "\n"
            )
    return "\n".join(texts)
