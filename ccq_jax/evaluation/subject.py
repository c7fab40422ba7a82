"""What is evaluated: a checkpoint of a run, or a folder in Hugging Face form, on one device or a mesh."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from ccq_jax import checkpoint, interop
from ccq_jax import workdir as workdirs
from ccq_jax.config import resolve_model
from ccq_jax.data import Tokenizer, make_tokenizer
from ccq_jax.model import LanguageModel
from ccq_jax.sharding import make_mesh, parameter_shardings
from ccq_jax.state import fingerprint
from ccq_jax.tensor_files import TensorFolder


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with what belongs to it.

    Attributes:
      name: for titles.
      model: its parameters lie on `mesh`, if there is one.
      config: of the run, with the `eval` that was asked for.
      step: of the checkpoint; None in a folder in Hugging Face form.
      mesh: the devices; None is one.
    """

    name: str
    model: LanguageModel
    config: ConfigDict
    step: int | None
    mesh: jax.sharding.Mesh | None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The one that the model was trained with."""
        return make_tokenizer(self.config.data.tokenizer)

    @functools.cached_property
    def identity(self) -> str:
        """Of the parameters and the configuration of the model."""
        return fingerprint(self.model.config.to_dict(), nnx.split(self.model)[1])

    @property
    def devices(self) -> int:
        """How many work together."""
        return 1 if self.mesh is None else self.mesh.size

    def on_devices(self) -> contextlib.AbstractContextManager:
        """Inside it, batches are spread over the mesh."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def mesh_of(config: ConfigDict) -> jax.sharding.Mesh | None:
    """The mesh that `config.mesh` asks for; None where that is one device.

    Raises:
      ValueError: there are not so many devices.
    """
    data, fsdp = config.mesh.data, config.mesh.fsdp
    devices = jax.devices() if min(data, fsdp) < 1 else jax.devices()[: data * fsdp]
    mesh = make_mesh(data, fsdp, devices)
    return None if mesh.size == 1 else mesh


def describe(source: str, config: ConfigDict) -> ConfigDict:
    """The configuration under which a checkpoint is evaluated, before it is loaded.

    Args:
      source: a run's workdir, or "hf:" and a folder.
      config: gives `eval`; for a folder, all that is not the model's or the tokenizer's.

    Raises:
      ValueError: there is no such checkpoint.
    """
    folder = interop.hf_folder(source)
    if folder is not None:
        found = ConfigDict(config.to_dict())
        try:
            found.model = resolve_model(interop.read_config(folder))
        except OSError as error:
            raise ValueError(f"checkpoint is {source!r}: {error}") from error
        found.model = _at_test_time(found.model, config.model)
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            found.data.tokenizer = str(folder.absolute())
        size = make_tokenizer(found.data.tokenizer).vocab_size
        if size > found.model.vocab_size:
            raise ValueError(
                f"the model in {folder} has {found.model.vocab_size} token ids, and the tokenizer "
                f"{found.data.tokenizer!r} has {size}: put the model's own tokenizer.json or "
                "tokenizer.model into the folder, or name it with --config.data.tokenizer"
            )
        return found
    path = Path(source).expanduser().absolute()
    before = workdirs.read_config(path)
    if before is None:
        raise workdirs.WorkdirError(
            f"{path} holds no run: train one with train.py --workdir={path}"
        )
    return ConfigDict({**before, "eval": config.eval.to_dict(), "mesh": config.mesh.to_dict()})


def load(source: str, config: ConfigDict, *, step: int | str = "latest") -> Subject:
    """Loads a checkpoint.

    Args:
      source: as for `describe`.
      config: its `eval` and `mesh` are used, and of `model` what may differ at test time:
        `implementation`, `chunk_size` and `ccq.fixed_lambda`.
      step: of a run: "latest", "best" or a step.

    Raises:
      ValueError: there is no such checkpoint, it is another model's, or its files are damaged.
    """
    mesh = mesh_of(config)
    folder = interop.hf_folder(source)
    if folder is not None:
        found = describe(source, config)
        return Subject(source, _load_hf(folder, found, mesh), found, None, mesh)
    run = checkpoint.load_model(source, step=step, model=config.model, mesh=mesh)
    found = ConfigDict({**run.config.to_dict(), "eval": config.eval.to_dict()})
    found.mesh = ConfigDict(config.mesh.to_dict())
    return Subject(f"{source}, step {run.step}", run.model, found, run.step, mesh)


def _load_hf(folder: Path, config: ConfigDict, mesh: Any) -> LanguageModel:
    abstract = nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    shardings = None
    if mesh is not None:
        placed = parameter_shardings(nnx.to_pure_dict(state), mesh)
        leaves = jax.tree_util.tree_leaves_with_path(placed)
        shardings = {".".join(str(key.key) for key in path): x for path, x in leaves}
    try:
        with TensorFolder(folder) as tensors:
            for path, array in interop.read_parameters(tensors, abstract.config, shapes):
                value = np.asarray(array, np.float32)
                placed = jax.device_put(value, shardings[path]) if shardings else jnp.asarray(value)
                flat[path].set_value(placed)
    except OSError as error:
        raise ValueError(f"checkpoint is {interop.HF + str(folder)!r}: {error}") from error
    return nnx.merge(graph, state)


def _at_test_time(model: ConfigDict, asked: ConfigDict) -> ConfigDict:
    """The model's section with the fields of `asked` that are no part of what was learned."""
    changed = ConfigDict(model.to_dict())
    changed.implementation, changed.chunk_size = asked.implementation, asked.chunk_size
    changed.ccq.fixed_lambda = asked.ccq.fixed_lambda
    return changed
