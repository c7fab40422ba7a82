"""Looks for races in what Triton makes of a kernel's loops; `kernels/NOTES.md` describes them."""

import re


def overwritten_while_read(ttgir):
    """Names of the tiles whose next copy may start before the products that read them have ended.

    A tile's buffers are overwritten too early where copies run as many iterations ahead as there
    are buffers, unless the last product with it is waited for before the copy is issued.
    """
    lines = ttgir.splitlines()
    return [
        name
        for name, depth, begin, end in _buffers(lines)
        for first, last in _loops(lines)
        if begin < first < end
        and _is_race(
            lines, _uses(lines, name, begin, end), depth, range(begin, first), range(first, last)
        )
    ]


def _buffers(lines):
    """(name, number, first line, last line) of each tile's buffers; branches reuse names."""
    for at, line in enumerate(lines):
        if found := re.match(r"\s*(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", line):
            freed = re.compile(rf"\s*ttg\.local_dealloc {found[1]} ")
            later = range(at + 1, len(lines))
            end = next((i for i in later if freed.match(lines[i])), len(lines))
            yield found[1], int(found[2]), at, end


def _loops(lines):
    """(first, last) line of each innermost loop."""
    ends = {}
    for at, line in enumerate(lines):
        if found := re.match(r"(\s*)(?:%[\w:]+ = )?scf\.for", line):
            end = next(i for i in range(at, len(lines)) if lines[i].startswith(found[1] + "}"))
            ends[at] = end
    return [(at, end) for at, end in ends.items() if not any(at < other < end for other in ends)]


def _uses(lines, buffers, begin, end):
    """Lines that use one of the buffers, by an index or a view of it."""
    views, found = {buffers}, []
    for at in range(begin, end):
        line = lines[at]
        names = re.findall(r"%\w+", line)
        if not views & set(names[1:]) and not (views - {buffers}) & set(names):
            continue
        found.append(at)
        if re.search(r"= ttg\.memdesc_(index|trans|subslice)", line):
            views.add(names[0])
    return found


def _is_race(lines, uses, depth, before, loop):
    copies = [at for at in uses if "async_copy_global_to_local" in lines[at]]
    ahead = sum(at in before for at in copies)
    copies = [at for at in copies if at in loop]
    products = [at for at in uses if at in loop and "warp_group_dot " in lines[at]]
    if not copies or not products or depth > ahead:
        return False
    last = max((at for at in products if at < copies[0]), default=None)
    if last is None:
        return True
    later = 0
    for line in lines[last + 1 : copies[0]]:
        later += "warp_group_dot " in line
        waited = re.search(r"warp_group_dot_wait .*pendings = (\d+)", line)
        if waited and int(waited[1]) <= later:
            return False
    return True
