"""Tokenised documents in memory, in a cache on disk, or in ArrayRecord shards.

`Documents` is what packing reads: the number of tokens of every document, and any stretch of one.
"""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from absl import logging
from jaxtyping import Int, UInt64

from ccq_jax.data.progress import progress_bar
from ccq_jax.data.sources import Source, TextFile, text_files
from ccq_jax.data.text import content_key, read_documents
from ccq_jax.data.tokenizer import Tokenizer

# Text above this many bytes of files is tokenised to disk once, and memory-mapped.
LARGE = 32 << 20

_FORMAT = "ccq_jax token cache 1"
_BATCH_CHARACTERS = 1 << 20


class Documents(Protocol):
    """Tokenised documents with random access, none of them empty."""

    lengths: Int[np.ndarray, " documents"]  # tokens of each, end of document not counted
    hashes: UInt64[np.ndarray, " documents"]  # stable; decide which are held out

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Tokens start to stop of a document."""


@dataclasses.dataclass(eq=False)
class TokenArray:
    """Documents joined in one array, which may be memory-mapped."""

    tokens: Int[np.ndarray, " tokens"]
    ends: Int[np.ndarray, " documents"]
    hashes: UInt64[np.ndarray, " documents"]

    def __post_init__(self):
        self.lengths = np.diff(self.ends, prepend=0)

    def read(self, document: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Tokens start to stop of a document."""
        first = int(self.ends[document] - self.lengths[document])
        return self.tokens[first + start : first + stop]

    def __reduce__(self):
        # Pickling a memory map, as for worker processes, would copy the whole file.
        if isinstance(self.tokens, np.memmap):
            return _open_cache, (Path(str(self.tokens.filename)).parent,)
        return TokenArray, (self.tokens, self.ends, self.hashes)


# Train and validation loaders of one process share the tokens.
_in_memory: weakref.WeakValueDictionary[str, TokenArray] = weakref.WeakValueDictionary()


def load_text(source: Source, tokenizer: Tokenizer, cache_dir: str = "") -> TokenArray:
    """Token ids of a `stdlib` or `text` source: tokenised once, cached on disk where large.

    The cache is keyed by the files' contents and the tokeniser, written beside its place and
    renamed, so processes may race for it and one that dies leaves nothing half done.

    Args:
      source: of kind "stdlib" or "text".
      tokenizer: gives the ids.
      cache_dir: folder of the caches; "" is $XDG_CACHE_HOME/ccq_jax or ~/.cache/ccq_jax.

    Raises:
      ValueError: text that cannot be read, or none at all.
    """
    files = text_files(source)
    key = content_key(files, _FORMAT, source.kind, tokenizer.fingerprint)
    documents = _in_memory.get(key)
    if documents is None:
        if sum(file.path.stat().st_size for file in files) < LARGE:
            tokens = io.BytesIO()
            ends, hashes = _tokenise(source, files, tokenizer, tokens)
            array = np.frombuffer(tokens.getbuffer(), token_dtype(tokenizer.vocab_size))
            documents = TokenArray(array, ends, hashes)
        else:
            place = _cache_root(cache_dir) / key
            if not place.exists():
                _build_cache(place, source, files, tokenizer)
            documents = _open_cache(place)
        _in_memory[key] = documents
    return documents


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def tokenised(
    source: Source, files: list[TextFile], tokenizer: Tokenizer
) -> Iterator[tuple[Int[np.ndarray, " n"], int]]:
    """Yields each document's token ids and hash, in order, with a progress bar on a terminal.

    Raises:
      ValueError: text that cannot be read, or none at all.
    """
    total = sum(file.path.stat().st_size for file in files)
    count = 0
    with progress_bar(f"tokenising {source}", total) as advance:
        for texts, hashes in _batches(source, files, advance):
            for ids, value in zip(tokenizer.encode_batch(texts), hashes, strict=True):
                if len(ids):  # a tokeniser may drop all of a text, such as lone spaces
                    count += 1
                    yield ids, value
    if not count:
        raise source.error(f"its {len(files)} files hold no text")


