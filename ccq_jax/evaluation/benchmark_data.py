"""Where the benchmarks' examples come from: copies in a folder, else the Hugging Face hub.

A copy of the dataset OWNER/NAME lies in DATA_DIR/OWNER/NAME: the files of the hub as they are, what
`datasets` saves to disk, or a file SPLIT.jsonl, below a folder CONFIG where there are several:

    hf download --repo-type dataset OWNER/NAME --local-dir DATA_DIR/OWNER/NAME

Only data files are read (JSON, text, Parquet, Arrow, the first two also in a zip): no code of a dataset
is run and nothing is unpickled.
"""

import dataclasses
import functools
import gzip
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import zstandard

Row = dict[str, Any]

_TEXT = (".jsonl", ".json", ".txt")
_TABLES = (".parquet", ".arrow")
_ENDINGS = (*(kind + packed for kind in _TEXT for packed in ("", ".gz", ".zst")), *_TABLES)
# What `datasets` and the hub leave beside the examples.
_NOT_EXAMPLES = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
_CONVERTED = "refs/convert/parquet"  # the hub's own copy of datasets that consist of a script


class MissingDataError(ValueError):
    """A dataset is in no place that was looked at; the message says where to put a copy."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset of the hub.

    Attributes:
      name: OWNER/NAME.
      split: "" where the files' names say none.
      config: "" where there is one only.
    """

    name: str
    split: str = ""
    config: str = ""

    def __str__(self) -> str:
        parts = ("config", self.config), ("split", self.split)
        notes = ", ".join(f"{what} {value}" for what, value in parts if value)
        return self.name + (f" ({notes})" if notes else "")

    def owns(self, path: str) -> bool:
        """Whether the file at `path` in the dataset's folder holds examples of this split."""
        *folders, file = PurePosixPath(path).parts
        ending = next((end for end in _ENDINGS if file.endswith(end)), None)
        if ending is None or file in _NOT_EXAMPLES or any(f.startswith(".") for f in folders):
            return False
        stem = file.removesuffix(ending)
        if self.config and stem == self.config:  # LongBench: a file a task
            return True
        if self.config and self.config not in folders and not set(folders) <= {"data", self.split}:
            return False
        named = re.match(rf"{re.escape(self.split)}([-_.]|$)", stem)
        return not self.split or named is not None or self.split in folders


@dataclasses.dataclass(frozen=True)
class Found:
    """The files of a dataset.

    Attributes:
      dataset: what was looked for.
      files: where it is; `members` are the files inside them that are meant, if they are zips.
    """

    dataset: Dataset
    files: tuple[Path, ...]
    members: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """Changes when a file does."""
        digest = hashlib.sha256(str((self.dataset, self.members)).encode())
        for file in self.files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()[:16]

    def rows(self, limit: int = 0) -> list[Row]:
        """The examples, the first `limit` of them if it is not 0.

        Raises:
          ValueError: a file that cannot be read, or no example.
        """
        rows: list[Row] = []
        for row in self.stream():
            rows.append(row)
            if len(rows) == limit:
                break
        if not rows:
            raise ValueError(f"{self.dataset}: {self.files[0].parent} holds no example")
        return rows

    def stream(self) -> Iterator[Row]:
        """The examples, one at a time; raises as `rows`."""
        for file in self.files:
            try:
                if self.members:
                    with zipfile.ZipFile(file) as archive:
                        for member in self.members:
                            yield from _read(member, archive.read(member))
                else:
                    yield from _read_file(file)
            except (OSError, EOFError, zipfile.BadZipFile, zstandard.ZstdError) as error:
                raise ValueError(f"{self.dataset}: {file} cannot be read: {error}") from error
            except ValueError as error:
                raise ValueError(f"{self.dataset}: {file}: {error}") from error


