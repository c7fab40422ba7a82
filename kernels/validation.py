"""Checks of an operator's arguments. Every message names the argument, its value and what would be right."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

DTYPES = ("float32", "bfloat16", "float16")


def check_array(operator: str, sizes: dict[str, int], name: str, value: Any, dims: str) -> None:
    """Checks that `value` has the dimensions `dims`, such as "B T H K", and a floating dtype.

    Args:
      operator: the operator's name, for the message.
      sizes: sizes by letter; a letter seen for the first time is bound to this array's size.
      name: the argument's name, for the message.
      value: the argument.
      dims: one letter (or a number) a dimension.

    Raises:
      TypeError: not an array, or not of a supported floating dtype.
      ValueError: another rank or another size than the arguments before it set, or an empty dimension.
    """
    _check_dims(operator, sizes, name, value, dims)
    if str(value.dtype) not in DTYPES:
        raise TypeError(
            f"{operator}: {name} has dtype {value.dtype}; expected one of {', '.join(DTYPES)}"
        )


def _check_dims(operator: str, sizes: dict[str, int], name: str, value: Any, dims: str) -> None:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{operator}: {name} is {type(value).__name__}; expected an array [{dims}]")
    letters = dims.split()
    want = ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in letters)
    wrong = f"{operator}: {name} has shape {tuple(value.shape)}; expected [{want}]"
    if value.ndim != len(letters):
        raise ValueError(f"{wrong}, {len(letters)} dimensions")
    for letter, size in zip(letters, value.shape, strict=True):
        bound = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
        if size != bound:
            raise ValueError(
                f"{wrong}: {letter} is {size} here and {bound} in the arguments before"
            )
        if size < 1:
            raise ValueError(f"{wrong}: {letter} must be at least 1")


def check_chunk_size(operator: str, chunk_size: int | None) -> None:
    """Raises ValueError unless `chunk_size` is None or a power of two from 16 to 256."""
    if chunk_size is None:
        return
    is_int = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if not is_int or chunk_size not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"{operator}: chunk_size is {chunk_size!r}; expected None or one of 16, 32, 64, 128, 256"
        )


def check_scale(operator: str, scale: float | None, width: int) -> float:
    """Returns `scale` as a Python float, `width ** -0.5` for None; raises TypeError if it is no number."""
    if scale is None:
        return width**-0.5
    try:
        return float(scale)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"{operator}: scale is {scale!r}; expected None or a Python number, known before tracing"
        ) from error


def check_segments(operator: str, sizes: dict[str, int], segment_ids: Any) -> None:
    """Raises unless `segment_ids` is an integer array [B, T]."""
    _check_dims(operator, sizes, "segment_ids", segment_ids, "B T")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(
            f"{operator}: segment_ids has dtype {segment_ids.dtype}; expected an integer dtype"
        )


def segment_starts(segment_ids: Array) -> Bool[Array, "B T"]:
    """True where a token's id differs from the token before. A call's first token continues the given state."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)))
