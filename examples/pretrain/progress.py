"""Progress for a person: a bar in a terminal, lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def figures(record: dict[str, Any], left: float) -> str:
    """Format a step's numbers.

    Args:
        record: of `Metrics.step`.
        left: seconds until the end at the present rate.
    """
    return (
        f"loss {record['loss']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"grad norm {record['grad_norm']:.2f}  {record['memory_bytes'] / 2**20:,.0f} MiB  "
        f"{int(left // 60)}:{int(left % 60):02d} left"
    )


class Bar:
    """A rich progress bar."""

    def __init__(self, steps: int, done: int, _: float) -> None:
        self._steps = steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            console=Console(file=sys.stdout),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=steps, completed=done, figures="")
        self._progress.start()

    def show(self, record: dict[str, Any], seconds: float) -> None:
        """Move the bar; `seconds` is what a step takes."""
        text = figures(record, (self._steps - record["step"]) * seconds)
        self._progress.update(self._task, completed=record["step"], figures=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()


class Lines:
    """A line for the first step, for the last, and every few seconds between."""

    def __init__(self, steps: int, done: int, every: float) -> None:
        self._steps, self._every = steps, every
        self._next = 0.0

    def show(self, record: dict[str, Any], seconds: float) -> None:
        """Print a line if it is time; `seconds` is what a step takes."""
        now, last = time.monotonic(), record["step"] == self._steps
        if now < self._next and not last:
            return
        self._next = now + self._every
        text = figures(record, (self._steps - record["step"]) * seconds)
        print(f"step {record['step']}/{self._steps}  {text}", flush=True)

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing: what is printed stays."""
