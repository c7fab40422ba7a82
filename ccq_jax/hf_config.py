"""config.json of flash-linear-attention's models, from and to a model's section of a configuration.

What CCQ adds is an object `"ccq"`; without it the model has no CCQ.
"""

from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from ccq_jax.config import default

MODEL_TYPES = {"gated_deltanet": "gated_deltanet", "gla": "gla", "attention": "transformer"}
ARCHITECTURES = {
    "gated_deltanet": "GatedDeltaNetForCausalLM",
    "gla": "GLAForCausalLM",
    "attention": "TransformerForCausalLM",
}
CCQ_FIELDS = ("decay", "centered", "key_norm", "trace_norm", "lambda_max")
# Variants of the backbones that these models do not have: the values that switch each of them off.
PLAIN: dict[str, tuple[Any, ...]] = {
    "attn": (None, {}),
    "attnres_block_size": (None,),
    "allow_neg_eigval": (False,),
    "hidden_act": ("swish", "silu"),
    "output_gate_activation": ("swish", "silu"),
    "feature_map": (None,),
    "clamp_min": (None,),
    "elementwise_affine": (True,),
    "use_gk": (True,),
    "use_gv": (False,),
    "conv_bias": (False,),
    "qkv_bias": (False,),
    "qk_norm": (False,),
    "window_size": (None,),
}


def config_from_hf(hf: dict[str, Any]) -> ConfigDict:
    """The model's section of a configuration, from the contents of config.json."""
    types = {value: key for key, value in MODEL_TYPES.items()}
    if hf.get("model_type") not in types:
        known = ", ".join(types)
        raise ValueError(f"model_type is {hf.get('model_type')!r}: it must be one of {known}")
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
        if not isinstance(hf.get(field), int):
            raise ValueError(f"{field} is {hf.get(field)!r}: config.json must give an integer")
    for field, accepted in PLAIN.items():
        if field in hf and hf[field] not in accepted:
            raise ValueError(f"{field} is {hf[field]!r}: only {accepted[0]!r} is implemented")
    mixer = types[hf["model_type"]]
    if hf.get("num_kv_heads") not in (None, hf["num_heads"]):
        raise ValueError(f"num_kv_heads is {hf['num_kv_heads']}: it must be num_heads or null")

    config = default(mixer).model
    config.dtype = "float32"
    if "bfloat16" in (hf.get("dtype"), hf.get("torch_dtype")):
        config.dtype = "bfloat16"
    config.vocab_size = hf["vocab_size"]
    config.hidden_size = hf["hidden_size"]
    config.num_layers = hf["num_hidden_layers"]
    config.num_heads = hf["num_heads"]
    config.norm_eps = hf.get("norm_eps", 1e-6)
    config.initializer_range = hf.get("initializer_range", 0.02)
    config.tie_embeddings = hf.get("tie_word_embeddings", False)
    config.intermediate_size = hf.get("intermediate_size") or _swiglu_width(hf)
    _read_heads(config, hf)
    if "ccq" in hf:
        unknown = set(hf["ccq"]) - set(CCQ_FIELDS)
        if unknown:
            raise ValueError(f"ccq.{unknown.pop()} is unknown: ccq has {', '.join(CCQ_FIELDS)}")
        config.ccq.update(hf["ccq"], enabled=True)
    return config


def _read_heads(config: ConfigDict, hf: dict[str, Any]) -> None:
    if config.mixer == "attention":
        config.head_dim = config.head_v_dim = config.hidden_size // config.num_heads
        config.rope_theta = hf.get("rope_theta", 10000.0)
        return
    if config.mixer == "gated_deltanet":
        config.head_dim = hf.get("head_dim", 256)
        config.head_v_dim = int(config.head_dim * hf.get("expand_v", 2))
        config.num_v_heads = hf.get("num_v_heads") or config.num_heads
        config.use_gate = hf.get("use_gate", True)
    else:
        config.head_dim = int(config.hidden_size * hf.get("expand_k", 0.5)) // config.num_heads
        config.head_v_dim = int(config.hidden_size * hf.get("expand_v", 1.0)) // config.num_heads
        config.use_gate = hf.get("use_output_gate", True)
    uses_conv = hf.get("use_short_conv", config.mixer == "gated_deltanet")
    config.conv_size = hf.get("conv_size", 4) if uses_conv else 0


def _swiglu_width(hf: dict[str, Any]) -> int:
    ratio = hf.get("hidden_ratio") or 4
    return -(-int(hf["hidden_size"] * ratio * 2 / 3) // 256) * 256


def config_to_hf(config: FrozenConfigDict) -> dict[str, Any]:
    """The contents of config.json, from a complete model's section."""
    hf = {
        "model_type": MODEL_TYPES[config.mixer],
        "architectures": [ARCHITECTURES[config.mixer]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "swish",
        "norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": config.dtype,  # of compute; the tensors are float32
    }
    hf |= _write_heads(config)
    if config.ccq.enabled:
        hf["ccq"] = {field: config.ccq[field] for field in CCQ_FIELDS}
    return hf


def _write_heads(c: FrozenConfigDict) -> dict[str, Any]:
    keys, values = c.num_heads * c.head_dim, c.num_heads * c.head_v_dim
    if c.mixer == "attention":
        if keys != c.hidden_size:
            raise ValueError(
                f"model.head_dim is {c.head_dim}: in Hugging Face form it must be "
                f"hidden_size / num_heads, {c.hidden_size} / {c.num_heads}"
            )
        return {"rope_theta": c.rope_theta}
    conv = {"use_short_conv": c.conv_size > 0, "conv_size": c.conv_size or 4}
    if c.mixer == "gated_deltanet":
        heads = {"head_dim": c.head_dim, "num_v_heads": c.num_v_heads, "use_gate": c.use_gate}
        return heads | conv | {"expand_v": _ratio("head_v_dim", c.head_v_dim, c.head_dim)}
    for field, only in (("gate_normalizer", 16), ("gate_low_rank", 16)):
        if c[field] != only:
            raise ValueError(f"model.{field} is {c[field]}: Hugging Face form has only {only}")
    return conv | {
        "expand_k": _ratio("head_dim", keys, c.hidden_size),
        "expand_v": _ratio("head_v_dim", values, c.hidden_size),
        "use_output_gate": c.use_gate,
        "fuse_norm": True,
    }


def _ratio(field: str, part: int, whole: int) -> float:
    ratio = part / whole
    if int(whole * ratio) != part:  # how the ratio is read back
        raise ValueError(f"model.{field}: {part} / {whole} has no exact ratio in Hugging Face form")
    return ratio