class DataFolder:
    """The folder of copies, and the hub behind it.

    Args:
      folder: DATA_DIR; None: only the hub.
      hub: whether to fetch what has no copy.

    Raises:
      ValueError: there is no such folder.
    """

    def __init__(self, folder: str | Path | None, *, hub: bool = True):
        self.folder = Path(folder).expanduser() if folder else None
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"data_dir is {folder}: there is no such folder")
        self._unreachable = "" if hub else "the hub is not asked"

    def find(self, dataset: Dataset) -> Found:
        """The files of a dataset.

        Raises:
          MissingDataError: there is no copy, and none can be fetched.
        """
        if self.folder is not None:
            place = self.folder / dataset.name
            paths = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else []
            names = {p.relative_to(place).as_posix(): p for p in paths}
            found = _choose(dataset, list(names), names.__getitem__)
            if found is not None:
                return found
        return self._fetch(dataset)

    def _fetch(self, dataset: Dataset) -> Found:
        try:
            from huggingface_hub import HfApi, hf_hub_download

            if self._unreachable:
                raise OSError(self._unreachable)
            for revision in ("main", _CONVERTED):
                info = HfApi().dataset_info(dataset.name, revision=revision, timeout=10)
                names = [sibling.rfilename for sibling in info.siblings or ()]
                fetch = functools.partial(
                    hf_hub_download, dataset.name, repo_type="dataset", revision=revision
                )
                found = _choose(dataset, names, lambda name: Path(fetch(name)))  # noqa: B023
                if found is not None:
                    return found
            problem = "the hub has no data file of it"
        except Exception as error:  # of the client's many kinds, none may end the other parts
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if not re.search(r"40[134]|NotFound|Gated", problem):
                self._unreachable = self._unreachable or problem
                problem = self._unreachable
        raise MissingDataError(self._instructions(dataset, problem))

    def _instructions(self, dataset: Dataset, problem: str) -> str:
        place = f"{self.folder or 'DATA_DIR'}/{dataset.name}"
        given = "" if self.folder else " of --data_dir=DATA_DIR"
        return f"{dataset}: put a copy into {place}{given}; it could not be fetched ({problem})"


def _choose(dataset: Dataset, names: Sequence[str], locate: Callable[[str], Path]) -> Found | None:
    """The files among `names` that hold the dataset's examples."""
    chosen = [name for name in names if dataset.owns(name)]
    exact = [name for name in chosen if dataset.config in PurePosixPath(name).parts]
    if chosen:
        return Found(dataset, tuple(locate(name) for name in exact or chosen))
    for name in names:
        if PurePosixPath(name).name in ("data.zip", f"{dataset.config}.zip"):
            archive = locate(name)
            with zipfile.ZipFile(archive) as opened:
                members = tuple(m for m in opened.namelist() if dataset.owns(m))
            if members:
                return Found(dataset, (archive,), members)
    return None


def _read_file(path: Path) -> Iterator[Row]:
    if path.name.endswith(_TABLES):
        yield from _read_table(path)
    elif ".jsonl" in path.name or path.name.endswith((".json.gz", ".json.zst")):
        with _opened(path) as stream:
            yield from _json_lines(stream)
    else:
        with _opened(path) as stream:
            yield from _read(path.name, stream.read())


def _opened(path: Path) -> Any:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return zstandard.open(path, "rb")
    return path.open("rb")


def _read(name: str, data: bytes) -> Iterator[Row]:
    if ".jsonl" in name:
        yield from _json_lines(io.BytesIO(data))
    elif ".txt" in name:
        yield {"text": data.decode("utf-8-sig")}
    else:
        value = json.loads(data)
        if isinstance(value, dict) and isinstance(value.get("data"), list):
            value = value["data"]
        yield from map(_checked, value if isinstance(value, list) else [value])


def _json_lines(stream: Any) -> Iterator[Row]:
    for line in stream:
        if line.strip():
            yield _checked(json.loads(line))


def _checked(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"an example is {type(row).__name__}: it must be an object")
    return row


def _read_table(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet and Arrow need: pip install 'ccq_jax[eval]'") from None
    try:
        if path.name.endswith(".parquet"):
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
            return
        with pyarrow.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"no Parquet or Arrow file: {error}") from error


def field(row: Row, *names: str) -> Any:
    """The first of the fields `names` that an example has.

    Raises:
      ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"an example has the fields {', '.join(row)}: it needs {' or '.join(names)}")