def _batches(
    source: Source, files: list[TextFile], advance: Callable[[int], Any]
) -> Iterator[tuple[list[str], list[int]]]:
    texts: list[str] = []
    hashes: list[int] = []
    characters = 0
    for file in files:
        position = 0
        for text, identity, read in read_documents(source, file):
            texts.append(text)
            hashes.append(stable_hash(identity))
            characters += len(text)
            if characters >= _BATCH_CHARACTERS:
                yield texts, hashes
                texts, hashes, characters = [], [], 0
                advance(read - position)
                position = read
        advance(file.path.stat().st_size - position)
    yield texts, hashes


def stable_hash(identity: bytes) -> int:
    """A 64-bit hash that is the same in every process and version of Python."""
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _tokenise(source: Source, files: list[TextFile], tokenizer: Tokenizer, sink: BinaryIO):
    """Writes the token ids to `sink`; returns where each document ends, and the hashes."""
    dtype = token_dtype(tokenizer.vocab_size)
    lengths, hashes = [], []
    for ids, value in tokenised(source, files, tokenizer):
        sink.write(ids.astype(dtype).tobytes())
        lengths.append(len(ids))
        hashes.append(value)
    ends = np.cumsum(lengths, dtype=np.int64)
    logging.info("%s: %d documents, %d tokens", source, len(ends), ends[-1])
    return ends, np.array(hashes, np.uint64)


def _cache_root(cache_dir: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache_dir or os.path.join(base, "ccq_jax")).expanduser()


def _build_cache(place: Path, source: Source, files: list[TextFile], tokenizer: Tokenizer):
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise ValueError(
            f"data.cache_dir: {place.parent} must be a folder that can be written; {error}"
        ) from error
    try:
        with (draft / "tokens.bin").open("wb") as sink:
            ends, hashes = _tokenise(source, files, tokenizer, sink)
        np.save(draft / "ends.npy", ends)
        np.save(draft / "hashes.npy", hashes)
        meta = {"format": _FORMAT, "dtype": token_dtype(tokenizer.vocab_size).str}
        (draft / "meta.json").write_text(json.dumps(meta))
        for file in draft.iterdir():  # on disk before the name says that it is
            with file.open("rb") as written:
                os.fsync(written.fileno())
        draft.rename(place)
        logging.info("token ids of %s are kept in %s", source, place)
    except OSError:
        if not place.exists():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _open_cache(place: Path) -> TokenArray:
    try:
        meta = json.loads((place / "meta.json").read_text())
        ends = np.load(place / "ends.npy", allow_pickle=False)
        hashes = np.load(place / "hashes.npy", allow_pickle=False)
        tokens = np.memmap(place / "tokens.bin", np.dtype(meta["dtype"]), "r")
        if len(tokens) != ends[-1] or len(ends) != len(hashes):
            raise ValueError(f"{len(tokens)} tokens where {ends[-1]} belong")
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"data.cache_dir: the token cache {place} is damaged ({error}); delete that folder"
        ) from error
    return TokenArray(tokens, ends, hashes)


def fingerprint(documents: Documents) -> str:
    """A hash of what the documents are, by their own hashes and lengths, and of their order."""
    digest = hashlib.blake2b(digest_size=16)
    for of_each in (documents.lengths, documents.hashes):
        digest.update(of_each.astype("<u8").tobytes())
    return digest.hexdigest()


def split_documents(
    documents: Documents, split: str, fraction: float, source: Source
) -> Int[np.ndarray, " n"]:
    """Indices of the documents of one split; the other split's never change with the seed.

    A document is held out where its hash is below `fraction` of the range; of two or more
    documents at least one is, if `fraction` is not 0, and at least one is not.

    Raises:
      ValueError: nothing is held out and validation is asked for.
    """
    hashes = documents.hashes
    held_out = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if len(hashes) > 1 and fraction > 0:
        held_out[np.argmin(hashes)] = True
        held_out[np.argmax(hashes)] = False
    elif len(hashes) == 1:
        held_out[:] = False
    chosen = np.flatnonzero(held_out if split == "validation" else ~held_out)
    if not len(chosen):
        raise source.error(
            f"no document is held out (documents: {len(hashes)}, data.validation_fraction: "
            f"{fraction:g}); give data.validation_source, or more documents"
        )
    return chosen
