"""Tokenised documents in ArrayRecord shards, for text too large to tokenise at start-up.

A folder holds shards, `NAME-00000.arrayrecord` and on, whose records are one document each: its
token ids as little-endian uint16 or uint32, without end of document. `index.json` beside them says
which, and which tokeniser gave them; `SHARD.lengths.npy` holds the number of tokens of each
document, so that no token is read to lay out the rows.
"""

import itertools
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import grain
import numpy as np
from array_record.python import array_record_module
from jaxtyping import Int

from ccq_jax.data.documents import token_dtype
from ccq_jax.data.sources import Source, match_files
from ccq_jax.data.tokenizer import Tokenizer

FORMAT = "ccq_jax tokens 1"
INDEX = "index.json"
_LENGTHS = ".lengths.npy"


class ArrayRecordDocuments:
    """Documents of the shards that an `arrayrecord:GLOB` source matches.

    Raises:
      ValueError: no shard matches, a shard without its index, another tokeniser's ids, or a shard
        whose number of records is not the index's; from `read`, a damaged record.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer):
        self._source = source
        self._paths = check_shards(source, tokenizer)
        index = _read_index(source, self._paths[0].parent)
        self._dtype = np.dtype(index["dtype"])
        self._vocab_size = tokenizer.vocab_size
        lengths = [_read_lengths(source, path) for path in self._paths]
        self._records = self._open(lengths)
        self.lengths = np.concatenate(lengths)
        self.hashes = np.concatenate(
            [_hashes(p.name, len(n)) for p, n in zip(self._paths, lengths, strict=True)]
        )

    def _open(self, lengths):
        try:
            records = grain.sources.ArrayRecordDataSource([str(path) for path in self._paths])
        except Exception as error:  # the reader raises whatever its C++ status maps to
            raise self._source.error(f"a shard is damaged: {error}") from error
        if len(records) != sum(map(len, lengths)):
            raise self._source.error(
                f"the shards hold {len(records)} records, their indices say "
                f"{sum(map(len, lengths))}; write them again with ccq_jax.data.prepare"
            )
        return records

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Tokens start to stop of a document."""
        try:
            record = self._records[int(document)]
        except Exception as error:
            raise self._source.error(f"document {document} cannot be read: {error}") from error
        expected = int(self.lengths[document]) * self._dtype.itemsize
        if len(record) != expected:
            raise self._source.error(
                f"document {document} holds {len(record)} bytes, the index says {expected}"
            )
        tokens = np.frombuffer(record, self._dtype)[start:stop]
        if tokens.size and tokens.max() >= self._vocab_size:
            raise self._source.error(
                f"document {document} holds token {tokens.max()}; the tokeniser has "
                f"{self._vocab_size}"
            )
        return tokens


def check_shards(source: Source, tokenizer: Tokenizer) -> list[Path]:
    """The shards of a source, after a look at their indices.

    Raises:
      ValueError: no shard matches, a shard without its index, or another tokeniser's ids.
    """
    matched = [file.path for file in match_files(source)]
    paths = [p for p in matched if p.name != INDEX and not p.name.endswith(_LENGTHS)]
    if not paths:
        raise source.error("no shard matches")
    for path in paths:
        if not lengths_path(path).is_file():
            raise source.error(
                f"{path} has no {lengths_path(path).name} beside it; it must be a shard that "
                f"ccq_jax.data.prepare wrote"
            )
    for folder in sorted({path.parent for path in paths}):
        index = _read_index(source, folder)
        if index["tokenizer_fingerprint"] != tokenizer.fingerprint:
            raise source.error(
                f"{folder} holds ids of tokeniser {index['tokenizer']!r}, data.tokenizer is "
                f"{tokenizer.name!r}; they must be the same"
            )
    return paths


def lengths_path(shard: Path) -> Path:
    """Where a shard's document lengths are."""
    return shard.with_name(shard.name + _LENGTHS)


def write_shards(
    documents: Iterable[Int[np.ndarray, " n"]],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    name: str = "tokens",
    shard_tokens: int = 100_000_000,
) -> int:
    """Writes token ids as shards with their index; the index comes last, so it means complete.

    Args:
      documents: token ids of each document, without end of document.
      folder: made if need be; must be empty.
      tokenizer: what gave the ids; the index names it.
      name: shards are called NAME-00000.arrayrecord and on.
      shard_tokens: a shard ends with the document that reaches this many tokens.

    Returns:
      The number of shards.

    Raises:
      ValueError: the folder is not empty, or there is no document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty; give a new folder (a run that was broken off left no {INDEX})"
        )
    dtype = token_dtype(tokenizer.vocab_size)
    pending = iter(documents)
    shard = 0
    for shard in itertools.count():
        path = folder / f"{name}-{shard:05d}.arrayrecord"
        if not _write_shard(pending, path, dtype, shard_tokens):
            break
    if not shard:
        raise ValueError(f"{folder}: there is no document to write")
    index = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return shard


def _write_shard(documents, path: Path, dtype: np.dtype, shard_tokens: int) -> bool:
    """Writes one shard; False, and no file, where no document is left."""
    lengths: list[int] = []
    left = shard_tokens
    writer = None
    for ids in documents:
        # One record a group: rows read single documents in random order.
        writer = writer or array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        writer.write(ids.astype(dtype).tobytes())
        lengths.append(len(ids))
        left -= len(ids)
        if left <= 0:
            break
    if writer is None:
        return False
    writer.close()
    np.save(lengths_path(path), np.array(lengths, np.uint32))
    return True


def _read_index(source: Source, folder: Path) -> dict:
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise source.error(f"{folder / INDEX} cannot be read: {error}") from error
    found = index.get("format") if isinstance(index, dict) else None
    if found != FORMAT:
        raise source.error(f"{folder / INDEX} has format {found!r}; it must be {FORMAT!r}")
    return index


def _read_lengths(source: Source, shard: Path) -> np.ndarray:
    try:
        lengths = np.load(lengths_path(shard), allow_pickle=False)
        if lengths.ndim != 1 or lengths.dtype != np.uint32 or not lengths.all():
            raise ValueError("it must be a list of uint32 above 0")
    except (OSError, ValueError) as error:
        raise source.error(f"{lengths_path(shard)} cannot be read: {error}") from error
    return lengths


def _hashes(name: str, count: int) -> np.ndarray:
    """A hash of shard name and record number (splitmix64), made without reading the records."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
