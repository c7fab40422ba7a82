"""Checkpoints in Hugging Face form, with the names that flash-linear-attention gives them.

A folder holds `config.json` and `model.safetensors`, or several files with an index. What CCQ adds
to a backbone's checkpoint is an object `"ccq"` in config.json and, in each layer,
`attn.lambda_proj.weight` [H, K] and `.bias` [H].
"""

import itertools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict, FrozenConfigDict

from ccq_jax.hf_config import config_from_hf, config_to_hf
from ccq_jax.model import LanguageModel
from ccq_jax.tensor_files import DTYPES, SHARD_BYTES, Planned, TensorFolder, write_tensors

HF = "hf:"
"""In front of a folder in Hugging Face form, where a run's workdir may stand as well."""


def hf_folder(source: str) -> Path | None:
    """The folder that "hf:FOLDER" names; None for anything else, such as a run's workdir."""
    return Path(source.removeprefix(HF)).expanduser() if source.startswith(HF) else None


def load_hf(directory: str | Path, *, dtype: str | None = None) -> LanguageModel:
    """A model from a folder in Hugging Face form.

    The parameters are float32, whatever the files hold (float32, bfloat16 or float16).

    Args:
      directory: holds config.json and model.safetensors, or several files and their index.
      dtype: of compute, "float32" or "bfloat16"; None is what config.json says, or float32.

    Raises:
      ValueError: config.json asks for something that these models do not have, a file is damaged
        or is no safetensors, or the tensors are not exactly the model's: every missing, unknown or
        misshapen one, and every one of another dtype, is listed.
      FileNotFoundError: there is no such file.
    """
    config = read_config(directory)
    if dtype is not None:
        config.dtype = dtype
    abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = {_name(path): leaf for path, leaf in nnx.to_flat_state(state)}
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    with TensorFolder(directory) as folder:
        for path, array in read_parameters(folder, abstract.config, shapes):
            flat[path].set_value(jnp.asarray(array))
    return nnx.merge(graph, state)


def save_hf(
    model: LanguageModel,
    directory: str | Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and model.safetensors into a folder that need not exist.

    Args:
      model: the model.
      directory: what an earlier `save_hf` left in it is replaced.
      dtype: of the tensors: "float32", which loses nothing, or "bfloat16".
      shard_bytes: beyond this there are several files, with an index.

    Raises:
      ValueError: flash-linear-attention has no field for a value of the model's configuration.
    """
    flat = {_name(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    read = lambda path: np.asarray(flat[path][...])
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    write_hf(model.config, shapes, read, directory, dtype=dtype, shard_bytes=shard_bytes)


def read_config(directory: str | Path) -> ConfigDict:
    """The model's section of a configuration, from a folder's config.json; raises as `load_hf`."""
    path = Path(directory) / "config.json"
    try:
        hf = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(hf, dict):
        raise ValueError(f"{path} holds {type(hf).__name__}: it must hold an object")
    try:
        return config_from_hf(hf)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} has a value of a wrong type or size: {error}") from error


def write_hf(
    config: FrozenConfigDict,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    directory: str | Path,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    extra: dict[str, Any] | None = None,
) -> None:
    """As `save_hf`, from parameters that are read one by one, by path, with `read`.

    `extra` are more fields of config.json.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}: it must be float32 or bfloat16")
    directory = Path(directory)
    hf = config_to_hf(config) | (extra or {})
    if dtype == "bfloat16":
        hf["dtype"] = dtype
    directory.mkdir(parents=True, exist_ok=True)
    table = sorted(tensors(config), key=lambda item: item[1].path)  # stable: layers in order
    plan = [Planned(name, _shape_in_file(tensor, shapes)) for name, tensor in table]

    def arrays() -> Iterator[np.ndarray]:
        for path, group in itertools.groupby((t for _, t in table), operator.attrgetter("path")):
            array = read(path)
            for _, layer, kind in group:
                yield _to_file(array if layer is None else array[layer], kind)
            del array  # before the next is read

    write_tensors(directory, plan, arrays(), dtype=dtype, shard_bytes=shard_bytes)
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


class Tensor(NamedTuple):
    """Where a tensor of the file belongs in the model."""

    path: str  # of the parameter, as in "layers.mixer.q_proj.kernel"
    layer: int | None  # its index in a parameter that is stacked over layers
    kind: str  # "same", "transposed" or "conv"


def tensors(config: FrozenConfigDict) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's file, by name."""
    yield "model.embeddings.weight", Tensor("embed.embedding", None, "same")
    yield "model.norm.weight", Tensor("norm.scale", None, "same")
    if not config.tie_embeddings:
        yield "lm_head.weight", Tensor("lm_head.kernel", None, "transposed")
    for layer in range(config.num_layers):
        for name, path, kind in _layer_tensors(config):
            yield f"model.layers.{layer}.{name}", Tensor(f"layers.{path}", layer, kind)


