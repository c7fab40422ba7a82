"""The recurrences in float64 NumPy, with adjoints written by hand: what the implementations are compared to.

Nothing here is shared with the implementations. An operator is a step and the step's adjoint; one loop over the tokens
serves them all. It keeps the state every sqrt(T) tokens and recomputes those between, so long sequences fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Recurrence(NamedTuple):
    """An operator's names, its step and the step's adjoint, on tokens [B, heads, ...] and a dict of states.

    step(state, token) -> (state, out)
    adjoint(state_before, token, d_out, d_state) -> (d_state_before, d_token)
    A token holds `decay` = exp(log_decay), broadcastable to [B, heads, K].
    """

    inputs: tuple[str, ...]
    states: tuple[str, ...]
    step: Callable[..., tuple[Arrays, np.ndarray]]
    adjoint: Callable[..., tuple[Arrays, Arrays]]


def forward(operator: str, inputs: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """Output and final state in float64.

    Args:
      operator: "ccq_query", "gated_linear_attention" or "gated_delta_rule".
      inputs: the operator's array arguments by name; log_decay, initial_state and segment_ids may be absent or None.
      **options: the operator's `scale` or `centered`.

    Returns:
      (out, state): state is one array, or for ccq_query the tuple (count, key_sum, key_outer).
    """
    problem = _Problem(operator, inputs, options)
    outs = []
    state = problem.initial
    for t in range(problem.length):
        state, out = problem.recurrence.step(state, problem.token(t))
        outs.append(out)
    return np.stack(outs, 1), _pack(problem.recurrence, state)


def gradients(
    operator: str, inputs: Mapping[str, Any], d_out: Any, d_state: Any, **options: Any
) -> dict[str, Any]:
    """Gradients of <out, d_out> + <state, d_state>, by the name of each floating input that was given."""
    problem = _Problem(operator, inputs, options)
    recurrence, length = problem.recurrence, problem.length
    stride = math.isqrt(length - 1) + 1
    kept, state = [], problem.initial
    for t in range(length):
        if t % stride == 0:
            kept.append(state)
        state, _ = recurrence.step(state, problem.token(t))

    d_out = np.asarray(d_out, np.float64)
    d_states = _unpack(recurrence, d_state)
    d_tokens: list[Arrays] = [{}] * length
    for start in reversed(range(0, length, stride)):
        before = [kept[start // stride]]
        stop = min(start + stride, length)
        for t in range(start, stop - 1):
            before.append(recurrence.step(before[-1], problem.token(t))[0])
        for t in reversed(range(start, stop)):
            d_states, d_tokens[t] = recurrence.adjoint(
                before[t - start], problem.token(t), d_out[:, t], d_states
            )
    grads = {name: np.stack([d[name] for d in d_tokens], 1) for name in d_tokens[0]}
    return problem.as_given(grads, d_states)


class _Problem:
    """Inputs in float64, with an initial state, decays that know segments, and grouped heads repeated."""

    def __init__(self, operator: str, inputs: Mapping[str, Any], options: Mapping[str, Any]):
        self.recurrence = RECURRENCES[operator]
        given = {name: x for name, x in inputs.items() if x is not None}
        arrays = {name: np.asarray(given[name], np.float64) for name in self.recurrence.inputs}
        batch, self.length, self.key_heads, width = arrays["k"].shape
        scale = options.get("scale")
        self.scale = width**-0.5 if scale is None else scale
        self.centered = options.get("centered", True)
        self.value_heads = arrays["v"].shape[2] if "v" in arrays else self.key_heads
        for name in ("q", "k"):
            arrays[name] = np.repeat(arrays[name], self.value_heads // self.key_heads, axis=2)

        self.decay_shape = None
        decay = np.ones((batch, self.length, self.value_heads, 1))
        if "log_decay" in given:
            log_decay = np.asarray(given["log_decay"], np.float64)
            self.decay_shape = log_decay.shape
            decay = np.exp(log_decay.reshape(batch, self.length, self.value_heads, -1))
        if "segment_ids" in given:
            ids = np.asarray(given["segment_ids"])
            decay[:, 1:][ids[:, 1:] != ids[:, :-1]] = 0
        self.arrays = arrays | {"decay": decay}

        heads = (batch, self.value_heads)
        value_width = arrays["v"].shape[-1] if "v" in arrays else 0
        shapes: dict[str, tuple[int, ...]] = {"state": (*heads, width, value_width)}
        shapes |= {"count": heads, "key_sum": (*heads, width), "key_outer": (*heads, width, width)}
        self.has_initial_state = "initial_state" in given
        if self.has_initial_state:
            self.initial = _unpack(self.recurrence, given["initial_state"])
        else:
            self.initial = {name: np.zeros(shapes[name]) for name in self.recurrence.states}

    def token(self, t: int) -> Arrays:
        token = {name: x[:, t] for name, x in self.arrays.items()}
        return token | {"scale": np.array(self.scale), "centered": np.array(float(self.centered))}

    def as_given(self, grads: Arrays, d_initial: Arrays) -> dict[str, Any]:
        """Gradients of the inputs as they were given: key heads summed over their group, log_decay in its own shape."""
        for name in ("q", "k"):
            split = (*grads[name].shape[:2], self.key_heads, -1, grads[name].shape[-1])
            grads[name] = grads[name].reshape(split).sum(3)
        d_decay = grads.pop("log_decay")
        if self.decay_shape is not None:
            if self.arrays["decay"].shape[-1] == 1:
                d_decay = d_decay.sum(-1)
            grads["log_decay"] = d_decay.reshape(self.decay_shape)
        if self.has_initial_state:
            grads["initial_state"] = _pack(self.recurrence, d_initial)
        return grads


def _pack(recurrence: Recurrence, state: Arrays) -> Any:
    parts = tuple(state[name] for name in recurrence.states)
    return parts[0] if len(parts) == 1 else parts


def _unpack(recurrence: Recurrence, state: Any) -> Arrays:
    parts = state if isinstance(state, tuple) else (state,)
    arrays = (np.asarray(x, np.float64) for x in parts)
    return dict(zip(recurrence.states, arrays, strict=True))


def _read(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return np.einsum("bhkv,bhv->bhk", matrix, vector)


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return np.swapaxes(matrix, -1, -2)


def _outer(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left[..., :, None] * right[..., None, :]


def _gla_step(state: Arrays, x: Arrays) -> tuple[Arrays, np.ndarray]:
    new = x["decay"][..., None] * state["state"] + _outer(x["k"], x["v"])
    return {"state": new}, x["scale"] * _read(_transposed(new), x["q"])


def _gla_adjoint(
    state: Arrays, x: Arrays, d_out: np.ndarray, d_state: Arrays
) -> tuple[Arrays, Arrays]:
    decayed = x["decay"][..., None] * state["state"]
    new = decayed + _outer(x["k"], x["v"])
    d_new = d_state["state"] + x["scale"] * _outer(x["q"], d_out)
    d_token = {
        "q": x["scale"] * _read(new, d_out),
        "k": _read(d_new, x["v"]),
        "v": _read(_transposed(d_new), x["k"]),
        "log_decay": (d_new * decayed).sum(-1),
    }
    return {"state": x["decay"][..., None] * d_new}, d_token


def _gdn_step(state: Arrays, x: Arrays) -> tuple[Arrays, np.ndarray]:
    decayed = x["decay"][..., None] * state["state"]
    error = x["v"] - _read(_transposed(decayed), x["k"])
    new = decayed + x["beta"][..., None, None] * _outer(x["k"], error)
    return {"state": new}, x["scale"] * _read(_transposed(new), x["q"])


def _gdn_adjoint(
    state: Arrays, x: Arrays, d_out: np.ndarray, d_state: Arrays
) -> tuple[Arrays, Arrays]:
    k, beta = x["k"], x["beta"][..., None]
    decayed = x["decay"][..., None] * state["state"]
    error = x["v"] - _read(_transposed(decayed), k)
    new = decayed + beta[..., None] * _outer(k, error)
    d_new = d_state["state"] + x["scale"] * _outer(x["q"], d_out)
    d_write = _read(_transposed(d_new), k)
    d_error = beta * d_write
    d_decayed = d_new - _outer(k, d_error)
    d_token = {
        "q": x["scale"] * _read(new, d_out),
        "k": beta * _read(d_new, error) - _read(decayed, d_error),
        "v": d_error,
        "beta": (d_write * error).sum(-1),
        "log_decay": (d_decayed * decayed).sum((-2, -1))[..., None],
    }
    return {"state": x["decay"][..., None] * d_decayed}, d_token


def _ccq_state(state: Arrays, x: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    decay = x["decay"]
    count = decay[..., 0] * state["count"] + 1
    key_sum = decay * state["key_sum"] + x["k"]
    key_outer = decay[..., None] * state["key_outer"] + _outer(x["k"], x["k"])
    return count, key_sum, key_outer


def _ccq_step(state: Arrays, x: Arrays) -> tuple[Arrays, np.ndarray]:
    count, key_sum, key_outer = _ccq_state(state, x)
    n = count[..., None]
    mean_q = (key_sum * x["q"]).sum(-1, keepdims=True) / n
    read = _read(key_outer, x["q"]) / n - x["centered"] * key_sum / n * mean_q
    new = {"count": count, "key_sum": key_sum, "key_outer": key_outer}
    return new, x["q"] - x["lam"][..., None] * read


def _ccq_adjoint(
    state: Arrays, x: Arrays, d_out: np.ndarray, d_state: Arrays
) -> tuple[Arrays, Arrays]:
    count, key_sum, key_outer = _ccq_state(state, x)
    n, mean, centered = count[..., None], key_sum / count[..., None], x["centered"]
    d_read = -x["lam"][..., None] * d_out
    mean_q = (mean * x["q"]).sum(-1, keepdims=True)
    mean_d = (mean * d_read).sum(-1, keepdims=True)
    outer_q, outer_d = _read(key_outer, x["q"]), _read(key_outer, d_read)
    read = outer_q / n - centered * mean * mean_q
    d_outer = d_state["key_outer"] + _outer(d_read, x["q"]) / n[..., None]
    d_sum = d_state["key_sum"] - centered * (d_read * mean_q + x["q"] * mean_d) / n
    d_count = d_state["count"] - ((d_read * outer_q).sum(-1) / count**2)
    d_count = d_count + (2 * centered * mean_q * mean_d / n)[..., 0]
    log_decay = d_count * (count - 1) + (d_sum * (key_sum - x["k"])).sum(-1)
    decay = x["decay"]
    old_outer = decay[..., None] * state["key_outer"]
    d_token = {
        "q": d_out + outer_d / n - centered * mean * mean_d,
        "k": _read(d_outer + _transposed(d_outer), x["k"]) + d_sum,
        "lam": -(d_out * read).sum(-1),
        "log_decay": (log_decay + (d_outer * old_outer).sum((-2, -1)))[..., None],
    }
    before = {
        "count": decay[..., 0] * d_count,
        "key_sum": decay * d_sum,
        "key_outer": decay[..., None] * d_outer,
    }
    return before, d_token


RECURRENCES = {
    "ccq_query": Recurrence(
        ("q", "k", "lam"), ("count", "key_sum", "key_outer"), _ccq_step, _ccq_adjoint
    ),
    "gated_linear_attention": Recurrence(("q", "k", "v"), ("state",), _gla_step, _gla_adjoint),
    "gated_delta_rule": Recurrence(("q", "k", "v", "beta"), ("state",), _gdn_step, _gdn_adjoint),
}
