"""Starts a run from a trained model: `config.init_from`.

The backbone may come from elsewhere; where it has no CCQ and the run has, lambda's parameters are
new, and everything else is as loaded. With a `ccq.bias_init` far below 0, lambda begins near 0 and
training at the backbone's own loss.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree
from ml_collections import ConfigDict

from ccq_jax import interop
from ccq_jax import workdir as workdirs
from ccq_jax.checkpoint import Checkpoints, with_shardings
from ccq_jax.config import resolve_model
from ccq_jax.model import LanguageModel
from ccq_jax.sharding import path_name
from ccq_jax.tensor_files import TensorFolder

OWN = ("ccq", "dtype", "remat", "implementation", "chunk_size")
"""Fields of `config.model` that are the run's; the others are the backbone's."""
_FREE = ("bias_init", "fixed_lambda")  # of ccq: they are no part of trained parameters


def adopt(config: ConfigDict, workdir: Path) -> ConfigDict:
    """A copy of `config` with the model and the tokenizer of `config.init_from`.

    A run that has checkpoints goes on with what it adopted when it began: the backbone may be gone.

    Raises:
      ValueError: there is no such backbone, or it has a CCQ that is not the run's.
    """
    before = workdirs.read_config(workdir)
    if (
        before
        and before.get("init_from") == config.init_from
        and workdirs.checkpoint_steps(workdir)
    ):
        model, tokenizer = before["model"], before["data"]["tokenizer"]
    else:
        model, tokenizer = _describe(config.init_from)
        if model["ccq"]["enabled"]:
            _check_ccq(config.init_from, model["ccq"], config.model.ccq)
    config = ConfigDict(config.to_dict())
    own = {name: config.model[name] for name in OWN}
    config.model = ConfigDict(model)
    config.model.update(own)
    config.data.tokenizer = tokenizer or config.data.tokenizer
    return config.lock()


def _describe(source: str) -> tuple[dict[str, Any], str]:
    """The complete `config.model` of a backbone, and its tokenizer's name or ""."""
    folder = interop.hf_folder(source)
    if folder is not None:
        try:
            model = resolve_model(interop.read_config(folder)).to_dict()
        except OSError as error:
            raise ValueError(f"init_from is {source!r}: {error}") from error
        held = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
        found = [str(path.absolute()) for path in held if path.is_file()]
        return model, found[0] if found else ""
    run = workdirs.read_config(Path(source).expanduser())
    if run is None or not workdirs.checkpoint_steps(Path(source).expanduser()):
        raise ValueError(
            f"init_from is {source!r}: it must be the workdir of a run with a checkpoint, or hf: and "
            "a folder in Hugging Face form"
        )
    return run["model"], run["data"]["tokenizer"]


def _check_ccq(source: str, theirs: dict[str, Any], ours: ConfigDict) -> None:
    wrong = [
        f"  model.ccq.{name} is {ours[name]!r}: there it is {value!r}"
        for name, value in theirs.items()
        if name not in _FREE and ours[name] != value
    ]
    if wrong:
        raise ValueError(f"{source} has another CCQ:\n" + "\n".join(wrong))


def load_parameters(config: ConfigDict, params: PyTree[Array]) -> PyTree[Array]:
    """`params` with the backbone's values, placed as they are; what it lacks stays as it is.

    Args:
      config: as `adopt` returned it.
      params: a new model's parameters. From a folder in Hugging Face form they are read one by one.

    Raises:
      ValueError: the backbone's tensors do not fit, or its files are damaged.
    """
    flat = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    source = config.init_from
    folder = interop.hf_folder(source)
    if folder is not None:
        loaded = dict(_from_hf(folder, flat))
    else:
        loaded = _from_run(Path(source).expanduser().absolute(), flat)
    unknown = sorted(loaded.keys() - flat.keys())
    missing = sorted(name for name in flat.keys() - loaded.keys() if "/ccq/" not in name)
    if unknown or missing:
        raise ValueError(
            f"{source} does not fit: missing {', '.join(missing) or 'nothing'}; "
            f"unknown {', '.join(unknown) or 'nothing'}"
        )
    return jax.tree_util.tree_map_with_path(lambda p, x: loaded.get(path_name(p), x), params)


def _from_hf(folder: Path, flat: dict[str, Array]):
    backbone = nnx.eval_shape(lambda: LanguageModel(interop.read_config(folder), rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(backbone, nnx.Param))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in state}
    with TensorFolder(folder) as tensors:
        for path, array in interop.read_parameters(tensors, backbone.config, shapes):
            name = path.replace(".", "/")
            place = lambda index, array=array: np.asarray(array[index])
            yield name, jax.make_array_from_callback(array.shape, flat[name].sharding, place)


def _from_run(path: Path, flat: dict[str, Array]) -> dict[str, Array]:
    with Checkpoints(path, read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        config = ConfigDict(checkpoints.meta(step)["config"])
        model = nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
        abstract = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        place = lambda path, _: flat[path_name(path)].sharding
        shardings = jax.tree_util.tree_map_with_path(place, abstract)
        found = checkpoints.restore_params(step, with_shardings(abstract, shardings))
    return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(found)}


def change_of_logits(
    config: ConfigDict, params: PyTree[Array], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """The largest difference that CCQ makes to a logit, as its parameters stand."""
    without = ConfigDict(config.model.to_dict())
    without.ccq.fixed_lambda = 0.0
    graphs = [
        nnx.split(nnx.eval_shape(lambda m=m: LanguageModel(m, rngs=nnx.Rngs(0))))[0]
        for m in (config.model, without)
    ]

    @jax.jit
    def change(params: PyTree[Array], tokens: Array) -> Array:
        a, b = (nnx.merge(graph, params)(tokens) for graph in graphs)
        return jnp.max(jnp.abs(a - b))

    return change(params, tokens)
