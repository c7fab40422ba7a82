"""Configurations: every file and size is valid; what cannot run is refused by field and value."""

import importlib.util
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from ccq_jax.config import SIZES, default, resolve, validate

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
NAMES = ("ccq_gdn", "ccq_gla", "gdn", "gla", "transformer")


def get_config(name: str, size: str) -> ConfigDict:
    (path,) = [file for file in FILES if file.stem == name]
    spec = importlib.util.spec_from_file_location(f"config_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(size) if size else module.get_config()


def cases():
    for name in NAMES:
        mixer = {"gdn": "gated_deltanet", "gla": "gla"}.get(name.split("_")[-1], "attention")
        for size in SIZES[mixer]:
            yield name, mixer, size


@pytest.mark.parametrize(("name", "mixer", "size"), list(cases()))
def test_every_file_and_size_is_valid(name, mixer, size):
    config = get_config(name, size)
    assert config.model.mixer == mixer
    assert config.model.ccq.enabled == name.startswith("ccq_")
    if size == "tiny":
        assert config.data.source == "stdlib"
    else:
        with pytest.raises(ValueError, match=r"data.source is 'arrayrecord:': name the files"):
            validate(config)
        config.data.source = "arrayrecord:/data/*.array_record"
    validate(config)
    assert resolve(config, 257).model.vocab_size == 320


@pytest.mark.parametrize("name", NAMES)
def test_tiny_is_the_default_and_says_how_to_run_it(name):
    assert get_config(name, "") == get_config(name, "tiny")
    assert (
        f"python train.py --config=configs/{name}.py"
        in Path(FILES[0].parent / f"{name}.py").read_text()
    )


@pytest.mark.parametrize(
    ("backbone", "variants"),
    [
        ("gla", ("ccq_gla", "ccq_gla_norm")),
        ("gdn", ("ccq_gdn", "ccq_gdn4")),
        ("on", ("on_ccq", "on_ccq4")),
    ],
)
def test_variants_of_recall_differ_from_their_backbone_in_ccq_alone(backbone, variants):
    for variant in variants:
        config, plain = get_config("recall", variant), get_config("recall", backbone).unlock()
        validate(config)
        assert config.model.ccq.enabled and not plain.model.ccq.enabled
        plain.model.ccq = config.model.ccq
        assert config == plain.lock()
    assert get_config("recall", "on_ccq4").model.ccq.lambda_max == 4
    assert get_config("recall", "ccq_gla_norm").model.ccq.key_norm
    with pytest.raises(ValueError, match="'gdn4'"):
        get_config("recall", "gdn4")


def test_paper_scale_is_half_a_million_tokens_a_step_and_a_billion_of_warm_up():
    train = get_config("ccq_gdn", "1.3B").train
    tokens = train.batch_size * train.seq_len
    assert tokens == 2**19
    assert train.warmup_steps * tokens == pytest.approx(1e9, rel=1e-3)
    assert train.steps * tokens == pytest.approx(100e9, rel=1e-3)


def test_an_unknown_size_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'7B'.*tiny, 340M, 500M, 1.3B"):
        get_config("gla", "7B")
    with pytest.raises(ValueError, match=r"'mamba'.*gated_deltanet"):
        default("mamba")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.mixer", "mamba", "model.mixer is 'mamba': it must be one of gated_deltanet"),
        ("model.hidden_size", 0, "model.hidden_size is 0: it must be at least 1"),
        ("model.num_v_heads", 3, "model.num_v_heads is 3: it must be a multiple of num_heads, 2"),
        ("model.head_v_dim", 1024, "model.head_v_dim is 1024: it must be at most 512"),
        ("model.dtype", "float16", "model.dtype is 'float16': it must be one of float32, bfloat16"),
        ("model.remat", "some", "model.remat is 'some': it must be one of none, dots, full"),
        ("model.implementation", "cuda", "model.implementation is 'cuda'"),
        ("model.chunk_size", 48, "model.chunk_size is 48: it must be 0, 16, 32, 64, 128 or 256"),
        ("model.ccq.lambda_max", 0.0, "model.ccq.lambda_max is 0.0: it must be above 0"),
        ("data.source", "text:", "data.source is 'text:': name the files"),
        ("data.validation_fraction", 1.0, "data.validation_fraction is 1.0: it must be in"),
        ("train.steps", 0, "train.steps is 0: it must be at least 1"),
        ("train.warmup_steps", 10**6, "train.warmup_steps is 1000000: it must be less than"),
        ("train.accumulation", 3, "train.accumulation is 3: it must divide train.batch_size, "),
        ("train.loss_chunk", 100, "train.loss_chunk is 100: it must divide train.seq_len, 512"),
        ("train.beta2", 1.0, "train.beta2 is 1.0: it must be in [0, 1)"),
        ("checkpoint.every", 0, "checkpoint.every is 0: it must be at least 1"),
        ("eval.contexts", (512, 0), "eval.contexts is (512, 0): it must be lengths of at least 1"),
        ("mesh.data", 0, "mesh.data is 0: it must be -1"),
    ],
)
def test_a_value_that_cannot_run_is_named(field, value, message):
    config = default()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(ValueError) as caught:
        validate(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        ("gla", {"num_v_heads": 4}, "model.num_v_heads is 4: for gla it must be 0 or num_heads"),
        ("gla", {"ccq.decay": True}, "model.ccq.decay is True: statistics decay with one scalar"),
        ("gated_deltanet", {"num_v_heads": 4, "ccq.decay": True}, "model.ccq.decay is True"),
        ("attention", {"ccq.enabled": True}, "model.ccq.enabled is True: softmax attention"),
        ("attention", {"ccq.fixed_lambda": 0.5}, "model.ccq.fixed_lambda is 0.5: softmax"),
        ("attention", {"head_dim": 63, "head_v_dim": 63}, "model.head_dim is 63: RoPE turns pairs"),
        (
            "attention",
            {"head_v_dim": 32},
            "model.head_v_dim is 32: in attention it must be head_dim",
        ),
        ("attention", {"conv_size": 4}, "model.conv_size is 4: attention has no short convolution"),
    ],
)
def test_fields_that_do_not_fit_together_are_named(mixer, changes, message):
    config = default(mixer)
    config.model.update_from_flattened_dict(changes)
    with pytest.raises(ValueError) as caught:
        validate(config)
    assert message in str(caught.value)


