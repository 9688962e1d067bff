"""Collectives of torch's own, and the order that streams and events give them.

Lamina's collectives are known from the ledger. Other programs post theirs on streams of their own,
and let kernels wait for events. Where such a program is played there is no device, and the streams
of `torch.cpu` do nothing. Inside `Streams.recorded` they note what comes after what.

Note [One stream of kernels]
Kernels that a program puts on a side stream (casts and copies around a message) are played on the
one stream that all kernels have, at the place where they were issued. Only messages lie on side
streams. A message that is issued on the stream of kernels, or asynchronously with a handle of
torch's, counts as waited for at once. What is sent to one rank is waited for by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lamina.mesh.engine import host_runs
from lamina.models.compat import group_of_argument
from lamina.models.plan.record.operator_costs import tensors_in
from lamina.models.plan.record.step_record import HOST


@dataclass(eq=False)
class Posted:
    """A collective of torch's: what this rank sends, and when; or a copy, which has no group."""

    op: str
    nbytes: int
    group: ProcessGroup | None
    issued: int
    after: int
    behind: set[Posted]
    waited: int | None = None

    @property
    def axis(self) -> str:
        """The mesh's axis, by the group's description."""
        if self.group is None:
            return HOST
        return self.group.group_desc.split(":", 1)[0].removeprefix("mesh_")

    @property
    def between(self) -> int:
        """The part of the bytes that goes to other hosts."""
        if self.group is None:
            return 0
        ranks = self.group.size()
        return self.nbytes * (ranks - len(host_runs(self.group).near)) // max(1, ranks - 1)

    @property
    def communicator(self) -> str:
        """What takes its messages one after the other: a group, or a direction of copies."""
        return self.op if self.group is None else str(self.group.group_name)

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return 1 if self.group is None else self.group.size()


@dataclass(eq=False)
class Event:
    """A moment of a stream: the kernels before event `after` are done, and so are `messages`."""

    streams: Streams
    after: int = 0
    messages: set[Posted] = field(default_factory=set)

    def record(self, stream: Stream | None = None) -> None:
        """Be the moment that a stream has reached."""
        self.after, self.messages = (stream or self.streams.current).reached()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream come after this moment."""
        (stream or self.streams.current).wait_event(self)

    def query(self) -> bool:
        """Nothing is waited for on the host."""
        return True

    def synchronize(self) -> None:
        """The host waits: so do the kernels that it launches next."""
        self.streams.kernels.wait_event(self)


class Stream:
    """A stream of a device, with the methods that `torch.cpu.Stream` has."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.number = number
        self._streams = streams
        self._after = 0
        self._messages: set[Posted] = set()

    def reached(self) -> tuple[int, set[Posted]]:
        """The event that all its work comes after, and the messages that it comes after."""
        own = self is self._streams.kernels
        return self._streams.now() if own else self._after, set(self._messages)

    def wait_event(self, event: Event | None) -> None:
        """Come after a moment of another stream."""
        if event is not None:
            self._come_after(event.after, event.messages)

    def wait_stream(self, stream: Stream) -> None:
        """Come after all that another stream was given so far."""
        self._come_after(*stream.reached())

    def record_event(self, event: Event | None = None) -> Event:
        """A moment: after all that this stream was given so far."""
        event = event or Event(self._streams)
        event.record(self)
        return event

    def post(self, op: str, nbytes: int, group: ProcessGroup | None) -> Posted:
        """Put a message behind all that this stream was given."""
        streams = self._streams
        after, behind = self.reached()
        message = Posted(op, nbytes, group, streams.now(), after, behind)
        self._come_after(after, {message})
        return message

    def _come_after(self, after: int, messages: set[Posted]) -> None:
        if self is self._streams.kernels:
            for message in messages:
                message.waited = self._streams.now() if message.waited is None else message.waited
        else:
            self._after = max(self._after, after)
            self._messages = {m for m in self._messages | messages if m.waited is None}


