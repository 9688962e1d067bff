"""Makes every collective slow, and writes down in which order things happened.

Overlap is tested by structure, not by time: with each collective finished only a while after its
issue, a program that overlaps still issues the next one before it waits for the last.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

# Methods of ProcessGroup that start communication and return a Work. Patched there, and not in
# torch.distributed, they are caught under whatever name a function was imported.
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)

Kind = Literal["issue", "finish", "mark"]


@dataclass(frozen=True)
class Event:
    """One entry of the log.

    `kind`: "issue" of a collective, "finish" (the first wait for it has returned) or "mark" (made
    by the test). `name` is the collective's ("allreduce"), or the mark's. `number` counts
    collectives from 0 in order of issue; -1 for marks. `group` is the process group's
    description, `size` the bytes of the tensors handed over, `time` in seconds
    (`time.perf_counter`).
    """

    kind: Kind
    name: str
    number: int
    group: str
    size: int
    time: float


@dataclass
class EventLog:
    """Events in the order in which they happened, over all threads of this rank."""

    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def mark(self, name: str) -> None:
        """Enter an event of the test's own, from a hook for example."""
        self._add("mark", name, -1, "", 0)

    def issued(self, name: str | None = None) -> list[Event]:
        """Return the issues of collectives, all or those of one name, in order."""
        return [e for e in self.events if e.kind == "issue" and name in (None, e.name)]

    def finish_of(self, event: Event) -> Event:
        """Return the finish of an issued collective. Raises LookupError if nobody waited for it."""
        for other in self.events:
            if other.kind == "finish" and other.number == event.number:
                return other
        raise LookupError(f"{event.name} number {event.number} was never waited for")

    def marked(self, name: str) -> Event:
        """Return the first mark of that name. Raises LookupError."""
        for event in self.events:
            if event.kind == "mark" and event.name == name:
                return event
        marks = [event.name for event in self.events if event.kind == "mark"]
        raise LookupError(f"no mark {name!r}; there are {marks}")

    def in_order(self, first: Event, second: Event) -> bool:
        """Whether `first` happened before `second`."""
        return self.events.index(first) < self.events.index(second)

    def in_flight_at(self, event: Event) -> list[Event]:
        """Return the collectives issued before `event` and not finished by then."""
        before = self.events[: self.events.index(event)]
        finished = {e.number for e in before if e.kind == "finish"}
        return [e for e in before if e.kind == "issue" and e.number not in finished]

    def table(self) -> str:
        """Return the log as text, one event a line, times from the first."""
        begin = self.events[0].time if self.events else 0.0
        return "\n".join(
            f"{event.time - begin:9.4f} {event.kind:6} {event.name} "
            + (f"#{event.number} {event.group} {event.size} B" if event.number >= 0 else "")
            for event in self.events
        )

    def _add(self, kind: Kind, name: str, number: int, group: str, size: int) -> None:
        with self._lock:
            self.events.append(Event(kind, name, number, group, size, time.perf_counter()))


@contextlib.contextmanager
def delayed_collectives(seconds: float) -> Iterator[EventLog]:
    """Delay the completion of every collective by `seconds` from its issue; log both.

    Inside the block `Work.wait` and `Work.synchronize` of a collective return, and its
    `is_completed` turns true, no earlier than `seconds` after the collective was issued;
    blocking calls wait like that too. Issuing takes no longer than before, so a program that
    overlaps loses little and one that doesn't loses `seconds` a collective. Delays run side by
    side, whatever the group.

    Not delayed, and not logged: futures (`Work.get_future`), functional collectives (DTensor's
    own redistribution) and batches of point-to-point work inside one coalesced NCCL launch.
    """
    log = EventLog()
    delayer = _Delayer(seconds, log)
    with contextlib.ExitStack() as stack:
        for name in _METHODS:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:  # torch 2.11 to 2.13 differ in which there are
                replacement = delayer.issuing(name, method)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, replacement))
        for name in ("wait", "synchronize"):
            replacement = delayer.waiting(getattr(Work, name))
            stack.enter_context(mock.patch.object(Work, name, replacement))
        replacement = delayer.asking(Work.is_completed)
        stack.enter_context(mock.patch.object(Work, "is_completed", replacement))
        exchange = sys.modules.get("lamina.collectives.transport.gloo_exchange")
        if exchange is not None:  # ranks of one host read each other's memory, which no group sees
            stack.enter_context(mock.patch.object(exchange, "READ_FROM", sys.maxsize))
        yield log


@dataclass
class _Flight:
    """A collective under way. Holding `work` keeps its id from being used again."""

    work: Work
    number: int
    name: str
    group: str
    size: int
    due: float
    finished: bool = False


class _Delayer:
    def __init__(self, seconds: float, log: EventLog) -> None:
        self._seconds = seconds
        self._log = log
        self._flights: dict[int, _Flight] = {}
        self._issued = 0
        self._lock = threading.Lock()

    def issuing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                number, self._issued = self._issued, self._issued + 1
            size = sum(_sizes((args, kwargs)))
            description = group.group_desc
            self._log._add("issue", name, number, description, size)
            due = time.perf_counter() + self._seconds
            work = method(group, *args, **kwargs)
            if work is not None:
                flight = _Flight(work, number, name, description, size, due)
                self._flights[id(work)] = flight
            return work

        return issue

    def waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            result = method(work, *args, **kwargs)
            flight = self._flights.get(id(work))
            if flight is not None:
                time.sleep(max(0.0, flight.due - time.perf_counter()))
                if not flight.finished:
                    flight.finished = True
                    self._log._add("finish", flight.name, flight.number, flight.group, flight.size)
            return result

        return wait

    def asking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def is_completed(work: Work) -> bool:
            flight = self._flights.get(id(work))
            early = flight is not None and time.perf_counter() < flight.due
            return not early and bool(method(work))

        return is_completed


def _sizes(value: object) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, dict):
        yield from _sizes(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _sizes(element)
