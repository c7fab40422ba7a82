"""Checkpoints in Hugging Face form: those of flash-linear-attention give what it computed."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import VARIANTS, error, make
from safetensors.numpy import load_file, save_file

from ccq_jax import interop
from ccq_jax.interop import model_to_tensors

FIXTURES = Path(__file__).parent / "fixtures"
# The fixtures were computed by TF32 matrix units, whose rounding is about 1e-3, and the gradients
# of GDN's decays sum terms that nearly cancel. Measured, at worst, GDN and GLA: logits 1.3e-3 and
# 0.9e-3, weights' gradients 3.7e-3 and 1.8e-3, decays' 1.1e-2.
LOGITS, WEIGHTS, DECAYS = 1.5e-3, 5e-3, 1.5e-2


@pytest.mark.parametrize("name", ["fla_gdn", "fla_gla"])
def test_logits_loss_and_gradients_of_flash_linear_attention(name):
    io = load_file(FIXTURES / name / "io.safetensors")
    inputs = jnp.asarray(io["input_ids"])
    graph, params = nnx.split(interop.load_hf(FIXTURES / name))

    def loss(params):
        logits = nnx.merge(graph, params)(inputs)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_p, inputs[:, 1:, None], -1).mean(), logits[:1]

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert error(logits, io["logits"]) < LOGITS
    assert float(value) == pytest.approx(io["loss"].item(), rel=1e-4)
    gradients = model_to_tensors(nnx.merge(graph, gradients))
    names = [key.removeprefix("grad.") for key in io if key.startswith("grad.")]
    assert names
    for key in names:
        tolerance = DECAYS if key.endswith(("A_log", "dt_bias")) else WEIGHTS
        assert error(gradients[key], io[f"grad.{key}"]) < tolerance, key


@pytest.mark.parametrize("name", ["fla_gdn", "fla_gla"])
def test_a_checkpoint_survives_load_and_save_bit_for_bit(name, tmp_path):
    interop.save_hf(interop.load_hf(FIXTURES / name), tmp_path)
    before = load_file(FIXTURES / name / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])
    written = json.loads((tmp_path / "config.json").read_text())
    original = json.loads((FIXTURES / name / "config.json").read_text())
    assert written["model_type"] == original["model_type"]
    differs = {k for k in written if k in original and written[k] != original[k]}
    assert differs <= {"intermediate_size", "num_v_heads"}  # null there, spelt out here
    assert "ccq" not in written


@pytest.mark.parametrize(("variant", "tied"), [*((v, False) for v in VARIANTS), ("gla_ccq", True)])
def test_a_model_survives_save_and_load_bit_for_bit(variant, tied, tmp_path):
    shape = {"num_heads": 4} if variant == "attention" else {}
    model = make(variant, tie_embeddings=tied, implementation="auto", **shape)
    interop.save_hf(model, tmp_path / "new")
    again = interop.load_hf(tmp_path / "new")
    a, b = (nnx.to_pure_dict(nnx.state(m)) for m in (model, again))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    config = model.config.to_dict()
    config["ccq"]["fixed_lambda"] = -1.0  # set at test time; no part of a checkpoint
    assert again.config.to_dict() == config


def test_ccq_is_an_object_in_the_config_and_two_tensors_a_layer(tmp_path):
    interop.save_hf(make("gdn_decay"), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["ccq"] == {
        "decay": True, "centered": True, "key_norm": False, "trace_norm": False, "lambda_max": 4.0,
    }  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.attn.lambda_proj.weight"].shape == (2, 8)
    assert tensors["model.layers.1.attn.lambda_proj.bias"].shape == (2,)
    written["ccq"] = {}  # absent keys have the paper's values
    (tmp_path / "config.json").write_text(json.dumps(written))
    ccq = interop.load_hf(tmp_path).config.ccq
    assert (ccq.enabled, ccq.decay, ccq.centered, ccq.lambda_max) == (True, False, True, 1.0)


@pytest.fixture
def checkpoint(tmp_path):
    shutil.copytree(FIXTURES / "fla_gla", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").chmod(0o644)
    return tmp_path


def test_missing_unknown_and_misshapen_tensors_are_all_listed(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.attn.D"] = np.zeros(2, np.float32)
    tensors["model.layers.1.attn.q_proj.weight"] = np.zeros((128, 64), np.float32)
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        interop.load_hf(checkpoint)
    for message in (
        "model.norm.weight is missing",
        "model.layers.0.attn.D is unknown",
        "model.layers.1.attn.q_proj.weight has shape (128, 64): it must be (64, 128)",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "mamba2", "model_type is 'mamba2': it must be one of gated_deltanet"),
        ("hidden_size", None, "hidden_size is None: config.json must give an integer"),
        ("use_gv", True, "use_gv is True: only False is implemented"),
        ("attn", {"layers": [1]}, "attn is {'layers': \\[1\\]}: only None is implemented"),
        ("num_kv_heads", 1, "num_kv_heads is 1: it must be num_heads or null"),
        ("ccq", {"lamda_max": 2.0}, "ccq.lamda_max is unknown: ccq has decay, centered"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(checkpoint, field, value, message):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message):
        interop.load_hf(checkpoint)


def test_a_missing_file_is_named(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist"):
        interop.load_hf(checkpoint)


def test_what_hugging_face_form_cannot_say_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"model.gate_low_rank is 8: Hugging Face form has only 16"
    ):
        interop.save_hf(make("gla", gate_low_rank=8), tmp_path)
    with pytest.raises(ValueError, match=r"model.head_dim is 8: in Hugging Face form it must be"):
        interop.save_hf(make("attention"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_bfloat16_weights_load_as_float32_parameters(checkpoint):
    from safetensors.flax import save_file as save_jax

    path = checkpoint / "model.safetensors"
    tensors = {name: jnp.asarray(x, jnp.bfloat16) for name, x in load_file(path).items()}
    save_jax(tensors, path)
    config = json.loads((checkpoint / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = interop.load_hf(checkpoint)
    assert model.config.dtype == "bfloat16"
    assert model.embed.embedding[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.norm.scale[...], 1)
    assert interop.load_hf(checkpoint, dtype="float32").config.dtype == "float32"
