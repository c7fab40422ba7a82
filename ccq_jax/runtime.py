"""What surrounds the loop: several processes, signals, the clock, the profiler."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from absl import flags
from absl import logging as absl_logging


def initialize_distributed(distributed: bool) -> None:
    """Joins the other processes of a run.

    They are found from Slurm, Open MPI, Kubernetes or a TPU pod where `distributed` is True, and
    from JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID
    where the first is set. Otherwise this process is alone.

    Raises:
      ValueError: only some of the three variables are set.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = [os.environ.get(name) for name in names]
    if values[0] is None:
        if distributed:
            jax.distributed.initialize()
        return
    if None in values:
        raise ValueError(f"{names[0]} is set, so {names[1]} and {names[2]} must be set as well")
    address, count, index = values
    jax.distributed.initialize(address, int(count or 0), int(index or 0))


def quiet_libraries() -> None:
    """Leaves only the warnings of Orbax and Grain, unless the flag --verbosity says otherwise."""
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying; a second one acts as usual. A context manager."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def alone(self) -> int:
        """The signal that came, if no other process has to be told first; else 0."""
        return self.received if jax.process_count() == 1 else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Stopwatch:
    """Steps a second, with what is not training left out."""

    def __init__(self, step: int):
        self._step, self._since = step, time.monotonic()

    def rate(self, step: int) -> float:
        """Steps a second since the last call."""
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        return rate

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The time inside does not count."""
        start = time.monotonic()
        yield
        self._since += time.monotonic() - start


class Profiler:
    """Traces `steps` steps into `workdir`/profile, a few steps after the first."""

    WARM_UP = 3

    def __init__(self, workdir: Path, done: int, steps: int):
        self._directory = str(workdir / "profile")
        self._first = done + 1 + self.WARM_UP if steps and jax.process_index() == 0 else None
        self._steps, self._active = steps, False

    def before(self, step: int, state: Any) -> None:
        """Called before step number `step` is dispatched, with the state it starts from."""
        if self._first is None:
            return
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory)
            self._active = True
        elif step == self._first + self._steps:
            self.stop(state)

    def stop(self, state: Any) -> None:
        """Ends the trace, if there is one, once the steps in it are computed."""
        if self._active:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._active = False
