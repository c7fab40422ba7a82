"""What a run writes down as it goes: metrics.jsonl, and the same for TensorBoard."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from ccq_jax.workdir import write_atomically

FILE = "metrics.jsonl"

Line = dict[str, Any]  # step, and numbers or lists [L][H] by name


class MetricsWriter:
    """Appends to the metrics of a run that continues from `step`; what is beyond is forgotten.

    A killed run has written lines of steps that will be computed again. They are cut off first, so
    that the file has each step once. Only the first process of several writes. A context manager.
    """

    def __init__(self, workdir: Path, step: int):
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        path = workdir / FILE
        kept = [line for line in read(workdir) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        if self._writes:
            self._file.close()
            self._board.close()

    def write(self, line: Line) -> None:
        """Adds one step's line. It is the operating system's when this returns."""
        if not self._writes:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name == "step":
                continue
            if np.ndim(value) == 0:
                self._board.add_scalar(name, value, line["step"])
            else:
                for layer, heads in enumerate(value):
                    tag = f"{name}/layer_{layer:02d}"
                    self._board.add_scalar(tag, float(np.mean(heads)), line["step"])


def read(workdir: Path) -> list[Line]:
    """The lines of metrics.jsonl; one that a kill left incomplete is passed over."""
    path = workdir / FILE
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def series(lines: list[Line], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps on which `name` was written, and its values [n, ...]."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    steps = np.array([step for step, _ in found])
    return steps, np.array([value for _, value in found], dtype=float)
