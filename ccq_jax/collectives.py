"""What a compiled program moves between devices, read from its HLO."""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALL = re.compile(
    r"\b(body|calls|to_apply|branch_computations|called_computations)"
    r"=\{?(%[\w.\-]+(?:, *%[\w.\-]+)*)"
)
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\(")


class Traffic(NamedTuple):
    """Of one kind of collective in one step of one device."""

    kind: str
    count: int  # type: ignore[assignment]  # times it runs; it hides tuple.count
    bytes: int  # of its results; of all that is summed, for reduce-scatter


def traffic(hlo: str) -> list[Traffic]:
    """Collectives by kind, the most bytes first. What a loop repeats counts as often as it runs.

    Args:
      hlo: a compiled program's text, of one device.
    """
    computations, entry = _computations(hlo)
    runs = _runs(computations, entry)
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for name, lines in computations.items():
        for kind, size in _collectives(name, lines):
            counts[kind] += runs[name]
            sizes[kind] += runs[name] * size
    found = [Traffic(kind, counts[kind], sizes[kind]) for kind in counts if counts[kind]]
    return sorted(found, key=lambda x: -x.bytes)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, by name, and the name of the first to run."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        start = _COMPUTATION.match(line)
        if start and not line.startswith(" "):
            lines = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return computations, entry


def _runs(computations: dict[str, list[str]], entry: str) -> collections.Counter[str]:
    """How often each computation runs."""
    runs: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in computations.get(name, []):
            for role, names in _CALL.findall(line):
                trips = _trips(line, computations) if role == "body" else 1
                for called in names.replace("%", "").split(","):
                    visit(called.strip(), times * trips)

    visit(entry, 1)
    return runs


def _trips(loop: str, computations: dict[str, list[str]]) -> int:
    """How often a loop's body runs: as the compiler knows, or what its counter is compared to."""
    known, condition = _KNOWN_TRIPS.search(loop), _CONDITION.search(loop)
    if known:
        return int(known[1])
    lines = computations.get(condition[1], []) if condition else []
    return max((int(n) for line in lines for n in _BOUND.findall(line)), default=1)


def _collectives(name: str, lines: list[str]) -> Iterator[tuple[str, int]]:
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found is None or found[2].removesuffix("-start") not in KINDS:
            continue
        kind = found[2].removesuffix("-start")
        sizes = [_size(dtype, dims) for dtype, dims in _ARRAY.findall(found[1])]
        if kind == "reduce-scatter":
            sizes = [size * _group_size(line) for size in sizes]
        if name.startswith("all-reduce-scatter"):  # TPUs': a sum of which each keeps its part
            kind = "reduce-scatter"
        # A started one lists operands and results: the largest array is what moves.
        yield kind, max(sizes) if found[2].endswith("-start") else sum(sizes)


def _group_size(line: str) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if mesh:
        sizes = dict(axis.split("=") for axis in mesh[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in mesh[2].split(","))
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(groups[1].split(",")) if groups else 1


def _size(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * max(bits, 8) // 8
