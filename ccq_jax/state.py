"""What a model has read, as a value: kept, copied, saved to a file, and continued.

A linear model's state has one size however long the text was that it stands for, and so has its
file: a long prefix that many prompts share is read once.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ccq_jax.cache import Cache

FORMAT = "ccq_jax state 1"
# Fields of `config.model` that say how a state is computed or how the parameters began, not what it is.
_FREE = ("implementation", "chunk_size", "remat", "initializer_range")


class State(NamedTuple):
    """Of a batch of texts, after their last tokens."""

    cache: Cache
    logits: Float[Array, "B N"]  # of the next token, float32
    tokens: Int[np.ndarray, " B"]  # read so far, in each row

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.tokens)


def fingerprint(config: dict[str, Any], params: Any) -> str:
    """Identifies a model: its configuration, and some of every parameter's values."""
    kept = {name: value for name, value in config.items() if name not in _FREE}
    kept["ccq"] = {name: value for name, value in config["ccq"].items() if name != "bias_init"}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for name, x in sorted((_name(path, ".").removesuffix(".value"), x) for path, x in leaves):
        sample = np.asarray(x.reshape(-1)[:: max(1, x.size // 256)], np.float32)
        digest.update(name.encode() + sample.tobytes())
    return digest.hexdigest()[:32]


def map_rows(f: Callable[..., Any], cache: Cache, *others: Cache) -> Cache:
    """`f(axis, x, *others)` of every array that has the batch on an axis; `length` is the first's."""
    layers = jax.tree.map(lambda *x: f(1, *x), cache.layers, *(c.layers for c in others))
    segment = f(0, cache.segment, *(c.segment for c in others))
    position = f(0, cache.position, *(c.position for c in others))
    return Cache(layers, segment, position, cache.length)


def copy_rows(state: State, count: int) -> State:
    """A state of one row as a batch of `count` rows; one of `count` rows as it is.

    Raises:
      ValueError: the state has another number of rows.
    """
    if state.batch_size not in (1, count):
        raise ValueError(
            f"the state has {state.batch_size} rows and there are {count} prompts: it must have "
            "one row, for all of them, or a row for each"
        )
    if state.batch_size == count:
        return state
    cache = map_rows(lambda axis, x: jnp.repeat(x, count, axis), state.cache)
    return State(cache, jnp.repeat(state.logits, count, 0), np.repeat(state.tokens, count))


def save_state(state: State, path: str | Path, identity: str) -> None:
    """Writes a state; `identity` is the `fingerprint` of the model that it belongs to."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    metadata = {"format": FORMAT, "model": identity}
    save_file(_flat(state), temporary, metadata=metadata)
    temporary.replace(path)


def load_state(
    path: str | Path, identity: str, init_cache: Callable[[int, int], Cache], vocab_size: int
) -> State:
    """What `save_state` wrote.

    Args:
      path: of the file.
      identity: the `fingerprint` of the model that is to continue it.
      init_cache: that model's, for the shapes.
      vocab_size: of that model's logits.

    Raises:
      ValueError: the file is damaged, no state, or the state of another model.
      FileNotFoundError: there is no such file.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no state {path}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT or np.ndim(arrays.get("tokens", 0)) != 1:
        raise ValueError(f"{path} is no state: its format is {metadata.get('format')!r}")
    if metadata.get("model") != identity:
        raise ValueError(f"{path} is the state of another model, or of another checkpoint")
    like = _like(arrays, init_cache, vocab_size)
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [_name(key) for key, _ in flat]
    wrong = sorted(set(names) ^ set(arrays))
    wrong += [
        name
        for name, (_, x) in zip(names, flat, strict=True)
        if name in arrays and (arrays[name].shape, arrays[name].dtype) != (x.shape, x.dtype)
    ]
    if wrong:
        raise ValueError(f"{path} does not fit the model in {', '.join(wrong)}")
    state: State = jax.tree.unflatten(structure, [arrays[name] for name in names])
    return state._replace(
        cache=jax.tree.map(jnp.asarray, state.cache), logits=jnp.asarray(state.logits)
    )


def _like(arrays: dict[str, np.ndarray], init_cache: Any, vocab_size: int) -> State:
    """The shapes of a state of as many rows (and, for attention, as much room) as the file's."""
    rows = len(arrays["tokens"])
    keys = arrays.get("cache/layers/key")
    room = keys.shape[2] if keys is not None and keys.ndim > 2 else 1
    cache = jax.eval_shape(lambda: init_cache(rows, room))
    logits = jnp.broadcast_to(jnp.float32(0), (rows, vocab_size))
    return State(cache, logits, np.zeros(rows, np.int32))


def _flat(state: State) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_name(path): np.asarray(x, order="C") for path, x in leaves}


def _name(path: Any, separator: str = "/") -> str:
    return jax.tree_util.keystr(path, simple=True, separator=separator)
