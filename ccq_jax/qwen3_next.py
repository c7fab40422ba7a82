"""Gated DeltaNet mixers out of Qwen3-Next checkpoints, layer by layer.

Qwen3-Next fuses what our mixer keeps apart. Its in_proj_qkvz gives, for one key head after another,
the head's query, its key, the values of its value heads, and their gates; in_proj_ba their beta and
decay inputs; conv1d runs over all queries, all keys, all values. The whole model (attention in every
fourth layer, experts) is not imported.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict, FrozenConfigDict

from ccq_jax.config import default, resolve_model
from ccq_jax.mixers import GatedDeltaNet
from ccq_jax.tensor_files import DTYPES, TensorFolder

_FIELDS = (
    "hidden_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def load_mixer(
    directory: str | Path, layer: int, *, dtype: str = "float32", ccq: ConfigDict | None = None
) -> GatedDeltaNet:
    """The Gated DeltaNet mixer of a layer of a Qwen3-Next checkpoint.

    Only that layer's tensors are read. The parameters are float32.

    Args:
      directory: holds config.json and safetensors.
      layer: counted from 0; one of "linear_attention".
      dtype: of compute, "float32" or "bfloat16".
      ccq: options as in `config.model.ccq`, to attach CCQ; lambda's parameters are new.

    Raises:
      ValueError: another model's checkpoint, a layer of attention, damaged files, or tensors that do
        not fit; every missing, unknown or misshapen one is listed.
      FileNotFoundError: there is no such file.
    """
    config = FrozenConfigDict(_config(Path(directory), layer, dtype, ccq))
    prefix = f"model.layers.{layer}.linear_attn."
    with TensorFolder(directory) as folder:
        _check(config, folder, prefix)
        found = {
            name: np.asarray(folder.read(prefix + name), np.float32) for name in _shapes(config)
        }
    mixer = GatedDeltaNet(config, rngs=nnx.Rngs(0))
    for path, value in _take_apart(config, found).items():
        module, _, leaf = path.rpartition(".")
        owner = getattr(mixer, module) if module else mixer
        getattr(owner, leaf).set_value(jnp.asarray(value))
    return mixer


def _config(folder: Path, layer: int, dtype: str, ccq: ConfigDict | None) -> ConfigDict:
    hf = json.loads((folder / "config.json").read_bytes())
    hf = hf.get("text_config", hf)
    if hf.get("model_type") not in ("qwen3_next", "qwen3_next_text"):
        raise ValueError(f"model_type is {hf.get('model_type')!r}: it must be qwen3_next")
    if wrong := [field for field in _FIELDS if not isinstance(hf.get(field), int)]:
        raise ValueError(f"{wrong[0]} is {hf.get(wrong[0])!r}: config.json must give an integer")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {hf['hidden_act']!r}: only silu is implemented")
    kinds = hf.get("layer_types") or []
    if not 0 <= layer < len(kinds) or kinds[layer] != "linear_attention":
        linear = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
        raise ValueError(f"layer is {layer}: the layers of linear attention are {linear}")
    config = default("gated_deltanet").model
    config.dtype = dtype
    config.hidden_size = hf["hidden_size"]
    config.num_heads, config.num_v_heads = (hf[field] for field in _FIELDS[1:3])
    config.head_dim, config.head_v_dim, config.conv_size = (hf[field] for field in _FIELDS[3:])
    config.norm_eps = hf.get("rms_norm_eps", 1e-6)
    if ccq is not None:
        config.ccq.update(ccq)
    return resolve_model(config)


def _shapes(c: FrozenConfigDict) -> dict[str, tuple[int, ...]]:
    keys, values = c.num_heads * c.head_dim, c.num_v_heads * c.head_v_dim
    return {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, c.hidden_size),
        "in_proj_ba.weight": (2 * c.num_v_heads, c.hidden_size),
        "conv1d.weight": (2 * keys + values, 1, c.conv_size),
        "A_log": (c.num_v_heads,),
        "dt_bias": (c.num_v_heads,),
        "norm.weight": (c.head_v_dim,),
        "out_proj.weight": (c.hidden_size, values),
    }


def _check(config: FrozenConfigDict, folder: TensorFolder, prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in _shapes(config).items()}
    found = {name: entry for name, entry in folder.entries.items() if name.startswith(prefix)}
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - shapes.keys())]
    for name in sorted(shapes.keys() & found.keys()):
        if found[name].shape != shapes[name]:
            problems.append(f"{name} has shape {found[name].shape}: it must be {shapes[name]}")
        if found[name].dtype not in DTYPES:
            problems.append(f"{name} is {found[name].dtype}: it must be one of {', '.join(DTYPES)}")
    if problems:
        raise ValueError("the tensors do not fit the mixer:\n  " + "\n  ".join(problems))


def _take_apart(c: FrozenConfigDict, found: dict[str, np.ndarray]) -> dict[str, Any]:
    """The mixer's parameters, by path."""
    group = c.num_v_heads // c.num_heads  # value heads that share a key head

    def by_head(name: str, widths: tuple[int, ...]) -> list[np.ndarray]:
        weight = found[name].reshape(c.num_heads, -1, c.hidden_size)
        parts = np.split(weight, np.cumsum(widths)[:-1], axis=1)
        return [part.reshape(-1, c.hidden_size).T for part in parts]

    value = group * c.head_v_dim
    q, k, v, z = by_head("in_proj_qkvz.weight", (c.head_dim, c.head_dim, value, value))
    b, a = by_head("in_proj_ba.weight", (group, group))
    keys = c.num_heads * c.head_dim
    convs = np.split(found["conv1d.weight"][:, 0].T, (keys, 2 * keys), axis=1)
    linear = {"q": q, "k": k, "v": v, "g": z, "a": a, "b": b, "o": found["out_proj.weight"].T}
    return {
        **{f"{name}_proj.kernel": kernel for name, kernel in linear.items()},
        **{f"{name}_conv.kernel": x for name, x in zip("qkv", convs, strict=True)},
        "A_log": found["A_log"],
        "dt_bias": found["dt_bias"],
        "o_norm.scale": found["norm.weight"],
    }