def test_all_problems_are_listed_at_once():
    config = default()
    config.train.steps, config.train.batch_size = 0, -1
    with pytest.raises(ValueError, match=r"(?s)train.steps is 0.*train.batch_size is -1"):
        validate(config)


def test_a_wrong_field_or_type_is_named():
    fields = default().to_dict()
    fields["learning_rate"] = 1e-3
    fields["train"]["steps"] = 1.5
    fields["model"]["use_gate"] = 1
    del fields["model"]["ccq"]["decay"]
    with pytest.raises(ValueError) as caught:
        validate(ConfigDict(fields))
    for message in (
        "learning_rate is 0.001: there is no such field",
        "train.steps is 1.5: its type must be int",
        "model.use_gate is 1: its type must be bool",
        "model.ccq.decay is missing",
    ):
        assert message in str(caught.value)
    with pytest.raises(AttributeError, match="lerning_rate"):
        default().train.lerning_rate = 1e-3


def test_resolve_fills_in_what_zero_stands_for():
    config = default()
    model = resolve(config, 257).model
    assert (model.vocab_size, model.num_v_heads, model.intermediate_size) == (320, 2, 512)
    assert config.model.vocab_size == 0
    config.model.vocab_size = 256
    with pytest.raises(ValueError, match=r"model.vocab_size is 256: the tokenizer has 257 ids"):
        resolve(config, 257)
