"""Exported models in plain PyTorch: an independent implementation finds the same logits."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from models import VARIANTS, error, make, tokens
from safetensors.numpy import load_file

from ccq_jax import interop

torch = pytest.importorskip("torch")
from ccq_jax import torch_reference  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("variant", "tied"),
    [*((v, False) for v in VARIANTS if v != "gdn_fixed_lambda"), ("gla_ccq", True)],
)
def test_logits_of_an_exported_model(variant, tied, tmp_path):
    shape = {"num_heads": 4} if variant == "attention" else {}
    model = make(variant, tie_embeddings=tied, **shape)
    interop.save_hf(model, tmp_path, shard_bytes=40_000)
    inputs = tokens(2, 45)
    found = torch_reference.Model(tmp_path).logits(torch.tensor(np.asarray(inputs)))
    assert error(found.numpy(), model(inputs)) < 1e-5


@pytest.mark.parametrize("name", ["fla_gdn", "fla_gla"])
def test_logits_of_flash_linear_attention(name):
    io = load_file(FIXTURES / name / "io.safetensors")
    found = torch_reference.Model(FIXTURES / name).logits(torch.tensor(io["input_ids"][:1]))
    assert error(found.numpy(), io["logits"]) < 1.5e-3  # the fixtures' own rounding
    ours = interop.load_hf(FIXTURES / name)(jnp.asarray(io["input_ids"][:1]))
    assert error(found.numpy(), ours) < 1e-5


def test_the_command_line_prints_the_likeliest_tokens(tmp_path, capsys):
    model = make("gla")
    interop.save_hf(model, tmp_path)
    torch_reference.main([str(tmp_path), "3", "1", "4"])
    first = int(capsys.readouterr().out.split()[0])
    assert first == int(jnp.argmax(model(jnp.asarray([[3, 1, 4]]))[0, -1]))


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    interop.save_hf(make("gla"), tmp_path, shard_bytes=40_000)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00001', '"../model-00001'))
    with pytest.raises(ValueError, match="not a file of the folder"):
        torch_reference.Model(tmp_path)
