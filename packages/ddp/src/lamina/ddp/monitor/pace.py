"""What holds ranks up: one of them, or the network between them.

A rank that is slow makes all others wait in the next collective, so all of them take equally long
for a step. What differs is the time outside of these waits. Every eighth step is timed. Each rank
compares its own time with the mean of the others, which it gets by a sum over ranks that rides in
the norm's message (decision 0417).

Note [All ranks wait, so none is the cause]
A slow rank waits for nobody. So if every rank waits longer than it used to, and most of a step, no
rank is the cause, and the network is. Each rank compares its waits with their median while they
were usual, and the sum over ranks tells whether all of them found more.
"""

import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lamina.collectives import Ledger

NUMBERS = 7
"""How many numbers ranks tell each other of a step."""
_TIMED = 8  # of so many steps one is timed, as its collectives have to be recorded
_LEAST = 3  # usual waits that have to be known
_GROWN = 2.0  # waits vary more than what a rank needs by itself


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
    """This rank's own time per step, beside that of the others, and its waits.

    A rank is slow if for `steps` steps on end it takes more than `factor` times the mean of the
    others, and the network if all ranks wait twice as many times as long as they used to; `network`
    is what is told of it, else empty.
    """

    def __init__(self, factor: float, steps: int) -> None:
        self.factor, self.steps = factor, steps
        self._count = self._streak = 0
        self._reported = False
        self._slower = 0.0
        self._timed: tuple[Ledger, float] | None = None
        self._seconds: float | None = None
        self.network = ""
        self._usual: deque[float] = deque(maxlen=16)
        self._slow_network = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Entered around a step."""
        self._count += 1
        # Most steps pay for no ledger.
        if self._count % _TIMED:
            yield
            return
        with Ledger() as ledger:
            began = time.perf_counter()
            yield
        self._timed = ledger, time.perf_counter() - began

    def message(self) -> list[float]:
        """What is added over ranks: seconds, 1 with seconds, 1 if this rank is slow, its waits."""
        self._seconds, waits = None, [0.0] * 4
        if self._timed is not None:
            # A step late, as reading the records would make the host wait for a GPU.
            ledger, whole = self._timed
            waited = sum(record.exposed for record in ledger.records)
            self._seconds = max(0.0, whole - waited)
            self._timed = None
            between = sum(record.exposed for record in ledger.records if record.between)
            waits = self._waits(waited, between)
        # Told once, until this rank has been as quick as the others again.
        slow = self._streak * _TIMED >= self.steps and not self._reported
        self._reported |= slow
        return [self._seconds or 0.0, float(self._seconds is not None), float(slow), *waits]

    def _waits(self, waited: float, between: float) -> list[float]:
        """1 if this rank waits longer than it used to; seconds now, between hosts, and before."""
        usual = statistics.median(self._usual) if len(self._usual) >= _LEAST else None
        # What is far above the usual does not become usual, or a slow network soon would. Waits
        # that are shorter than this rank's own work are nobody's concern.
        if usual is None or waited <= max(_GROWN * self.factor * usual, self._seconds or 0.0):
            self._usual.append(waited)
            return [0.0] * 4
        return [1.0, waited, between, usual]

    def compare(self, sums: Sequence[float]) -> None:
        """Look at the sums of `message` over all ranks."""
        seconds, ranks, _, waiting, waited, between, usual = sums
        self.network = ""
        if self._seconds is None or ranks < 2:
            return
        # If one rank waits no longer than before, the others wait for it and not for the network.
        self._slow_network = self._slow_network + 1 if waiting == ranks else 0
        if self._slow_network == -(-self.steps // _TIMED):
            self.network = (
                f"the network is slow: all {ranks:.0f} ranks wait {waited / max(usual, 1e-9):.1f} "
                f"times as long as they used to ({waited / ranks:.2g} s of a step, "
                f"{between / waited:.0%} of it for other hosts), so none of them is the cause"
            )
        # The sum has this rank's own seconds in it: the rest, by the others' number, is their mean.
        self._slower = self._seconds * (ranks - 1) / max(seconds - self._seconds, 1e-9)
        self._streak = self._streak + 1 if self._slower > self.factor else 0
        self._reported = self._reported and self._streak > 0

    def words(self) -> list[str]:
        """What the others are told of this rank: host and factor, if it is slow."""
        return [socket.gethostname(), f"{self._slower:.3f}"] if self._reported else []
