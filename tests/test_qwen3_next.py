"""Mixers of Qwen3-Next: what transformers computes in pure PyTorch, frozen into a fixture."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from models import error
from safetensors.numpy import load_file, save_file

from ccq_jax.cache import Segments
from ccq_jax.config import default
from ccq_jax.qwen3_next import load_mixer

FIXTURE = Path(__file__).parent / "fixtures" / "qwen3_next"
PREFIX = "model.layers.0.linear_attn."


def run(mixer, x):
    graph, params = nnx.split(mixer)
    return jax.jit(lambda params, x: nnx.merge(graph, params)(x, Segments())[0])(params, x)


def test_a_mixer_computes_what_transformers_computes():
    io = load_file(FIXTURE / "io.safetensors")
    assert error(run(load_mixer(FIXTURE, 0), io["input"]), io["output"]) < 5e-6


def test_ccq_that_contracts_nothing_changes_nothing():
    io = load_file(FIXTURE / "io.safetensors")
    ccq = default().model.ccq
    ccq.update(enabled=True, bias_init=-40.0)
    assert error(run(load_mixer(FIXTURE, 0, ccq=ccq), io["input"]), io["output"]) < 5e-6
    ccq.bias_init = 0.0
    assert error(run(load_mixer(FIXTURE, 0, ccq=ccq), io["input"]), io["output"]) > 1e-3


@pytest.fixture
def checkpoint(tmp_path):
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "io.safetensors").unlink()
    return tmp_path


def test_tensors_that_do_not_fit_are_all_listed(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors[PREFIX + "A_log"]
    tensors[PREFIX + "D"] = np.zeros(4, np.float32)
    tensors[PREFIX + "dt_bias"] = np.zeros(4, np.int64)
    tensors[PREFIX + "in_proj_ba.weight"] = np.zeros((4, 48), np.float32)
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros(1, np.float32)  # of no concern
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_mixer(checkpoint, 0)
    assert str(caught.value).splitlines()[1:] == [
        f"  {PREFIX}A_log is missing",
        f"  {PREFIX}D is unknown",
        f"  {PREFIX}dt_bias is I64: it must be one of F32, BF16, F16",
        f"  {PREFIX}in_proj_ba.weight has shape (4, 48): it must be (8, 48)",
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "qwen3", "model_type is 'qwen3': it must be qwen3_next"),
        ("layer_types", ["full_attention"], r"layer is 0: the layers of linear attention are \[\]"),
        ("linear_key_head_dim", None, "linear_key_head_dim is None"),
        ("hidden_act", "gelu", "hidden_act is 'gelu': only silu"),
    ],
)
def test_what_is_no_such_mixer_is_refused(checkpoint, field, value, message):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message):
        load_mixer(checkpoint, 0)
