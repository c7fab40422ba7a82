"""Checkpoints in Hugging Face form: those of flash-linear-attention give what it computed."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VARIANTS, error, make
from safetensors.numpy import load_file, save_file

from ccq_jax import interop
from ccq_jax.config import default, resolve_model
from ccq_jax.hf_config import config_from_hf, config_to_hf
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
        ("norm_eps", "small", "config.json has a value of a wrong type"),
        ("num_heads", 0, "config.json has a value of a wrong type or size"),
        ("hidden_size", -64, "model.hidden_size is -64: it must be at least 1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000: the files hold 31 tensors"),
        ("ccq", 3, "config.json has a value of a wrong type"),
        ("ccq", {"lamda_max": 2.0}, "ccq.lamda_max is unknown: ccq has decay, centered"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(checkpoint, field, value, message):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=message):
        interop.load_hf(checkpoint)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_configuration_survives_config_json(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    config = default(draw("gated_deltanet", "gla", "attention")).model
    config.num_heads, config.head_dim = draw(1, 2, 3, 5, 6), draw(8, 20, 64, 256)
    config.vocab_size, config.num_layers = draw(1, 257, 32000), draw(1, 21)
    config.tie_embeddings, config.dtype = draw(True, False), draw("float32", "bfloat16")
    config.intermediate_size = draw(0, 48, 2816)
    if config.mixer == "attention":
        config.hidden_size = config.num_heads * config.head_dim
        config.head_v_dim = config.head_dim
        config.rope_theta = draw(1e4, 5e5)
    else:
        config.hidden_size, config.head_v_dim = draw(60, 384, 1000), draw(8, 48, 100, 512)
        config.conv_size, config.use_gate = draw(0, 3, 4), draw(True, False)
        if draw(True, False):
            config.ccq.update(enabled=True, key_norm=draw(True, False), lambda_max=draw(1.0, 4.0))
    if config.mixer == "gated_deltanet":
        config.num_v_heads = config.num_heads * draw(1, 2, 3)
    config = resolve_model(config)
    try:
        written = json.dumps(config_to_hf(config))
    except ValueError as error:
        assert "no exact ratio" in str(error)  # float division; refused, and never written wrong
    else:
        assert resolve_model(config_from_hf(json.loads(written))).to_dict() == config.to_dict()


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


@pytest.fixture
def gdn_checkpoint(tmp_path):
    shutil.copytree(FIXTURES / "fla_gdn", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").chmod(0o644)
    return tmp_path


def rewrite(directory, change):
    """Applies `change` to the dictionary of a folder's tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def assert_same_model(one, other):
    jax.tree.map(
        np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (one, other))
    )


def test_a_model_in_several_files_is_the_model_in_one(tmp_path):
    model = make("gdn_decay")
    interop.save_hf(model, tmp_path, shard_bytes=10_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_same_model(interop.load_hf(tmp_path), model)


def test_the_unused_d_of_early_gated_deltanets_is_left_out(gdn_checkpoint):
    expected = interop.load_hf(gdn_checkpoint)
    rewrite(gdn_checkpoint, lambda t: t.update({"model.layers.0.attn.D": np.ones(2, np.float32)}))
    assert_same_model(interop.load_hf(gdn_checkpoint), expected)


def test_a_norm_apart_from_its_gate_has_another_name(checkpoint):
    expected = interop.load_hf(checkpoint)

    def rename(tensors):
        for layer in (0, 1):
            name = f"model.layers.{layer}.attn.g_norm"
            tensors[f"{name}.weight"] = tensors.pop(f"{name}_swish_gate.weight")

    rewrite(checkpoint, rename)
    assert_same_model(interop.load_hf(checkpoint), expected)


def test_a_tied_head_may_lie_there_once_more_but_no_other(tmp_path):
    model = make("gla", tie_embeddings=True)
    interop.save_hf(model, tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embeddings.weight"]
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding}))
    assert_same_model(interop.load_hf(tmp_path), model)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head.weight is unknown"):
        interop.load_hf(tmp_path)


def test_bfloat16_survives_load_and_save_bit_for_bit(tmp_path):
    interop.save_hf(make("gdn_grouped_values"), tmp_path / "a", dtype="bfloat16")
    model = interop.load_hf(tmp_path / "a")
    assert model.config.dtype == "bfloat16"
    interop.save_hf(model, tmp_path / "b", dtype="bfloat16")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_tensors_of_another_dtype_are_refused(checkpoint, dtype):
    name = "model.norm.weight"
    rewrite(checkpoint, lambda t: t.update({name: t[name].astype(dtype)}))
    with pytest.raises(ValueError, match=r"model.norm.weight is [FIU]\d+: it must be one of F32"):
        interop.load_hf(checkpoint)


@pytest.mark.parametrize("text", ["", "[1]", "null", "[" * 10**5])
def test_a_config_that_is_no_object_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json (is not JSON|holds)"):
        interop.load_hf(checkpoint)


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


def test_gated_deltanet_without_convolutions_keeps_their_silu():
    with_them, without = make("gdn"), make("gdn", conv_size=0)
    mixer = with_them.layers.mixer
    for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
        conv.kernel.set_value(jnp.zeros_like(conv.kernel[...]).at[:, -1].set(1))
    donor = dict(nnx.to_flat_state(nnx.state(with_them, nnx.Param)))
    for path, leaf in nnx.to_flat_state(nnx.state(without, nnx.Param)):
        leaf.set_value(donor[path][...])
    inputs = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 20)))
    assert error(without(inputs), with_them(inputs)) < 1e-6
