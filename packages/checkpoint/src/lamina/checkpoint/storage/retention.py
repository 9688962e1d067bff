"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept if any rule keeps it; the newest always is.

    Attributes:
        last: the newest so many; None keeps all if no other rule is given, else the newest one.
        every: those whose step is a multiple of this.
        best: so many of those saved with a metric.
        best_is: whether a small or a large metric is good.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    best_is: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse numbers below 1.

        Raises:
            ValueError: naming the argument.
        """
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"keep_{name} is {value}: it must be at least 1, or None"
                    + (" to keep all" if name == "last" else "")
                )
        if self.best_is not in ("min", "max"):
            raise ValueError(f"best_is is {self.best_is!r}: it must be 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.last is None and self.every is None and self.best is None

    def doomed(self, checkpoints: Mapping[int, float | None]) -> list[int]:
        """Return the steps to delete, ascending.

        Args:
            checkpoints: step -> metric (None: saved without one) of the undamaged checkpoints.
                Damaged ones don't count, so that they can't push the last good one out.
        """
        if self.keeps_all:
            return []
        steps = sorted(checkpoints)
        kept = set(steps[-(self.last or 1) :])
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            sign = 1.0 if self.best_is == "min" else -1.0
            measured = [
                (sign * metric, -step)  # of equals the newer
                for step, metric in checkpoints.items()
                if metric is not None and not math.isnan(metric)
            ]
            kept |= {-step for _, step in sorted(measured)[: self.best]}
        return [step for step in steps if step not in kept]
