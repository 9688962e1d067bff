"""The one place every collective passes, so that a ledger can see all of them.

A collective calls `issue` when it is launched and gets a `Call`; whoever knows that
the transport is done calls `Call.finish` (a worker thread, a device event, or, at the latest,
the handle's `wait`), and `wait` calls `Call.wait_begins`. Functions that are made of
other collectives record themselves once and call the unrecorded parts.

The list of active recorders belongs to the thread that installed them, so two models trained by
two threads of one process do not see each other's calls. It is kept in torch's own thread-local
object table and not in a context variable, because autograd carries that table from the thread that
calls `backward` to its worker threads (CUDA device threads, deep re-entrant backwards), which
inherit no context, and gradients are reduced there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.spans import purpose
from lamina.collectives.compat import (
    get_in_thread,
    has_ended,
    is_in_thread,
    remove_from_thread,
    set_in_thread,
)
from lamina.collectives.transport.lanes import Lane, lane_of, lanes
from lamina.mesh.engine import Activity, Wait, host_runs, running_watchdog

__all__ = ["Call", "install", "issue", "recording", "remove"]


class Recorder(Protocol):
    """What a ledger implements. Calls arrive from any thread."""

    def issued(self, call: Call) -> None:
        """A collective was launched; its times other than `issued_ns` are still None."""


@dataclass(eq=False)
class Call:
    """One collective, from its launch to its end.

    Attributes:
        op: name of the public function ("reduce_scatter_fp32", "all_gather_into", ...).
        axis: the group's description (the mesh axis), or "self" for a group of one.
        group_size: number of ranks.
        dtype: wire dtype.
        nbytes: bytes this rank sends to the other ranks, where every byte that another rank needs
            is counted once and sent by its owner: no ring, tree or chunking of the transport
            changes it (docs/collectives.md has the table).
        between: those of them that go to ranks of other hosts; 0 where nobody records.
        async_op: whether the caller got a handle to wait on.
        issued_ns, finished_ns, waited_ns: `time.perf_counter_ns` of the launch, of the end of the
            transport (None until known) and of the first `wait` (None where nobody waited).
        device_events: on CUDA, the timing events before and after the collective on its stream, for
            recorders that want the device's times, and then that of the moment the compute stream
            reached the first `wait`; None elsewhere.
        device_ended: on CUDA, the event after the collective on its stream.
        purpose: the unit or bucket that it is for, in words.
        number: how many collectives this rank has begun in the group, this one included.
    """

    op: str
    axis: str
    group_size: int
    dtype: torch.dtype
    nbytes: int
    async_op: bool
    issued_ns: int
    finished_ns: int | None = None
    waited_ns: int | None = None
    device_events: list[torch.cuda.Event] | None = None
    device_ended: torch.cuda.Event | None = None
    purpose: str = ""
    number: int = 0
    between: int = 0
    _recorders: tuple[Recorder, ...] = ()

    @property
    def recorded(self) -> bool:
        """True if anyone looks (so that device timing events are worth making).

        False while a CUDA graph is captured: a captured event has no time of its own.
        """
        if not self._recorders:
            return False
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return not (in_use and torch.cuda.is_current_stream_capturing())

    def finish(self) -> None:
        """Note the end of the transport; only the first call counts."""
        # No lock: a handle's `wait` comes to this only after the worker that has called it before.
        if self.finished_ns is None:
            self.finished_ns = time.perf_counter_ns()

    def wait_begins(self) -> None:
        """Note that someone now waits for the result; only the first call counts."""
        if self.waited_ns is None:
            self.waited_ns = time.perf_counter_ns()
            if self.device_events is not None:
                waited = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                waited.record()
                self.device_events.append(waited)

    def told(self) -> str:
        """The operation, and what it is for."""
        return f"{self.op} of {self.purpose}" if self.purpose else self.op

    def title(self) -> str:
        """The same, and along which axis."""
        return f"{self.told()} ({self.axis})"

    def waited_for(self) -> float | None:
        """Seconds since which somebody waits for it; None if nobody does."""
        now = time.perf_counter_ns()
        if (ended := self.device_ended) is not None:  # the host waits for nothing; the device may
            late = (now - self.issued_ns) / 1e9
            if late >= _LONG and has_ended(ended):
                self.device_ended = None  # asked once more it would answer the same
            elif late >= _LONG:
                return late
            return None
        since = self.waited_ns if self.async_op else self.issued_ns
        return None if since is None or self.finished_ns is not None else (now - since) / 1e9


_LONG = 1.0  # seconds; younger events are not asked


def activity() -> Activity:
    """What this rank does in collectives, over all groups."""
    waits, recent = [], []
    for lane in lanes():
        for call in list(lane.newest):
            seconds = call.waited_for()
            if seconds is not None:
                waits.append(Wait(call.told(), call.axis, call.number, seconds, lane.ranks))
            recent.append((call.issued_ns, f"{call.told()} ({call.axis} {call.number})"))
    waits.sort(key=lambda wait: -wait.seconds)
    recent.sort()
    idle = (time.perf_counter_ns() - recent[-1][0]) / 1e9 if recent else 0.0
    return Activity(waits, [text for _, text in recent[-16:]], idle)


_KEY = "lamina.collectives.recorders"


def _installed() -> tuple[Recorder, ...]:
    return cast("tuple[Recorder, ...]", get_in_thread(_KEY) if is_in_thread(_KEY) else ())


def _store(recorders: tuple[Recorder, ...]) -> None:
    if recorders or remove_from_thread is None:
        set_in_thread(_KEY, recorders)
    else:  # torch 2.13: a thread that ends with an entry has to take the GIL for it; leave none
        remove_from_thread(_KEY)


def install(recorder: Recorder) -> None:
    """Let `recorder` see every collective of this thread, and of the backwards it starts."""
    _store((*_installed(), recorder))


def remove(recorder: Recorder) -> None:
    """Undo one `install` of this thread; calls in flight still note their end."""
    recorders = _installed()
    index = len(recorders) - 1 - recorders[::-1].index(recorder)
    _store(recorders[:index] + recorders[index + 1 :])


def issue(
    op: str,
    lane: Lane | None,
    dtype: torch.dtype,
    nbytes: int,
    *,
    between: Callable[[Sequence[int]], int] | None = None,
    async_op: bool = False,
) -> Call:
    """Record the launch of a collective and return its `Call`.

    `op` is the name of the public function, a lane of None is one rank alone, and this rank sends
    `nbytes`. `between` says how many
    of them go to other hosts, from the ranks of the group on this one; None where every other rank
    is sent as much. RuntimeError: this process is not the rank, but a child that it forked.
    """
    if lane is not None and lane.worker.process != os.getpid():
        # Its messages would mix with the rank's.
        raise RuntimeError(
            f"{op} along {lane.axis} in process {os.getpid()}, which was forked from rank "
            f"{lane.rank} of {lane.size} (process {lane.worker.process}) and is no rank: a "
            "forward, a step or full_parameters of a wrapped model belongs into the rank itself. "
            "Give a child what it needs (tensors of full_parameters, from the rank), or start it "
            "by multiprocessing's 'spawn' with groups of its own"
        )
    recorders = get_in_thread(_KEY) if is_in_thread(_KEY) else ()
    axis, size = ("self", 1) if lane is None else (lane.axis, lane.size)
    now, served = time.perf_counter_ns(), purpose.get()
    call = Call(op, axis, size, dtype, nbytes, async_op, now, purpose=served, _recorders=recorders)
    if lane is not None and size > 1:
        if not lane.newest and (watchdog := running_watchdog()) is not None:
            watchdog.watch(activity)
        call.number = lane.newest[-1].number + 1 if lane.newest else 1
        lane.newest.append(call)
        if recorders:
            near = host_runs(lane.group).near
            far = nbytes * (size - len(near)) // (size - 1)
            call.between = far if between is None else between(near)
    for recorder in recorders:
        recorder.issued(call)
    return call


@contextlib.contextmanager
def recording(
    op: str, group: ProcessGroup | None, dtype: torch.dtype, nbytes: int
) -> Iterator[Call]:
    """Record a collective that is synchronous: it is finished when the block ends."""
    call = issue(op, lane_of(group), dtype, nbytes)
    call.wait_begins()
    try:
        yield call
    finally:
        call.finish()
