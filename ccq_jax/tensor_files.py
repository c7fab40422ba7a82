"""Folders of safetensors files: read one tensor at a time, written one tensor at a time.

A folder holds `model.safetensors`, or several files with `model.safetensors.index.json`, which
names the file of every tensor. Nothing else is ever opened: pickles run code when they are loaded.
The format: https://github.com/huggingface/safetensors#format
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
SHARD_BYTES = 5_000_000_000


class Entry(NamedTuple):
    """A tensor of a folder."""

    file: str
    dtype: str  # as safetensors writes it: "F32"
    shape: tuple[int, ...]


class TensorFolder:
    """The tensors of a folder; a context manager that keeps its files open, mapped into memory.

    Raises:
      FileNotFoundError: there is no such folder, or a file of it is missing.
      ValueError: an index that is not one or that leads out of the folder, a file that is damaged
        or no safetensors, or a file and the index that do not name the same tensors. All that is
        found is listed.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self._problems: list[str] = []
        index = self._index()
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._open(file)
        if index is not None:
            self._compare(index)
        if self._problems:
            self._stack.close()
            lines = "\n  ".join(self._problems)
            raise ValueError(f"{self.directory} cannot be read:\n  {lines}")

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor, of the file's dtype."""
        return self._files[self.entries[name].file].get_tensor(name)

    def _index(self) -> dict[str, str] | None:
        """The file of each tensor; None where there is one file."""
        if (self.directory / SINGLE).is_file():
            return None
        path = self.directory / INDEX
        if not path.is_file():
            raise FileNotFoundError(self._missing())
        try:
            found = json.loads(path.read_bytes())["weight_map"]
            files = {str(name): str(file) for name, file in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f'{path} is no index with a "weight_map": {error!r}') from error
        for file in sorted(set(files.values())):
            if not _is_plain(file):
                self._problems.append(
                    f"{INDEX} names the file {file!r}: it must be a .safetensors file of the folder"
                )
        return {name: file for name, file in files.items() if _is_plain(file)}

    def _missing(self) -> str:
        if not self.directory.is_dir():
            return f"{self.directory} is no folder"
        pickles = sorted(p.name for p in self.directory.iterdir() if p.suffix in (".bin", ".pt"))
        advice = (
            f" ({pickles[0]} is a pickle, which is never loaded: save the model as safetensors)"
            if pickles
            else ""
        )
        return f"{self.directory / SINGLE} does not exist, nor does {INDEX}{advice}"

    def _open(self, file: str) -> None:
        path = self.directory / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist, and {INDEX} names it")
        try:
            opened = self._stack.enter_context(safe_open(path, framework="np"))
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            self._problems.append(f"{file} is damaged or no safetensors file: {error}")
            return
        self._files[file] = opened
        for name, found in slices.items():
            if name in self.entries:
                other = self.entries[name].file
                self._problems.append(f"{name} lies in two files, {other} and {file}")
            self.entries[name] = Entry(file, found.get_dtype(), tuple(found.get_shape()))

    def _compare(self, index: dict[str, str]) -> None:
        for name, file in sorted(index.items()):
            if file in self._files and (
                name not in self.entries or self.entries[name].file != file
            ):
                self._problems.append(f"{name} is not in {file}, where {INDEX} puts it")
        self._problems += [
            f"{name} in {entry.file} is not in {INDEX}"
            for name, entry in sorted(self.entries.items())
            if name not in index
        ]


def _is_plain(file: str) -> bool:
    """Whether it names a safetensors file in the folder itself, on any system."""
    return file.endswith(".safetensors") and not any(c in file for c in "/\\:\0")


class Planned(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]


def write_tensors(
    directory: Path,
    plan: Sequence[Planned],
    arrays: Iterable[np.ndarray],
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder's tensors as they come, so that no more than one is held here.

    Args:
      directory: exists; safetensors files of an earlier model in it are replaced.
      plan: all that will come, in this order.
      arrays: the tensors, in the plan's order and shapes.
      dtype: "float32" or "bfloat16" (rounded to nearest).
      shard_bytes: a file is ended before it grows beyond this; one file needs no index.
    """
    code, item = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[dtype]
    shards = _cut(plan, item, shard_bytes)
    count = len(shards)
    names = [SINGLE]
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    incoming = iter(arrays)
    for file, shard in zip(names, shards, strict=True):
        temporary = directory / f"{file}.tmp"
        with temporary.open("wb") as out:
            _write_header(out, shard, code, item)
            for planned in shard:
                array = np.asarray(next(incoming))
                if array.shape != planned.shape:
                    raise ValueError(f"{planned.name} is {array.shape}, not {planned.shape}")
                out.write(np.ascontiguousarray(array, DTYPES[code]).reshape(-1).view(np.uint8).data)
        temporary.replace(directory / file)
    _write_index(directory, names, shards, item)


def _cut(plan: Sequence[Planned], item: int, shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for planned in plan:
        more = math.prod(planned.shape) * item
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += more
    return shards


def _write_header(out: BinaryIO, shard: Sequence[Planned], code: str, item: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard:
        start, end = end, end + math.prod(shape) * item
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    out.write(len(text).to_bytes(8, "little") + text)


def _write_index(directory: Path, names: list[str], shards: list[list[Planned]], item: int) -> None:
    """The index, if there are several files; what an earlier model left is removed."""
    index = directory / INDEX
    if len(names) > 1:
        total = sum(math.prod(planned.shape) * item for shard in shards for planned in shard)
        files = {p.name: file for file, s in zip(names, shards, strict=True) for p in s}
        contents = {"metadata": {"total_size": total}, "weight_map": files}
        index.write_text(json.dumps(contents, indent=2) + "\n")
    else:
        index.unlink(missing_ok=True)
    for path in _model_files(directory):
        if path.name not in names:
            path.unlink()


def _model_files(directory: Path) -> Iterator[Path]:
    yield from directory.glob(SINGLE)
    yield from directory.glob("model-*-of-*.safetensors")
