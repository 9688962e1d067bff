"""What CUDA would refuse to capture into a graph, or replay wrongly, in a recorded part of a step.

A graph holds the work that streams are given while it is captured, with the addresses of that
moment. So within `capturing(recording)`

- the host may wait for no stream and read no numbers, whether a stream or gloo has brought them,
  and nothing may run on the host: it would run once, and not at each replay;
- a stream takes part from the moment on which it waits for one that does. Work on another stream
  is not in the graph, and waiting for what was queued before the capture is refused;
- every stream that takes part is waited for before the end;
- memory that was there before may not be given back.

Memory that the capture takes is of the graph's own pool. What it uses of other memory has to stay
where it is for as long as the graph is replayed: `Capture.moved` says what did not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from lamina_testing.happens_before import HOST, Access, Event
from lamina_testing.order import Recording, Site


@dataclass
class Capture:
    """A part of a step that is captured.

    Attributes:
        breaks: what CUDA refuses, or what a replay would leave out, in words.
        uses: memory of before the capture that it reads or writes, by number.
    """

    origin: str
    before: int
    breaks: list[str] = field(default_factory=list)
    uses: set[int] = field(default_factory=set)
    _streams: set[str] = field(default_factory=set)
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The stream that begins takes part."""
        self._streams = {self.origin}

    def moved(self, recording: Recording) -> int:
        """Return how many pieces of memory that a replay would use have been given back."""
        there = {memory.number for memory in recording._memories.values()}
        return len(self.uses - there)

    def break_at(self, what: str) -> None:
        """Note what is wrong, once."""
        if what not in self.breaks:
            self.breaks.append(what)

    def marked(self, stream: str, event: Event) -> None:
        """An event is recorded."""
        if stream in self._streams:
            self._events.append(event)

    def waits(self, stream: str, event: Event) -> None:
        """A stream waits."""
        inside = any(event is one for one in self._events)
        if stream == HOST:
            self.break_at("the host waits")
        elif inside:
            self._streams.add(stream)
        elif stream in self._streams:
            self.break_at(f"{stream} waits for work of before the capture")

    def runs(self, stream: str, label: str, accesses: Iterable[Access]) -> None:
        """Work is queued."""
        if stream == HOST:
            self.break_at(f"{label} runs on the host")
        elif stream not in self._streams:
            self.break_at(f"{label} runs on {stream}, which takes no part")
        self.uses |= {access.memory for access in accesses if access.memory <= self.before}

    def ends(self, recording: Recording) -> None:
        """The capture ends on the stream it began on."""
        clock = recording.history.record(self.origin).clock
        for stream in sorted(self._streams):
            last = recording.history.record(stream).clock.get(stream, 0)
            if clock.get(stream, 0) < last:
                self.break_at(f"nobody waits for {stream}")


@contextlib.contextmanager
def capturing(recording: Recording, pool: Capture | None = None) -> Iterator[Capture]:
    """Check what is recorded within the block against the rules above.

    Args:
        recording: at work.
        pool: an earlier capture, whose memory this one shares.
    """
    recording.find_freed()
    capture = Capture(recording.current, recording._made if pool is None else pool.before)
    run, wait, mark, free = recording.run, recording.wait, recording.mark, recording.free
    tolist = torch.Tensor.tolist

    def runs(stream: str, label: str, accesses: Iterable[Access]) -> None:
        found = list(accesses)
        run(stream, label, found)
        capture.runs(stream, label, found)

    def waits(stream: str, event: Event | None, site: Site | None = None) -> None:
        if event is not None:
            capture.waits(stream, event)
        wait(stream, event, site)

    def marks(stream: str) -> Event:
        event = mark(stream)
        capture.marked(stream, event)
        return event

    def frees(key: int, how: str = "") -> None:
        if recording._memories[key].number <= capture.before:
            capture.break_at("memory of before the capture is given back")
        free(key, how)

    def listed(tensor: torch.Tensor) -> Any:
        capture.break_at("the host reads numbers")  # no operator shows it
        return tolist(tensor)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "tolist", listed))
        changed = {"run": runs, "wait": waits, "mark": marks, "free": frees}
        for name, method in changed.items():
            stack.enter_context(mock.patch.object(recording, name, method))
        yield capture
        recording.find_freed()
    capture.ends(recording)
