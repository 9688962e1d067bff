"""What saves and loads cost, and a bar for long ones."""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Report:
    step: int
    path: Path | str
    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of the whole save, or read by this rank."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class SaveReport(_Report):
    """What a save cost.

    Attributes:
        step: training step.
        path: the complete checkpoint: a path, or a URL as text.
        bytes: of all its files; of a save that is still being written, what this rank has staged.
        seconds: from the call until the checkpoint was complete; until now, if it is not yet.
        blocked_seconds: that the training loop waited.
        complete: whether the checkpoint is complete and on the disk.
    """

    blocked_seconds: float
    complete: bool


@dataclass(frozen=True)
class RestoreReport(_Report):
    """What a restore did.

    Attributes:
        step: of the checkpoint that was loaded.
        path: where it is.
        bytes: that this rank read.
        seconds: that it took.
        missing: names at hand that the checkpoint does not have (`strict=False`).
        unexpected: names that only the checkpoint has (`strict=False`).
        skipped: damaged checkpoints that were passed over (`fallback=True`): step -> why.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: dict[int, str] = field(default_factory=dict)


class Progress:
    """A bar on a terminal, after the first second; nothing anywhere else.

    `what` is the word in front, `total` are bytes to come, and `shown` says whether this rank shows
    it at all.
    """

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._bar: Any = None
        if not (shown and sys.stderr.isatty()):
            return
        try:
            tqdm = importlib.import_module("tqdm")  # optional
        except ImportError:
            return
        self._bar = tqdm.tqdm(
            desc=what, total=total, unit="B", unit_scale=True, delay=1.0, leave=False
        )

    def advance(self, size: int) -> None:
        """Add bytes."""
        if self._bar is not None:
            self._bar.update(size)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
