"""What a step was: lives of storages, operators and messages, on one axis of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "gathered units",
    "temporaries",
)

HOST = "host"
"""The axis of copies between a device and its host, in which no other rank takes part."""


@dataclass
class Life:
    """A storage: its bytes from the event `born` until the event before `died`.

    `sizes` are all its sizes: pairs of an event and of the bytes from then on. `crosses` says
    whether a forward made it and a backward let it go, which is what an activation is. `stream` is
    the number of the stream that it was made on, 0 that of kernels. `earlier` is the storage's life
    in the record before.
    """

    born: int
    category: str
    crosses: bool
    sizes: list[tuple[int, int]]
    died: int | None = None
    stream: int = 0
    earlier: Life | None = None


@dataclass(frozen=True)
class Operation:
    """An operator: its name, products (two operations for each multiplication) and bytes moved.

    `at` is its place among all events, `backward` the number of the backward that it runs in,
    counted from 1, and 0 outside of them. `shape` is the number, rows, columns and inner length of
    products, `width` the bytes of a product's elements.
    """

    name: str
    at: int
    backward: int
    flops: float
    nbytes: int
    shape: tuple[int, ...] = ()
    width: int = 2


@dataclass(frozen=True)
class Message:
    """A collective of this rank: between which events it was issued and waited for.

    A copy between the device and its host is one too, with the axis `host` and one rank.

    `waited` is None where the step never waits for the result. It begins once the kernels before
    the event `after` are done (those before it was issued, if that is None), and the messages
    `behind` which it is, by their places in the record.
    """

    axis: str
    communicator: str
    op: str
    purpose: str
    nbytes: int
    between: int
    ranks: int
    issued: int
    waited: int | None
    after: int | None = None
    behind: tuple[int, ...] = ()


@dataclass
class StepRecord:
    """What a step was: events are numbered from 0, `end` is the number after the last one.

    `fused` says whether element-wise operators are noted as the kernels that a compiler makes of
    them, where it makes some.
    """

    lives: list[Life] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    end: int = 0
    fused: bool = False

    def timeline(self) -> list[tuple[int, dict[str, int]]]:
        """Bytes by category after each event that changes them."""
        changes: dict[int, Counter[str]] = {}
        for life in self.lives:
            before = 0
            for at, nbytes in life.sizes:
                changes.setdefault(at, Counter())[life.category] += nbytes - before
                before = nbytes
            if life.died is not None:
                changes.setdefault(life.died, Counter())[life.category] -= before
        now: Counter[str] = Counter()
        points = []
        for at in sorted(changes):
            for category, change in changes[at].items():
                now[category] += change
            points.append((at, dict(now)))
        return points

    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment at which they are most in all."""
        points = [now for _, now in self.timeline()]
        most = max(points, key=lambda now: sum(now.values()), default={})
        return {category: most.get(category, 0) for category in CATEGORIES}

    def at_rest(self) -> dict[str, int]:
        """Bytes by category when the step has ended."""
        points = self.timeline()
        last = points[-1][1] if points else {}
        return {category: last.get(category, 0) for category in CATEGORIES}

    def wire_bytes(self) -> Counter[str]:
        """Bytes that this rank sends, by axis."""
        sent: Counter[str] = Counter()
        for message in self.messages:
            if message.ranks > 1:
                sent[message.axis] += message.nbytes
        return sent
