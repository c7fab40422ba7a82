"""A run that is small enough to be tested, and what it leaves behind."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from ccq_jax import metrics
from ccq_jax.config import default
from ccq_jax.workdir import CHECKPOINTS, checkpoint_steps

TIMING = {"tokens_per_second", "mfu"}
MODEL = {"hidden_size": 32, "num_layers": 2, "head_dim": 8, "head_v_dim": 16}


def tiny_config(directory: Path, *, mixer: str = "gated_deltanet", **train: Any) -> ConfigDict:
    """Two layers on text that it writes into `directory`; `train` overrides `config.train`."""
    config = default(mixer, "tiny")
    config.model.update(MODEL | ({"head_v_dim": 8} if mixer == "attention" else {}))
    config.model.intermediate_size = 64
    config.model.ccq.enabled = mixer != "attention"
    config.data.source = f"text:{write_text(directory)}/*.txt"
    config.data.cache_dir = str(directory / "cache")
    config.data.validation_fraction = 0.2
    config.train.update({"steps": 8, "batch_size": 8, "seq_len": 32, "warmup_steps": 2})
    config.train.update({"log_every": 1} | train)
    config.eval.update({"every": 4, "batches": 2})
    config.checkpoint.update({"every": 4, "keep": 2})
    return config


def write_text(directory: Path) -> Path:
    """Files of words, the same every time."""
    path = directory / "text"
    if not path.exists():
        path.mkdir(parents=True)
        rng = np.random.default_rng(0)
        words = ["def", "return", "self", "x", "=", "1", "+", "(", ")", ":", "\n", "import", "for"]
        for i in range(20):
            (path / f"{i:02d}.txt").write_text(" ".join(rng.choice(words, size=300)))
    return path


def lines(workdir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without those that depend on the clock."""
    return [
        {name: value for name, value in line.items() if name not in TIMING}
        for line in metrics.read(workdir)
    ]


def saved(workdir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, the newest unless `step` says otherwise."""
    path = workdir / CHECKPOINTS / str(step or checkpoint_steps(workdir)[-1])
    with ocp.StandardCheckpointer() as reader:
        tree = {name: reader.restore(path / name) for name in ("params", "opt_state")}
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_same_run(workdir: Path, expected: Path) -> None:
    """Parameters, optimiser, metrics and kept checkpoints are the same, bit for bit."""
    assert lines(workdir) == lines(expected)
    assert checkpoint_names(workdir) == checkpoint_names(expected)
    assert_trees_equal(saved(workdir), saved(expected))


def assert_trees_equal(tree: Any, expected: Any) -> None:
    """Two trees of arrays are the same, bit for bit."""
    found, wanted = (dict(jax.tree_util.tree_leaves_with_path(t)) for t in (tree, expected))
    assert found.keys() == wanted.keys()
    for path, array in found.items():
        np.testing.assert_array_equal(array, wanted[path], err_msg=jax.tree_util.keystr(path))


def checkpoint_names(workdir: Path) -> list[str]:
    """Whatever lies in the directory of checkpoints."""
    return sorted(p.name for p in (workdir / CHECKPOINTS).iterdir())
