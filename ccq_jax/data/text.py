"""Reads the documents of text files, packed or not."""

import functools
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from ccq_jax.data.sources import Source, TextFile

_CHUNK = 1 << 18


def read_documents(source: Source, file: TextFile) -> Iterator[tuple[str, bytes, int]]:
    """Documents of one file that hold any text.

    Yields:
      The text, the bytes whose hash decides whether the document is held out (its path in
      `stdlib`, its text elsewhere, so that copies of a document are held out together), and the
      number of bytes of the file read so far.

    Raises:
      ValueError: text that is not UTF-8 (in `stdlib` it becomes U+FFFD), a damaged archive, or a
        line without a text, with the file and line.
    """
    with file.path.open("rb") as raw:
        if source.kind == "stdlib":
            text = raw.read().decode("utf-8", errors="replace")
            if text:
                yield text, file.key.encode(), raw.tell()
            return
        try:
            for text in _texts(source, file.path, _unpacked(file.path, raw)):
                if text:
                    yield text, text.encode("utf-8", "surrogatepass"), raw.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise source.error(f"{file.path} is damaged or cut short: {error}") from error


def _texts(source: Source, path: Path, stream) -> Iterator[str]:
    if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
        yield _decode(source, path, stream.read(), "")
        return
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            yield _parse_line(source, path, number, line)


def _parse_line(source: Source, path: Path, number: int, line: bytes) -> str:
    text = _decode(source, path, line, f":{number}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise source.error(f"{path}:{number} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise source.error(f'{path}:{number} needs a field "text" that is a string; has {found}')
    return value["text"]


def _decode(source: Source, path: Path, data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig" if where in ("", ":1") else "utf-8")
    except UnicodeDecodeError as error:
        raise source.error(
            f"{path}{where} is not UTF-8: {error.reason} at byte {error.start}; convert it first"
        ) from error


def content_key(files: list[TextFile], *settings: str) -> str:
    """A hash of the files' contents and names, and of what else decides their token ids."""
    digest = hashlib.blake2b(digest_size=16)
    for setting in settings:
        digest.update(setting.encode() + b"\0")
    for file in files:
        status = file.path.stat()
        content = _file_digest(file.path, status.st_size, status.st_mtime_ns)
        digest.update(file.path.name.encode() + b"\0" + content)
    return digest.hexdigest()


@functools.cache
def _file_digest(path: Path, size: int, modified: int) -> bytes:
    """Hash of a file's content, computed once in a process while size and time stay the same."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()


def _unpacked(path: Path, raw: BinaryIO) -> io.BufferedIOBase | BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.name.endswith(".zst"):
        return io.BufferedReader(_ZstdFrames(raw), _CHUNK)
    return raw


class _ZstdFrames(io.RawIOBase):
    """Joined zstd frames; zstandard's own reader takes a file cut short for a whole one."""

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False  # a frame has begun and not ended
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._raw.read(_CHUNK)
            if not packed:
                if self._inside:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._ready = b"".join(self._unpack(packed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> Iterator[bytes]:
        while packed:
            yield self._frame.decompress(packed)
            self._inside = not self._frame.eof
            packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