class Streams:
    """The streams of one rank.

    Examples:
        >>> streams = Streams()
        >>> with streams.recorded():
        ...     side = torch.cpu.Stream()
        ...     side.wait_stream(torch.cpu.current_stream())
    """

    def __init__(self) -> None:
        self._now: Callable[[], int] = lambda: 0
        self._made = 0
        self.kernels = self.current = self._new()
        self._sides: dict[str, Stream] = {}

    def now(self) -> int:
        """The number of the event that comes next; 0 outside a record."""
        return self._now()

    def number_by(self, now: Callable[[], int]) -> None:
        """Take the numbers of another record from here on."""
        self._now = now

    def copy(self, direction: str, nbytes: int) -> tuple[Posted, Event]:
        """Post a copy between host and device on the stream of its direction."""
        stream = self._beside(direction)
        return stream.post(direction, nbytes, None), stream.record_event()

    def send(self, op: str, nbytes: int, group: ProcessGroup) -> Posted:
        """Post a message to one rank, which no kernel waits for."""
        return self._beside(group.group_name).post(op, nbytes, group)

    def _beside(self, name: str) -> Stream:
        """A stream of its own for each name, which comes after the current one."""
        if name not in self._sides:
            self._sides[name] = self._new()
        self._sides[name].wait_stream(self.current)
        return self._sides[name]

    @contextmanager
    def recorded(self) -> Iterator[Streams]:
        """Inside, streams and events of `torch.cpu` are these."""
        replaced: dict[str, Any] = {
            "Stream": lambda *_, **__: self._new(),
            "Event": lambda *_, **__: Event(self),
            "current_stream": lambda *_: self.current,
            "stream": self._made_current,
        }
        before = {name: getattr(torch.cpu, name) for name in replaced}
        for name, function in replaced.items():
            setattr(torch.cpu, name, function)
        try:
            yield self
        finally:
            for name, function in before.items():
                setattr(torch.cpu, name, function)

    def _new(self) -> Stream:
        self._made += 1
        return Stream(self, self._made - 1)

    @contextmanager
    def _made_current(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


SEND = "send"


def is_collective(name: str) -> bool:
    """Whether an operator is one of torch's collectives, or waits for one."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def sent_by(name: str, schema: Any, args: tuple[Any, ...]) -> tuple[str, int, ProcessGroup] | None:
    """The public name of a collective, the bytes that this rank sends and its group.

    None of an operator that sends nothing. Bytes are counted as the ledger counts them: what
    another rank needs counts once for each rank that needs it.

    Raises:
        ValueError: a collective whose bytes are not known here.
    """
    kind = name.partition("::")[2].strip("_")
    if kind in _NOTHING:
        return None
    if kind not in _SENT:
        raise ValueError(
            f"a plan does not know what {name} sends; it knows {', '.join(sorted(_SENT))}. Record "
            "the program without it"
        )
    op, first, factor = _SENT[kind]
    at = next(
        n
        for n, argument in enumerate(schema.arguments)
        if argument.name in ("process_group", "group_name")
    )
    group = group_of_argument(args[at])
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args[first]))
    return op, int(nbytes * factor(group.size())), group


_NOTHING = frozenset("wait_tensor wrap_tensor_autograd barrier monitored_barrier recv".split())
_SENT: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "allgather_base": ("all_gather_into", 1, lambda ranks: ranks - 1),
    "all_gather_into_tensor": ("all_gather_into", 0, lambda ranks: ranks - 1),
    "reduce_scatter_base": ("reduce_scatter_native", 0, lambda ranks: ranks - 1),
    "reduce_scatter_tensor": ("reduce_scatter_native", 0, lambda ranks: (ranks - 1) / ranks),
    "allreduce": ("all_reduce_native", 0, lambda ranks: 2 * (ranks - 1) / ranks),
    "all_reduce": ("all_reduce_native", 0, lambda ranks: 2 * (ranks - 1) / ranks),
    "alltoall_base": ("all_to_all", 1, lambda ranks: (ranks - 1) / ranks),
    "all_to_all_single": ("all_to_all", 0, lambda ranks: (ranks - 1) / ranks),
    "send": (SEND, 0, lambda ranks: 1.0),
}
"""By torch's name: the public one, the argument whose bytes count, and the part that is sent."""
