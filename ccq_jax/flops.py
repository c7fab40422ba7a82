"""The arithmetic that a model asks for, by formula, and what known devices can do.

A product of matrices [m, k] and [k, n] counts 2 m k n. Norms, gates, short convolutions and the
embedding's look-up are left out. Masked products count whole, as matrix units compute them; what
remat computes twice counts once.
"""

from ml_collections import ConfigDict

# Dense bfloat16 FLOP/s of one device, by the beginning of its `device_kind` (vendors' data sheets).
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU7x": 2307e12,
}

DEFAULT_CHUNK = 64  # tokens, where `chunk_size` leaves the choice to the implementation


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None for one that is not in the table."""
    return next((v for kind, v in PEAK_FLOPS.items() if device_kind.startswith(kind)), None)


def train_flops_per_token(model: ConfigDict, seq_len: int) -> float:
    """FLOPs of a forward and a backward pass (twice the forward) for one token.

    Args:
      model: the resolved `config.model`.
      seq_len: tokens a sequence; matters to softmax attention alone.
    """
    mixer = {"attention": _attention, "gla": _gla, "gated_deltanet": _gated_deltanet}[model.mixer]
    layer = mixer(model, seq_len) + 6 * model.hidden_size * model.intermediate_size
    if model.ccq.enabled:
        layer += _ccq(model)
    head = 2 * model.hidden_size * model.vocab_size
    return 3.0 * (model.num_layers * layer + head)


def _projections(model: ConfigDict, *widths: int) -> int:
    return 2 * model.hidden_size * sum(widths)


def _attention(model: ConfigDict, seq_len: int) -> int:
    width = model.num_heads * model.head_dim
    mean_length = seq_len // 2  # a token sees those before it
    return _projections(model, 4 * width) + 4 * mean_length * width


def _gla(model: ConfigDict, seq_len: int) -> int:
    keys, values = model.num_heads * model.head_dim, model.num_heads * model.head_v_dim
    gates = 2 * model.gate_low_rank * (model.hidden_size + keys)
    output = values * (1 + model.use_gate)
    return (
        _projections(model, 2 * keys, values, output)
        + gates
        + _chunked_read(model, heads=model.num_heads)
    )


def _gated_deltanet(model: ConfigDict, seq_len: int) -> int:
    heads, chunk = model.num_v_heads, model.chunk_size or DEFAULT_CHUNK
    keys, values = model.num_heads * model.head_dim, heads * model.head_v_dim
    output = values * (1 + model.use_gate)
    # K K^T, its triangular inverse, the read that is corrected (K S), and the corrected values.
    delta = 2 * chunk * model.head_dim + 2 * chunk * chunk / 3
    delta += 2 * model.head_dim * model.head_v_dim + 2 * chunk * model.head_v_dim
    return int(
        _projections(model, 2 * keys, values, output, 2 * heads)
        + heads * delta
        + _chunked_read(model, heads=heads)
    )


def _chunked_read(model: ConfigDict, heads: int) -> int:
    """Scores, the values they weight, reading the chunk's first state, writing the next one."""
    chunk = model.chunk_size or DEFAULT_CHUNK
    inside = 2 * chunk * (model.head_dim + model.head_v_dim)
    return heads * (inside + 4 * model.head_dim * model.head_v_dim)


def _ccq(model: ConfigDict) -> int:
    """lambda, then causal linear attention of (q, k, k): Sigma q is read as a state is."""
    chunk = model.chunk_size or DEFAULT_CHUNK
    read = 4 * chunk * model.head_dim + 4 * model.head_dim**2
    return model.num_heads * (2 * model.head_dim + read)
