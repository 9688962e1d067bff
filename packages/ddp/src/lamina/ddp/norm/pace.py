"""Which rank holds the others up: the time of a step that a rank does not spend waiting for them.

A rank that is slow makes all others wait in the next collective, so all of them take equally long
for a step. What differs is the time outside of these waits. Every eighth step is timed. Each rank
compares its own time with the mean of the others, which it gets by a sum over ranks that rides in
the norm's message (decision 0417).
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lamina.collectives import Ledger

__all__ = ["Pace", "Straggler"]

_TIMED = 8  # of so many steps one is timed, as its collectives have to be recorded


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up.

    Attributes:
        rank: in the world, with its coordinates, in words.
        host: name of its machine.
        factor: how many times as long as the mean of the others it took for a step by itself.

    Examples:
        >>> print(Straggler("rank 3 (dp_shard=3)", "node7", 1.8))
        rank 3 (dp_shard=3) on node7 takes 1.8 times as long for a step as the other ranks
    """

    rank: str
    host: str
    factor: float

    def __str__(self) -> str:
        times = f"takes {self.factor:.1f} times as long for a step as the other ranks"
        return f"{self.rank} on {self.host} {times}"


class Pace:
    """This rank's own time per step, beside that of the others.

    Args:
        factor: a rank is slow if it takes more than so many times the mean of the others.
        steps: for so many steps on end.
    """

    def __init__(self, factor: float, steps: int) -> None:
        self.factor, self.steps = factor, steps
        self._count = self._streak = 0
        self._told = False
        self._slower = 0.0
        self._timed: tuple[Ledger, float] | None = None
        self._seconds: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Entered around a step."""
        self._count += 1
        if self._count % _TIMED:
            yield
            return
        with Ledger() as ledger:
            began = time.perf_counter()
            yield
        self._timed = ledger, time.perf_counter() - began

    def message(self) -> list[float]:
        """Three numbers to be added over ranks: seconds, 1 with seconds, 1 if this rank is slow."""
        self._seconds = None
        if self._timed is not None:
            # A step late, as reading the records would make the host wait for a GPU.
            ledger, whole = self._timed
            self._seconds = max(0.0, whole - sum(one.exposed for one in ledger.records))
            self._timed = None
        slow = self._streak * _TIMED >= self.steps and not self._told
        self._told |= slow
        return [self._seconds or 0.0, float(self._seconds is not None), float(slow)]

    def compare(self, seconds: float, ranks: float) -> None:
        """Look at the sums over all ranks."""
        if self._seconds is None or ranks < 2:
            return
        self._slower = self._seconds * (ranks - 1) / max(seconds - self._seconds, 1e-9)
        self._streak = self._streak + 1 if self._slower > self.factor else 0
        self._told = self._told and self._streak > 0

    def words(self) -> list[str]:
        """What the others are told of this rank: host and factor, if it is slow."""
        return [socket.gethostname(), f"{self._slower:.3f}"] if self._told else []
