"""Exported runs: every form holds the run's parameters and continues texts as the run does."""

import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from training import tiny_config

from ccq_jax import checkpoint, generate, interop, parameters, step
from ccq_jax.config import resolve
from ccq_jax.data import make_tokenizer
from ccq_jax.data.tokenizer_files import write_tokenizer
from ccq_jax.export import export, main
from ccq_jax.formats import open_generator
from ccq_jax.parameters import RunParameters
from ccq_jax.sampling import Sampling
from ccq_jax.sharding import make_mesh
from ccq_jax.workdir import open_run

GREEDY = Sampling(temperature=0)
STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run with checkpoints, spread over eight devices, that nobody trained."""
    directory = tmp_path_factory.mktemp("run")
    config = tiny_config(directory, mixer="gla", steps=6, ema=0.5)
    config.model.update(implementation="scan", initializer_range=0.2, chunk_size=16)
    config = resolve(config, 257)
    mesh = make_mesh(2, 4)
    with (
        open_run(directory / "run", config) as path,
        jax.set_mesh(mesh),
        checkpoint.Checkpoints(path, keep=9) as checkpoints,
    ):
        _, abstract = step.abstract_state(config, mesh)
        for number in STEPS:
            state = step.init_state(config, abstract)
            state["params"] = jax.tree.map(lambda x, n=number: x * (1 + n / 7), state["params"])
            meta = {"position": 0, "config": config.to_dict()}
            checkpoints.save(number, state, meta, validation_loss=float(number))
    line = {"step": 6, "loss": 1.0, "eval/loss": 1.5, "eval/bits_per_byte": 2.25}
    (path / "metrics.jsonl").write_text(json.dumps(line | {"eval/unigram_loss": 3.0}) + "\n")
    (path / "eval").mkdir()
    results = {"step": 6, "results": {"mqar": {"128": {"token_accuracy": 0.625}}}}
    (path / "eval" / "recall.json").write_text(json.dumps(results))
    return path


def flat(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in leaves}


def trained(run, number):
    return flat(checkpoint.load_model(run, step=number).model)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


READ = {"hf": interop.load_hf, "orbax": parameters.load_parameters}


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_model_has_the_runs_parameters(run, form, dtype, tmp_path):
    export(RunParameters(run), tmp_path / "out", form=form, dtype=dtype)
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    expected = {name: x.astype(kind).astype(np.float32) for name, x in trained(run, 6).items()}
    assert_same(flat(READ[form](tmp_path / "out")), expected)


def test_checkpoints_are_averaged(run, tmp_path):
    chosen = RunParameters(run, step=4, average=2)
    assert chosen.steps == [4, 2]
    export(chosen, tmp_path / "hf")
    found, a, b = flat(interop.load_hf(tmp_path / "hf")), trained(run, 2), trained(run, 4)
    for name in a:
        np.testing.assert_allclose(found[name], (a[name] + b[name]) / 2, rtol=1e-6)
    sharded = chosen.load(sharded=True)
    kernel = sharded["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    np.testing.assert_allclose(kernel, found["['layers']['mlp']['up_proj']['kernel']"], rtol=1e-6)
    assert "mean over steps 2, 4" in (tmp_path / "hf" / "README.md").read_text()


def test_the_running_average_is_exported_where_that_is_asked(run, tmp_path):
    main([f"--workdir={run}", f"--out={tmp_path / 'ema'}", "--weights=ema", "--step=best"])
    found, params = flat(interop.load_hf(tmp_path / "ema")), trained(run, 2)
    for name, x in params.items():  # the running average stayed where it began
        np.testing.assert_allclose(found[name] * (1 + 2 / 7), x, rtol=1e-6, atol=1e-12)


def test_a_folder_says_what_it_holds(run, tmp_path):
    export(RunParameters(run), tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    for said in ("Gated linear attention with CCQ", "1.5000", "2.2500", "mqar, 128, token_accuracy | 0.625",
                 '"seq_len": 32', "load_hf"):  # fmt: skip
        assert said in card
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256
    assert (
        json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 256
    )


@pytest.fixture(scope="module")
def forms(run, tmp_path_factory):
    """The run in every form."""
    directory = tmp_path_factory.mktemp("forms")
    for form in ("hf", "orbax", "stablehlo"):
        export(RunParameters(run), directory / form, form=form)
    return {"run": run} | {form: directory / form for form in ("hf", "orbax", "stablehlo")}


def test_functions_continue_texts_as_the_run_does(forms, tmp_path):
    prompts = ["import os, é", "def f(x):\n    return"]
    run, functions = open_generator(forms["run"]), open_generator(forms["stablehlo"])
    expected = run.generate(prompts, max_tokens=12, sampling=GREEDY).texts
    assert functions.generate(prompts, max_tokens=12, sampling=GREEDY).texts == expected
    run.save(run.read(prompts), tmp_path / "state")
    state = functions.load(tmp_path / "state")  # a state of one form is a state of every form
    found = functions.generate(["", ""], state=state, max_tokens=12, sampling=GREEDY)
    assert found.texts == expected


def test_functions_are_read_without_this_package(forms, tmp_path):
    """What is exported needs JAX alone: any batch and any number of segments."""
    program = """
