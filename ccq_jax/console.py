"""What a run shows: a progress bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter:
    """Reports the progress of `steps` steps, of which `done` were done before. A context manager.

    On a terminal a bar moves with every step; elsewhere each call of `log` is a line. Only the
    first process of several says anything.
    """

    def __init__(self, steps: int, done: int, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._console.quiet = jax.process_index() != 0
        self._steps, self._done, self._now = steps, done, done
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or self._console.quiet,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, text="")

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def restart_clock(self) -> None:
        """Leaves what went before, such as compilation, out of the time that is left."""
        self._start, self._done = time.monotonic(), self._now

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self._now = step
        self._bar.update(self._task, completed=step)

    def log(self, line: dict[str, Any]) -> None:
        """Shows a line of metrics."""
        text = f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tokens/s"
        if "mfu" in line:
            text += f"  MFU {line['mfu']:.1%}"
        self._bar.update(self._task, text=text)
        step = line["step"]
        if not self._console.is_terminal:
            self.say(
                f"step {step}/{self._steps}  {text}  grad norm {line['grad_norm']:.3f}  "
                f"lr {line['learning_rate']:.2e}  {self._left(step)} left"
            )
        if "eval/loss" in line:
            self.say(
                f"step {step}: validation loss {line['eval/loss']:.4f} nats/token, "
                f"{line['eval/bits_per_byte']:.4f} bits/byte"
            )

    def _left(self, step: int) -> str:
        rate = (time.monotonic() - self._start) / max(step - self._done, 1)
        return duration(rate * (self._steps - step))


def duration(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
