"""The one table of named shapes, and random inputs for any operator: for tests, check, bench and tune."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels.ccq_query.state import CCQState

OPERATORS = ("ccq_query", "gated_linear_attention", "gated_delta_rule")


class Shape(NamedTuple):
    """Sizes of a problem: B, T, H, K, V and, where it is not H, the number of value heads HV."""

    batch: int
    length: int
    heads: int
    key_width: int
    value_width: int
    value_heads: int | None = None

    def heads_of(self, operator: str) -> int:
        """Value heads, which only gated_delta_rule distinguishes from key heads."""
        grouped = operator == "gated_delta_rule" and self.value_heads is not None
        return self.value_heads if grouped else self.heads  # type: ignore[return-value]


SHAPES = {
    # What is trained: 32,768 tokens.
    "gdn1.3B": Shape(8, 4096, 6, 256, 512),
    "gla1.3B": Shape(8, 4096, 4, 256, 512),
    "d128": Shape(8, 4096, 16, 128, 128),
    "long": Shape(1, 65536, 8, 128, 128),
    "cpu": Shape(1, 2048, 4, 64, 64),
    # Small ones for any machine: one token, less than a chunk, several chunks with a tail, odd widths, grouped heads.
    "token": Shape(2, 1, 2, 8, 8),
    "short": Shape(1, 7, 2, 16, 8),
    "tail": Shape(2, 83, 2, 16, 24),
    "odd": Shape(1, 130, 3, 20, 12),
    "grouped": Shape(1, 70, 2, 16, 16, value_heads=4),
    # Widths and lengths that a kernel's tiles meet.
    "k64": Shape(2, 500, 3, 64, 64),
    "k96": Shape(1, 333, 2, 96, 192),
    "k128": Shape(2, 1000, 2, 128, 128),
    "k192": Shape(1, 257, 2, 192, 96),
    "k256": Shape(1, 512, 2, 256, 512, value_heads=4),
    "k512": Shape(1, 200, 1, 512, 512),
    "poem": Shape(1, 43884, 1, 64, 64),
}
SMALL = ("token", "short", "tail", "odd", "grouped")
WIDE = ("k64", "k96", "k128", "k192", "k256", "k512")
LONG = ("poem",)

DECAYS = ("none", "mild", "strong", "mixed", "mild per head", "mixed per head")
KEYS = ("random", "crowded")


def make_inputs(
    operator: str,
    shape: Shape,
    *,
    seed: int = 0,
    dtype: str = "float32",
    decay: str = "mild",
    keys: str = "random",
    segments: bool = False,
    initial_state: bool = True,
) -> dict[str, Any]:
    """Random arguments by name, to be passed to the operator as keywords.

    Args:
      operator: one of OPERATORS.
      shape: sizes, such as SHAPES["tail"].
      seed: of the random numbers.
      dtype: of q, k, v and lam; decays, beta and states are float32.
      decay: "none" leaves log_decay out (gated_delta_rule gets zeros); "mild" is what a trained layer has, near 0;
        "strong" is uniform from -20 to 0; "mixed" has 0, mild, strong and -inf. "per head" is GLA's [B, T, H, 1].
      keys: "crowded" keys share a component several times larger than what tells them apart.
      segments: adds segment_ids of a few documents a row.
      initial_state: adds a random state, for ccq_query that of twenty keys.
    """
    rng = np.random.default_rng(seed)
    value_heads = shape.heads_of(operator)
    tokens = shape.batch, shape.length
    inputs: dict[str, Any] = {
        "q": rng.standard_normal((*tokens, shape.heads, shape.key_width)),
        "k": _keys(rng, operator, shape, shape.length, keys),
    }
    if operator == "ccq_query":
        inputs["lam"] = _sigmoid(rng.standard_normal((*tokens, shape.heads)))
    else:
        inputs["v"] = rng.standard_normal((*tokens, value_heads, shape.value_width))
    inputs = {name: jnp.asarray(x.astype(_numpy_dtype(dtype))) for name, x in inputs.items()}
    if operator == "gated_delta_rule":
        inputs["q"] = _normalised(inputs["q"])
        beta = _sigmoid(rng.standard_normal((*tokens, value_heads)))
        inputs["beta"] = jnp.asarray(beta, jnp.float32)
    log_decay = _log_decay(rng, operator, shape, decay)
    if log_decay is not None:
        inputs["log_decay"] = jnp.asarray(log_decay, jnp.float32)
    if segments:
        starts = rng.random(tokens) < 4 / shape.length
        inputs["segment_ids"] = jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)
    if initial_state:
        inputs["initial_state"] = _state(rng, operator, shape, keys)
    return inputs


def make_cotangents(out: Any, state: Any, seed: int = 1) -> tuple[Any, Any]:
    """Random cotangents of an operator's results, in their dtypes."""
    rng = np.random.default_rng(seed)

    def like(x: Any) -> Any:
        return jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))

    return like(out), CCQState(*map(like, state)) if isinstance(state, tuple) else like(state)


def _keys(
    rng: np.random.Generator, operator: str, shape: Shape, length: int, keys: str
) -> np.ndarray:
    x = rng.standard_normal((shape.batch, length, shape.heads, shape.key_width))
    if keys == "crowded":
        common = np.random.default_rng(7).standard_normal((shape.heads, shape.key_width))
        x = x + 4 * common
    return np.asarray(_normalised(x)) if operator == "gated_delta_rule" else x


def _state(rng: np.random.Generator, operator: str, shape: Shape, keys: str) -> Any:
    if operator != "ccq_query":
        heads = shape.heads_of(operator)
        x = rng.standard_normal((shape.batch, heads, shape.key_width, shape.value_width))
        return jnp.asarray(x, jnp.float32)
    past = _keys(rng, operator, shape, 20, keys)
    count = np.full((shape.batch, shape.heads), 20.0)
    sums = past.sum(1), np.einsum("bthi,bthj->bhij", past, past)
    return CCQState(*(jnp.asarray(x, jnp.float32) for x in (count, *sums)))


def _log_decay(
    rng: np.random.Generator, operator: str, shape: Shape, decay: str
) -> np.ndarray | None:
    kind, _, per_head = decay.partition(" ")
    if decay not in DECAYS:
        raise ValueError(f"decay is {decay!r}; expected one of {', '.join(map(repr, DECAYS))}")
    dims: tuple[int, ...] = shape.batch, shape.length, shape.heads_of(operator)
    if operator == "gated_linear_attention":
        dims = (*dims, 1 if per_head else shape.key_width)
    mild = np.log(_sigmoid(rng.standard_normal(dims))) / 16
    strong = -20 * rng.random(dims)
    if kind == "none":
        return np.zeros(dims) if operator == "gated_delta_rule" else None
    if kind == "mild":
        return mild
    if kind == "strong":
        return strong
    # A reset every twenty tokens, of whole heads, and in GLA also of single channels.
    which = rng.choice(4, size=dims, p=(0.2, 0.6, 0.17, 0.03))
    mixed = np.select([which == 0, which == 1, which == 2], [0, mild, strong], -np.inf)
    resets = rng.random(dims[:3]) < 0.05
    mixed[resets] = -np.inf
    return mixed


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _normalised(x: Any) -> Any:
    wide = np.asarray(x, np.float64)
    unit = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    return unit if isinstance(x, np.ndarray) else jnp.asarray(unit.astype(x.dtype))


def _numpy_dtype(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