import json, sys, jax, numpy as np
from pathlib import Path
from safetensors.numpy import load_file
folder = Path(sys.argv[1])
spec = json.loads((folder / "stablehlo.json").read_text())
parameters = load_file(folder / "model.safetensors")
prefill = jax.export.deserialize(bytearray((folder / "prefill.bin").read_bytes()))
assert {"cpu", "cuda", "tpu"} == set(prefill.platforms)
rows, segments = 3, 2
cache = {name: np.zeros([rows if n == "b" else n for n in x["shape"]], x["dtype"])
         for name, x in spec["cache"].items()}
tokens = np.ones((rows, segments * spec["segment"]), np.int32)
logits, cache = prefill.call(parameters, tokens, tokens, cache)
assert logits.shape == (rows, spec["model"]["vocab_size"]) and np.isfinite(logits).all()
assert not any(name.startswith("ccq_jax") for name in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", program, str(forms["stablehlo"])]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)


def test_the_command_line_reads_every_form_and_keeps_states(forms, tmp_path, capsys):
    common = ["--temperature=0", "--max_tokens=8"]
    prompts = ["--prompt=import os, sys", "--prompt=import os.path"]
    generate.main([f"--workdir={forms['hf']}", *prompts, *common])
    whole = capsys.readouterr().out
    assert whole.startswith("--- 1\nimport os, sys")
    state = tmp_path / "state"
    generate.main([f"--model={forms['hf']}", *["--prompt=import"] * 2, f"--save_state={state}",
                   "--max_tokens=0"])  # fmt: skip
    prompts = [prompt.replace("=import", "=") for prompt in prompts]
    generate.main([f"--model={forms['orbax']}", f"--state={state}", *prompts, *common])
    out, error = capsys.readouterr()
    assert out.replace("\n os", "\nimport os") == whole
    assert "tokens/s" in error


@pytest.mark.parametrize(
    "file", ["prefill.bin", "decode.bin", "stablehlo.json", "model.safetensors"]
)
def test_a_damaged_folder_is_refused(forms, file, tmp_path):
    for path in forms["stablehlo"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-50])
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        open_generator(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--average=4"], "average is 4: the run in .* it must be from 1 to 3"),
        (["--step=5"], "step is 5: it must be 'latest', 'best' or one of 2, 4, 6"),
        (["--out={full}"], "holds something already"),
        (["--workdir={nowhere}"], "holds no run"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_left(run, flags, message, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    places = {"full": tmp_path / "full", "nowhere": tmp_path / "nowhere"}
    flags = [flag.format(**places) for flag in flags]
    with pytest.raises(SystemExit, match=message):
        main([f"--workdir={run}", f"--out={tmp_path / 'out'}", *flags])
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("name", ["bytes", "mistral"])
def test_a_tokenizer_survives_its_files(name, tmp_path):
    before = make_tokenizer(name)
    write_tokenizer(name, tmp_path)
    after = make_tokenizer(str(tmp_path))
    assert (after.pieces, after.eos_id) == (before.pieces, before.eos_id)
    text = "def f(x):\n\treturn 'é' + \"日本\"  # <|endoftext|> </s>"
    assert after.encode(text) == before.encode(text)
    (tmp_path / "again").mkdir()
    write_tokenizer(str(tmp_path), tmp_path / "again")
    assert make_tokenizer(str(tmp_path / "again")).encode(text) == before.encode(text)


def test_a_directory_without_a_model_is_refused(tmp_path, forms):
    with pytest.raises(ValueError, match="holds no model"):
        open_generator(tmp_path)
    with pytest.raises(ValueError, match=r"step is 3, and .* is no run"):
        open_generator(forms["hf"], step=3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        open_generator(tmp_path)
    with pytest.raises(ValueError, match="model_type is None"):
        open_generator(tmp_path, tokenizer="bytes")
