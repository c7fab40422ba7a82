"""Parameters without their run: read out of checkpoints one by one, averaged, kept in a folder.

A folder of parameters holds `model.json`, the model's configuration, and `params`, an Orbax tree
with the model's own names.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

from ccq_jax import workdir as workdirs
from ccq_jax.checkpoint import Checkpoints, with_shardings
from ccq_jax.model import LanguageModel
from ccq_jax.sharding import make_mesh, parameter_shardings

CONFIG, PARAMS, FORMAT = "model.json", "params", "ccq_jax parameters 1"
WEIGHTS = ("params", "ema")


class RunParameters:
    """A run's parameters: of one checkpoint, or the mean over several.

    Args:
      workdir: the run's directory.
      step: "latest", "best" (lowest validation loss) or a step.
      average: the mean over this checkpoint and the newest ones before it, so many in all.
      weights: "params", or "ema": the running average that the run kept (`train.ema`).

    Attributes:
      config: the configuration of the checkpoint.
      steps: the checkpoints that are averaged, the newest first.
      shapes: of the parameters, by their dotted paths.

    Raises:
      WorkdirError: there is no such run, no such checkpoint, or it keeps no running average.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        step: int | str = "latest",
        average: int = 1,
        weights: str = "params",
    ):
        self.path = Path(workdir).expanduser().absolute()
        if weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}: it must be one of {', '.join(WEIGHTS)}")
        self.weights = weights
        with Checkpoints.of_run(self.path) as checkpoints:
            newest = checkpoints.find(step)
            self.config = ConfigDict(checkpoints.meta(newest)["config"]).lock()
            before = [s for s in checkpoints.steps() if s <= newest]
        if not 1 <= average <= len(before):
            raise workdirs.WorkdirError(
                f"average is {average}: the run in {self.path} has {len(before)} checkpoints up to "
                f"step {newest}, so it must be from 1 to {len(before)}"
            )
        self.steps = before[: -average - 1 : -1]
        if weights == "ema" and not self.config.train.ema:
            raise workdirs.WorkdirError(f"the run in {self.path} has no train.ema to export")
        self.abstract = abstract_parameters(self.config.model)
        flat = jax.tree_util.tree_leaves_with_path(self.abstract)
        self.shapes = {_dotted(path): leaf.shape for path, leaf in flat}
        self._reader = ocp.PyTreeCheckpointer()

    def read(self, path: str) -> np.ndarray:
        """One parameter, float32, in this host's memory; nothing else is read."""
        values = (self._read(step, path) for step in self.steps)
        if len(self.steps) == 1:
            return next(values)
        total = functools.reduce(np.add, (x.astype(np.float64) for x in values))
        return (total / len(self.steps)).astype(np.float32)

    def _read(self, step: int, path: str) -> np.ndarray:
        item: Any = jax.ShapeDtypeStruct(self.shapes[path], np.float32)
        kind: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for name in reversed(path.split(".")):
            item, kind = {name: item}, {name: kind}
        args = ocp.args.PyTreeRestore(item=item, restore_args=kind, partial_restore=True)
        (value,) = jax.tree.leaves(self._reader.restore(self._directory(step), args=args))
        return np.asarray(value)

    def load(self, *, sharded: bool = False) -> PyTree[Array]:
        """All parameters, on the first device, or spread over all devices."""
        if sharded:
            shardings = parameter_shardings(self.abstract, make_mesh(1, -1))
        else:
            here = SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: here, self.abstract)
        like = with_shardings(self.abstract, shardings)
        restore: Callable[[int], PyTree[Array]] = lambda step: restore_tree(
            self._directory(step), like
        )
        total = restore(self.steps[0])
        for step in self.steps[1:]:
            total = jax.tree.map(jnp.add, total, restore(step))
        return jax.tree.map(lambda x: x / len(self.steps), total) if self.steps[1:] else total

    def _directory(self, step: int) -> Path:
        return self.path / workdirs.CHECKPOINTS / str(step) / self.weights


def abstract_parameters(config: ConfigDict) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes of a model's parameters; `config` is the complete `config.model`."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def model_of(config: ConfigDict, params: PyTree[Array]) -> LanguageModel:
    """The model with these parameters."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)


def restore_tree(path: Path, like: PyTree[jax.ShapeDtypeStruct]) -> PyTree[Array]:
    """An Orbax tree of these shapes, dtypes and shardings."""
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(path, like)


def save_parameters(directory: Path, config: ConfigDict, params: PyTree[Array], dtype: str) -> None:
    """Writes a folder of parameters, of dtype "float32" or "bfloat16"."""
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as writer:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        writer.save(directory.absolute() / PARAMS, params)
    contents = {"format": FORMAT, "dtype": dtype, "model": config.to_dict()}
    (directory / CONFIG).write_text(json.dumps(contents, indent=2) + "\n")


def load_parameters(directory: str | Path) -> LanguageModel:
    """The model of a folder of parameters, which become float32.

    Raises:
      ValueError: model.json is none, or the tree is damaged or another model's.
    """
    path = Path(directory).absolute()
    contents = read_json(path / CONFIG, FORMAT)
    config = ConfigDict(contents["model"])
    here = SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, contents["dtype"], sharding=here),
        abstract_parameters(config),
    )
    try:
        params = restore_tree(path / PARAMS, like)
    except (KeyError, OSError) as error:
        raise ValueError(f"{path / PARAMS} cannot be read: {error}") from error
    return model_of(config, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def read_json(path: Path, form: str) -> dict[str, Any]:
    """The object in a file whose field "format" is `form`; ValueError for any other."""
    try:
        contents = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != form:
        raise ValueError(f"{path} is not of the format {form!r}")
    return contents


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
