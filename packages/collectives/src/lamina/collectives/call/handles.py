"""Handles: what an asynchronous collective returns.

A handle owns every tensor its collective still reads or writes, so the caller may drop theirs at
once. On CUDA no `record_stream` is used, which would make memory use depend on timing: the tensors
stay referenced until `wait` has ordered the caller's stream behind the collective, after which the
allocator's own stream order protects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lamina.collectives.call.record import Call
from lamina.collectives.transport.groups import served_by_gloo
from lamina.collectives.transport.lanes import Lane, Ticket, lane_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Handle", "ReduceHandle", "Statistics", "launch", "launch_reduction"]


class Handle:
    """A collective in flight; `wait` makes its result safe to use.

    On CPU `wait` blocks. On CUDA it makes the current stream wait and does not block the host
    (except over gloo, where the host moves the bytes).
    """

    def __init__(
        self,
        call: Call,
        *,
        ticket: Ticket | None = None,
        event: torch.cuda.Event | None = None,
        issued_on: torch.cuda.Stream | None = None,
        keep: tuple[Any, ...] = (),
    ) -> None:
        self._call = call
        self._ticket = ticket
        self._event = event
        self._issued_on = issued_on
        self._keep = keep
        self._pending = True

    def wait(self) -> None:
        """Wait for the result; a second call returns at once.

        Raises:
            RuntimeError: what the transport raised (a peer that died, a timeout).
        """
        if not self._pending:
            return
        self._call.wait_begins()
        try:
            if self._ticket is not None:
                self._ticket.wait()
            if self._event is not None:
                torch.cuda.current_stream(self._event_device()).wait_event(self._event)
            self._pending = False  # not after a failure, which every further wait reports again
        finally:
            self._call.finish()
            self._keep = ()

    def _event_device(self) -> torch.device | None:
        return None if self._issued_on is None else self._issued_on.device

    def __del__(self) -> None:
        # Dropped without a wait: the tensors are about to be freed on the stream they came from,
        # so that stream has to come after the collective. On CPU the worker holds the tensors.
        if self._pending and self._event is not None and self._issued_on is not None:
            if self._ticket is not None:
                self._ticket.wait()
            self._issued_on.wait_event(self._event)


class Statistics:
    """Squared norm and non-finite flag of a reduced shard, filled in by the sum itself."""

    def __init__(self, device: torch.device) -> None:
        self.squared_norm = torch.empty((), dtype=torch.float64, device=device)
        self.nonfinite = torch.empty((), dtype=torch.bool, device=device)


class ReduceHandle(Handle):
    """A reduction in flight. Reading a statistic waits first."""

    def __init__(self, call: Call, statistics: Statistics | None, **state: Any) -> None:
        super().__init__(call, **state)
        self._statistics = statistics

    @property
    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's reduced shard as stored: float64, no dimensions.

        Raises:
            RuntimeError: the reduction was called with statistics=False.
        """
        return self._waited().squared_norm

    @property
    def nonfinite(self) -> torch.Tensor:
        """Whether this rank's reduced shard holds an infinity or a NaN: bool, no dimensions.

        Raises:
            RuntimeError: the reduction was called with statistics=False.
        """
        return self._waited().nonfinite

    def _waited(self) -> Statistics:
        if self._statistics is None:
            raise RuntimeError(
                "this reduction was called with statistics=False: it has neither a norm nor a "
                "non-finite flag"
            )
        self.wait()
        return self._statistics


def launch(
    call: Call,
    group: ProcessGroup | None,
    device: torch.device,
    start: Callable[[], Callable[[], None]],
    *,
    async_op: bool,
    keep: tuple[Any, ...] = (),
) -> Handle:
    """Run a collective and return its handle.

    Args:
        call: its record.
        group: its group; None for a group of one, which is never asynchronous.
        device: device of its tensors.
        start: posts the messages without blocking and returns what is left to do once they are
            under way (wait for them, sum, copy back).
        async_op: leave that rest to the group's lane.
        keep: tensors that must outlive the collective.
    """
    state = _run(call, group, device, start, async_op=async_op)
    handle = Handle(call, keep=keep, **state)
    if not async_op:
        handle.wait()
    return handle


def launch_reduction(
    call: Call,
    group: ProcessGroup | None,
    device: torch.device,
    start: Callable[[], Callable[[], None]],
    statistics: Statistics | None,
    *,
    async_op: bool,
    keep: tuple[Any, ...],
) -> ReduceHandle:
    """Run a reduction and return its handle; arguments as in `launch`."""
    state = _run(call, group, device, start, async_op=async_op)
    handle = ReduceHandle(call, statistics, keep=keep, **state)
    if not async_op:
        handle.wait()
    return handle


def _run(
    call: Call,
    group: ProcessGroup | None,
    device: torch.device,
    start: Callable[[], Callable[[], None]],
    *,
    async_op: bool,
) -> dict[str, Any]:
    """Start a collective; return what its handle has to wait for."""
    lane = lane_of(group) if async_op and group is not None and group.size() > 1 else None
    if device.type == "cuda":
        return _run_on_cuda(call, group, lane, device, start)
    rest = start()
    if lane is None:
        rest()
        return {}
    return {"ticket": lane.submit(_finishing(rest, call))}


def _finishing(rest: Callable[[], None], call: Call) -> Callable[[], None]:
    inference = (
        torch.is_inference_mode_enabled()
    )  # a mode of the thread; tensors made in it need it

    def job() -> None:
        with torch.inference_mode(inference):
            rest()
        call.finish()

    return job


def _run_on_cuda(
    call: Call,
    group: ProcessGroup | None,
    lane: Lane | None,
    device: torch.device,
    start: Callable[[], Callable[[], None]],
) -> dict[str, Any]:
    current = torch.cuda.current_stream(device)
    side = current if lane is None else lane.stream(device)
    begin, end = _event(call.recorded), _event(call.recorded)
    if call.recorded:
        call.device_events = (begin, end)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        begin.record()
        rest = start()

    def job() -> None:
        with torch.cuda.device(device), torch.cuda.stream(side):
            rest()
            end.record()

    if lane is None:
        job()
        return {}
    ticket = None
    if served_by_gloo(
        group, device
    ):  # the rest blocks the host (gloo); for NCCL a stream is enough
        ticket = lane.submit(_finishing(job, call))
    else:
        job()
    return {"ticket": ticket, "event": end, "issued_on": current}


def _event(timing: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
