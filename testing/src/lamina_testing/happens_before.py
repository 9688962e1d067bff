"""Which accesses to memory are ordered by waits, on whatever streams they run.

A `History` is told what a program gives to streams: work that reads and writes memory, events that
are recorded, and waits for them. It keeps a vector clock per stream. Two accesses of the same bytes
conflict if one of them writes. They are a `Race` if no chain of waits leads from the earlier one to
the later one. Then nothing but the speed of the device decides which comes first, although one
recorded run may have shown the right order every time. So a history without races is right in every
schedule of the streams, for the order in which the host has queued the work.

The host is a stream as well (`HOST`). Work is queued after all that the host has waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `stop` of a piece of memory, which are read or written."""

    memory: int
    start: int
    stop: int
    writes: bool


@dataclass(frozen=True)
class Node:
    """One piece of work: the stream it runs on, its number there, what it is, who queued it."""

    stream: str
    number: int
    label: str
    site: str

    def __str__(self) -> str:
        """Describe it in a line."""
        return f"{self.label} on {self.stream}" + (f" ({self.site})" if self.site else "")


@dataclass(frozen=True)
class Race:
    """Two conflicting accesses that no wait orders; `earlier` was queued first."""

    earlier: Node
    later: Node
    writes: tuple[bool, bool]

    def __str__(self) -> str:
        """Name both."""
        words = ["writes" if wrote else "reads" for wrote in self.writes]
        return f"{self.earlier} {words[0]}, and {self.later} {words[1]} the same bytes unordered"


@dataclass(frozen=True)
class Event:
    """A point of a stream, as an event marks it, and what a reader may call it."""

    clock: Clock
    place: str = ""


@dataclass
class History:
    """What was queued so far, and the races in it."""

    races: list[Race] = field(default_factory=list)
    nodes: int = 0
    _clocks: dict[str, Clock] = field(default_factory=dict)
    # Accesses of one stream are in order, so the newest of each kind stands for all before it.
    _newest: dict[int, dict[tuple[str, bool, int, int], Node]] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def record(self, stream: str, place: str = "") -> Event:
        """Return an event after everything that was queued on the stream."""
        return Event({**self._clocks.get(HOST, {}), **self._clock(stream)}, place)

    def wait(self, stream: str, event: Event) -> bool:
        """Everything that is queued on the stream from now on comes after the event.

        Returns:
            whether that orders anything that was not ordered before.
        """
        host, clock = self._clocks.get(HOST, {}), self._clock(stream)
        orders = any(n > max(clock.get(s, 0), host.get(s, 0)) for s, n in event.clock.items())
        _raise_to(clock, event.clock)
        return orders

    def run(self, stream: str, label: str, accesses: Iterable[Access] = (), site: str = "") -> Node:
        """Queue work."""
        clock = self._clock(stream)
        _raise_to(clock, self._clock(HOST))
        clock[stream] = clock.get(stream, 0) + 1
        self.nodes += 1
        node = Node(stream, clock[stream], label, site)
        for access in accesses:
            self._touch(node, access, clock)
        return node

    def forget(self, memory: int) -> None:
        """The memory is gone: nobody can access it any more."""
        self._newest.pop(memory, None)

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _touch(self, node: Node, access: Access, clock: Clock) -> None:
        before = self._newest.setdefault(access.memory, {})
        for (stream, wrote, start, stop), other in before.items():
            conflict = (wrote or access.writes) and start < access.stop and access.start < stop
            if conflict and other.number > clock.get(stream, 0):
                self._found(Race(other, node, (wrote, access.writes)))
        before[node.stream, access.writes, access.start, access.stop] = node

    def _found(self, race: Race) -> None:
        """Keep one race of each pair of places."""
        pair = str(race.earlier), str(race.later)
        if pair not in self._told:
            self._told.add(pair)
            self.races.append(race)


def _raise_to(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number
