"""Runs train.py, and kills it with -9 at file operation number N in its workdir (0 = never).

python tests/killed.py N WORKDIR [FLAGS OF train.py]
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def main(number: int, workdir: str, flags: list[str]) -> None:
    """Counts Python's operations; those of TensorStore, in C++, happen in between."""
    counter = itertools.count(1)

    def watch(event: str, arguments: tuple) -> None:
        counts = event in OPERATIONS and any(str(a).startswith(workdir) for a in arguments)
        if counts and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    script = Path(__file__).parent.parent / "train.py"
    sys.argv = [str(script), f"--workdir={workdir}", *flags]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        print("operations:", next(counter) - 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
