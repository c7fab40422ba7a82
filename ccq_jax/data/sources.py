"""Where rows come from: the grammar of `config.data.source`, and the files of text sources.

stdlib              the running Python's own library source
text:GLOB           .txt (one document a file) and .jsonl (one a line, in its field "text"),
                    each also .gz or .zst
arrayrecord:GLOB    documents tokenised by `python -m ccq_jax.data.prepare`
mqar, niah          generated recall tasks
0.9*stdlib,0.1*mqar a mixture; weights are shares of the rows
"""

import dataclasses
import glob
import os
import re
import sysconfig
from pathlib import Path

RECALL_TASKS = ("mqar", "niah")
_ENDINGS = tuple(kind + packed for kind in (".txt", ".jsonl") for packed in ("", ".gz", ".zst"))
_HELP = "stdlib, text:GLOB, arrayrecord:GLOB, mqar, niah, or a mixture like 0.9*stdlib,0.1*mqar"

# Left out of `stdlib`: what is not the library's own hand-written code.
_STDLIB_SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__", "lib-dynload"),  # other people's, binaries
    *("test", "tests", "idle_test"),  # not installed everywhere
    *("encodings", "pydoc_data"),  # generated tables and manual pages
}


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of a mixture."""

    kind: str  # "stdlib", "text", "arrayrecord", "mqar" or "niah"
    pattern: str = ""  # of text and arrayrecord
    weight: float = 1.0  # share of the rows
    field: str = "data.source"  # where it was written, for messages

    def __str__(self):
        return f"{self.kind}:{self.pattern}" if self.pattern else self.kind

    def error(self, problem: str) -> ValueError:
        """The error that names this source's field and value."""
        return ValueError(f"{self.field}={str(self)!r}: {problem}")


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file of documents; `key` is its name where the order of documents is decided."""

    path: Path
    key: str


def parse_source(spec: str, field: str = "data.source") -> list[Source]:
    """Reads a source or a mixture.

    Raises:
      ValueError: an unknown kind, a pattern missing, a weight that is not a number above 0, or
        weights whose sum is not 1.
    """
    parts = [part.strip() for part in spec.split(",")]
    sources = [_parse_one(part, len(parts) > 1, spec, field) for part in parts]
    total = sum(source.weight for source in sources)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"{field}={spec!r}: the weights sum to {total:g}; they must sum to 1")
    return sources


def _parse_one(part: str, in_mixture: bool, spec: str, field: str) -> Source:
    known = re.fullmatch(r"(?:([^*:]*)\*)?(stdlib|mqar|niah|(?:text|arrayrecord):.*)", part)
    if not known:
        raise ValueError(f"{field}={spec!r}: unknown source {part!r}; it takes {_HELP}")
    weight_text, name = known.groups()
    if weight_text is None and in_mixture:
        raise ValueError(f"{field}={spec!r}: {part!r} needs a weight, as in 0.5*{part}")
    try:
        weight = 1.0 if weight_text is None else float(weight_text)
    except ValueError:
        weight = -1.0
    if not 0 < weight <= 1:
        raise ValueError(
            f"{field}={spec!r}: weight {weight_text!r} of {name} must be a number above 0, up to 1"
        )
    kind, _, pattern = name.partition(":")
    if kind in ("text", "arrayrecord") and not pattern:
        raise ValueError(f"{field}={spec!r}: {kind} needs a pattern, as in {kind}:data/*")
    return Source(kind, pattern, weight, field)


def match_files(source: Source) -> list[TextFile]:
    """Files of a `text` or `arrayrecord` source, in the order of their paths.

    Raises:
      ValueError: no file matches.
    """
    pattern = os.path.expanduser(source.pattern)
    paths = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    if not paths:
        raise source.error(f"no file matches (looked from {os.getcwd()})")
    return [TextFile(Path(p), p) for p in paths]


def text_files(source: Source) -> list[TextFile]:
    """Files of a `stdlib` or `text` source in an order that the file system has no say in.

    Raises:
      ValueError: no file, or one whose name ends in something else than can be read.
    """
    if source.kind == "stdlib":
        return _stdlib_files(source)
    files = match_files(source)
    for file in files:
        if not file.path.name.endswith(_ENDINGS):
            raise source.error(f"{file.path} is none of {', '.join(_ENDINGS)}")
    return files


def _stdlib_files(source: Source) -> list[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                if path.is_file():  # not a link to nowhere
                    files.append(TextFile(path, path.relative_to(root).as_posix()))
    if not files:
        raise source.error(f"this Python's library at {root} holds no .py file; use text:GLOB")
    return sorted(files, key=lambda file: file.key)
