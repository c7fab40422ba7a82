"""Checkpoints in Hugging Face form, with the names that flash-linear-attention gives them.

A folder holds `config.json` and `model.safetensors`. What CCQ adds to a backbone's checkpoint is an
object `"ccq"` in config.json and, in each layer, `attn.lambda_proj.weight` [H, K] and `.bias` [H].
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict, FrozenConfigDict
from safetensors.flax import load_file
from safetensors.numpy import save_file

from ccq_jax.hf_config import config_from_hf, config_to_hf
from ccq_jax.model import LanguageModel


def load_hf(directory: str | Path, *, dtype: str | None = None) -> LanguageModel:
    """A model from a folder in Hugging Face form.

    Args:
      directory: holds config.json and model.safetensors.
      dtype: of compute, "float32" or "bfloat16"; None is what config.json says, or float32.

    Raises:
      ValueError: config.json asks for something that these models do not have, or the tensors are
        not exactly the model's: every missing, unknown or misshapen one is listed.
      FileNotFoundError: there is no such file.
    """
    directory = Path(directory)
    config = config_from_hf(json.loads((directory / "config.json").read_text()))
    if dtype is not None:
        config.dtype = dtype
    path = directory / "model.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a single-file checkpoint is expected")
    return model_from_tensors(config, load_file(path))


def save_hf(model: LanguageModel, directory: str | Path) -> None:
    """Writes config.json and model.safetensors, float32, into a folder that need not exist.

    Raises:
      ValueError: flash-linear-attention has no field for a value of the model's configuration.
    """
    directory = Path(directory)
    config = config_to_hf(model.config)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model_to_tensors(model), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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


def model_from_tensors(config: ConfigDict, values: dict[str, Any]) -> LanguageModel:
    """A model whose parameters are the tensors of a file."""
    abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = {_name(path): leaf for path, leaf in nnx.to_flat_state(state)}
    table = dict(tensors(abstract.config))
    _check_tensors(table, flat, values)
    parts: dict[str, list[np.ndarray]] = {}
    for name, (path, _, kind) in table.items():  # in the order of the layers
        parts.setdefault(path, []).append(_from_file(values[name], kind))
    stacked = {tensor.path for tensor in table.values() if tensor.layer is not None}
    for path, arrays in parts.items():
        flat[path].set_value(jnp.asarray(np.stack(arrays) if path in stacked else arrays[0]))
    return nnx.merge(graph, state)


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


def _check_tensors(table: dict[str, Tensor], flat: dict[str, Any], values: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in sorted(set(table) - set(values))]
    problems += [f"{name} is unknown" for name in sorted(set(values) - set(table))]
    for name in sorted(set(table) & set(values)):
        path, layer, kind = table[name]
        shape = flat[path].shape if layer is None else flat[path].shape[1:]
        want = _to_file(np.broadcast_to(np.float32(0), shape), kind).shape
        if values[name].shape != want:
            problems.append(f"{name} has shape {values[name].shape}: it must be {want}")
    if problems:
        raise ValueError("the tensors do not fit the model:\n  " + "\n  ".join(problems))


def _from_file(x: Any, kind: str) -> np.ndarray:
    x = np.asarray(x).astype(np.float32)
    if kind == "conv":  # [C, 1, W] -> [W, C]
        return x[:, 0].T
    return x.T if kind == "transposed" else x


def _to_file(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "conv":
        return np.ascontiguousarray(x.T[:, None])
    return np.ascontiguousarray(x.T) if kind == "transposed" else x