def _layer_tensors(config: FrozenConfigDict) -> Iterator[tuple[str, str, str]]:
    yield "attn_norm.weight", "mixer_norm.scale", "same"
    yield "mlp_norm.weight", "mlp_norm.scale", "same"
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"mlp.{name}.weight", f"mlp.{name}.kernel", "transposed"
    linear = {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    same: dict[str, str] = {}
    if config.mixer == "gated_deltanet":
        linear |= {"a_proj": "a_proj", "b_proj": "b_proj"}
        same = {"A_log": "A_log", "dt_bias": "dt_bias", "o_norm.weight": "o_norm.scale"}
    elif config.mixer == "gla":
        linear |= {"gk_proj.0": "decay_down", "gk_proj.1": "decay_up"}
        norm = "g_norm_swish_gate" if config.use_gate else "g_norm"
        same = {"gk_proj.1.bias": "decay_up.bias", f"{norm}.weight": "o_norm.scale"}
    if config.mixer != "attention" and config.use_gate:
        linear["g_proj"] = "g_proj"
    if config.ccq.enabled:
        same |= {f"lambda_proj.{a}": f"ccq.lambda_proj.{b}" for a, b in _LAMBDA.items()}
    for name, path in linear.items():
        yield f"attn.{name}.weight", f"mixer.{path}.kernel", "transposed"
    for name, path in same.items():
        yield f"attn.{name}", f"mixer.{path}", "same"
    if config.conv_size:
        for x in "qkv":
            yield f"attn.{x}_conv1d.weight", f"mixer.{x}_conv.kernel", "conv"


_LAMBDA = {"weight": "kernel", "bias": "bias"}


def read_parameters(
    folder: TensorFolder, config: FrozenConfigDict, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter's path and value, float32, one at a time, once all tensors are found to fit.

    Args:
      folder: where the tensors are.
      config: the complete `config.model`.
      shapes: of the parameters, by path.
    """
    if config.num_layers > len(folder.entries):  # a table of so many layers may not be buildable
        raise ValueError(
            f"num_hidden_layers is {config.num_layers}: the files hold {len(folder.entries)} tensors"
        )
    table = dict(tensors(config))
    files = _file_names(folder, config)
    _check_tensors(table, shapes, folder, files)
    paths: dict[str, list[str]] = {}
    for name, tensor in table.items():  # in the order of the layers
        paths.setdefault(tensor.path, []).append(name)
    for path, names in paths.items():
        parts = [_from_file(folder.read(files[name]), table[name].kind) for name in names]
        yield path, parts[0] if table[names[0]].layer is None else np.stack(parts)


def model_to_tensors(model: LanguageModel) -> dict[str, np.ndarray]:
    """The tensors of a file, from a model's parameters."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    flat = {_name(path): np.asarray(leaf[...]) for path, leaf in state}
    out = {}
    for name, (path, layer, kind) in tensors(model.config):
        out[name] = _to_file(flat[path] if layer is None else flat[path][layer], kind)
    return out


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _file_names(folder: TensorFolder, config: FrozenConfigDict) -> dict[str, str]:
    """The name in the files of each of our names, without what may lie there and is not used.

    That is `D`, which early Gated DeltaNets carry and never use, and a tied model's head where it
    is the embedding once more. GLA's norm has another name where it is not fused with the gate.
    """
    files = {name: name for name in folder.entries}
    for name in folder.entries:
        prefix, _, last = name.rpartition(".")
        if config.mixer == "gated_deltanet" and last == "D" and prefix.endswith(".attn"):
            del files[name]
        elif config.mixer == "gla" and config.use_gate and name.endswith(".attn.g_norm.weight"):
            files[name.replace("g_norm", "g_norm_swish_gate")] = files.pop(name)
    head, embedding = "lm_head.weight", "model.embeddings.weight"
    if config.tie_embeddings and head in files and embedding in files:
        a, b = folder.read(head), folder.read(embedding)
        if a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True):
            del files[head]
    return files


def _check_tensors(
    table: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    folder: TensorFolder,
    files: dict[str, str],
) -> None:
    problems = [f"{name} is missing" for name in sorted(set(table) - set(files))]
    problems += [f"{name} is unknown" for name in sorted(set(files) - set(table))]
    for name in sorted(set(table) & set(files)):
        _, dtype, shape = folder.entries[files[name]]
        want = _shape_in_file(table[name], shapes)
        if shape != want:
            problems.append(f"{name} has shape {shape}: it must be {want}")
        if dtype not in DTYPES:
            problems.append(f"{name} is {dtype}: it must be one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("the tensors do not fit the model:\n  " + "\n  ".join(problems))


def _shape_in_file(tensor: Tensor, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    shape = shapes[tensor.path] if tensor.layer is None else shapes[tensor.path][1:]
    if tensor.kind == "conv":
        return shape[1], 1, shape[0]
    return shape[::-1] if tensor.kind == "transposed" else shape


def _from_file(x: Any, kind: str) -> np.ndarray:
    x = np.asarray(x).astype(np.float32)
    if kind == "conv":  # [C, 1, W] -> [W, C]
        return x[:, 0].T
    return x.T if kind == "transposed" else x


def _to_file(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "conv":
        return np.ascontiguousarray(x.T[:, None])
    return np.ascontiguousarray(x.T) if kind == "transposed" else x
