"""The directory of a run: what lies in it, who may write to it, which configs it continues.

config.json      the resolved configuration, as of the last start
metrics.jsonl    one object a line: step, loss, ...
checkpoints/     one directory a step
tensorboard/  plots/  eval/  profile/
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

CONFIG, LOCK, CHECKPOINTS = "config.json", ".lock", "checkpoints"

# What a run may change when it continues. None of it changes what is learned, except that the
# learning rate follows the cosine of the new `train.steps` from there on.
CHANGEABLE = (
    r"train\.(steps|log_every|accumulation|loss_chunk)",
    r"data\.(workers|prefetch|cache_dir)",
    r"model\.(remat|implementation|chunk_size)",
    r"(checkpoint|eval|mesh)\..*",
)


class WorkdirError(ValueError):
    """This directory cannot take this run; nothing in it was changed."""


@contextlib.contextmanager
def open_run(workdir: str | os.PathLike, config: ConfigDict) -> Iterator[Path]:
    """Claims `workdir` for a run of the resolved `config`, and writes its config.json.

    The first process of a run holds the claim; the others only check.

    Raises:
      WorkdirError: the directory holds something else, or a run of another configuration, or
        another process is training in it.
    """
    path = Path(workdir).expanduser().absolute()
    check(path, config)
    if jax.process_index() != 0:
        yield path
        return
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # falls with the process, even at -9
        except BlockingIOError:
            raise WorkdirError(f"another process is training in {path}") from None
        write_atomically(path / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
        yield path


def check(path: Path, config: ConfigDict) -> None:
    """Raises WorkdirError unless a run of `config` can start or continue in `path`."""
    if not path.exists():
        return
    if not path.is_dir():
        raise WorkdirError(f"workdir {path} is a file: name a directory")
    before = read_config(path)
    if before is None:
        strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith(LOCK))
        if strangers:
            raise WorkdirError(
                f"workdir {path} holds something that is not a run of this program "
                f"({', '.join(strangers[:4])}): name an empty or a new directory"
            )
        return
    saved = checkpoint_steps(path)
    if not saved:
        return
    after = json.loads(json.dumps(config.to_dict()))
    if different := changes(before, after, CHANGEABLE):
        raise WorkdirError(
            f"{path} holds a run with another configuration. Set these back, or name a new "
            "workdir:\n" + "\n".join(f"  {line}" for line in different)
        )
    if config.train.steps < saved[-1]:
        raise WorkdirError(
            f"train.steps is {config.train.steps}, and the run in {path} is at step {saved[-1]} "
            "already: it must be at least that"
        )


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration of the run in `path`; None where there is no run."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    ours = isinstance(config, dict) and {"seed", "model", "data", "train"} <= config.keys()
    return config if ours else None


def checkpoint_steps(path: Path) -> list[int]:
    """Steps of the finished checkpoints in `path`, in order."""
    directory = path / CHECKPOINTS
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader sees the old text or the new, whenever we are killed."""
    temporary = path.with_name(f"{LOCK}-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def changes(
    before: dict[str, Any], after: dict[str, Any], changeable: Sequence[str] = ()
) -> list[str]:
    """A line for each field that differs and whose name matches no pattern of `changeable`."""
    old, new = _flatten(before), _flatten(after)
    return [
        f"{field}: was {old.get(field, 'absent')!r}, now {new.get(field, 'absent')!r}"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field)
        and not any(re.fullmatch(pattern, field) for pattern in changeable)
    ]


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
