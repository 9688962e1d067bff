"""What every collective is: prepared, started, and a handle to wait for.

Note [Prepared collectives hold no tensors]
A `Collective` knows all that does not change between two calls: the group's size and this rank's
place in it, dtypes and numbers of elements, the route, the lane. Its buffers come with each start,
which compares them with that. It does not hold them, because memory comes and goes between two
calls: weights are released after use, main grads and scratch may be other tensors in the next
step. A held tensor would keep memory alive that the engine has given back.

Note [Handles hold tensors until wait]
A handle owns every tensor its collective still reads or writes, so the caller may drop theirs at
once. On CUDA no `record_stream` is used, which would make memory use depend on timing: the tensors
stay referenced until `wait` has ordered the caller's stream behind the collective, after which the
allocator's own stream order protects them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NoReturn, TypeVar, cast

import torch
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from lamina.collectives.call.checks import require_disjoint, require_flat, require_same_device
from lamina.collectives.call.record import Call, issue
from lamina.collectives.call.spans import NO_SPAN
from lamina.collectives.compat import profiling
from lamina.collectives.transport.groups import served_by_gloo, where
from lamina.collectives.transport.lanes import Job, Lane, lane_of
from lamina.collectives.transport.transport import Completion
from lamina.mesh.engine import running_watchdog

__all__ = [
    "Collective",
    "DamagedMessageError",
    "Handle",
    "PeerLostError",
    "Pending",
    "ReduceHandle",
    "Statistics",
    "current_stream",
    "launch",
]

_LOOK_AROUND = 1.0  # seconds


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that work on a device is queued on now; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class PeerLostError(RuntimeError):
    """A rank that a collective needs is gone."""


class DamagedMessageError(RuntimeError):
    """What a rank has sent is not what arrived, or not what was summed."""


def raise_for(error: RuntimeError, call: Call, lane: Lane | None) -> NoReturn:
    """Raise what a transport has raised, with the rank that is gone and why, if one is."""
    group = None if lane is None else lane.ref()
    if isinstance(error, DamagedMessageError):
        raise DamagedMessageError(f"{call.told()} {where(group)}: {error}") from error
    watchdog = running_watchdog()
    lost = None
    if watchdog is not None and lane is not None and not isinstance(error, PeerLostError):
        lost = watchdog.cause(lane.ranks)
    if lost is None:
        raise error
    raise PeerLostError(f"{call.told()} {where(group)}: {lost}\n({error})") from error


class Handle:
    """A collective in flight; `wait` makes its result safe to use.

    On CPU `wait` blocks. On CUDA it makes the current stream wait and does not block the host
    (except over gloo, where the host moves the bytes).
    """

    def __init__(self, call: Call, keep: tuple[torch.Tensor | None, ...] = ()) -> None:
        self._call = call
        self._keep = keep  # see Note [Handles hold tensors until wait]
        self._pending = True
        self._job: Job | None = None
        self._lane: Lane | None = None
        self._event: torch.cuda.Event | None = None
        self._issued_on: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """Wait for the result; a second call returns at once.

        Raises:
            RuntimeError: what the transport raised (a peer that died, a timeout).
        """
        if not self._pending:
            return
        call = self._call
        call.wait_begins()
        try:
            with record_function(f"wait for {call.title()}") if profiling() else NO_SPAN:
                if self._job is not None:
                    self._wait_for(self._job)
                if self._event is not None and self._issued_on is not None:
                    torch.cuda.current_stream(self._issued_on.device).wait_event(self._event)
            self._pending = False  # not after a failure, which every further wait reports again
        finally:
            if call.finished_ns is None:
                call.finish()
            self._keep = ()

    def _wait_for(self, job: Job) -> None:
        # Another thread waits for the messages, so this one can leave when a rank is gone that
        # this rank has no connection to.
        try:
            while not job.wait(_LOOK_AROUND):
                watchdog = running_watchdog()
                if watchdog is not None and watchdog.gives_up() is not None:
                    raise RuntimeError("the collective cannot end any more")
        except RuntimeError as error:
            raise_for(error, self._call, self._lane)

    def __del__(self) -> None:
        # Dropped without a wait: the tensors are about to be freed on the stream they came from,
        # so that stream has to come after the collective. On CPU the worker holds the tensors.
        if self._pending and self._event is not None and self._issued_on is not None:
            if self._job is not None:
                self._job.wait()
            self._issued_on.wait_event(self._event)


class Statistics:
    """Squared norm and non-finite flag of a reduced shard, filled in by the sum itself."""

    def __init__(self, device: torch.device) -> None:
        self.squared_norm = torch.empty((), dtype=torch.float64, device=device)
        self.nonfinite = torch.empty((), dtype=torch.bool, device=device)


class ReduceHandle(Handle):
    """A reduction in flight. Reading a statistic waits first."""

    def __init__(
        self, call: Call, keep: tuple[torch.Tensor | None, ...], statistics: Statistics | None
    ) -> None:
        super().__init__(call, keep)
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


AnyHandle = TypeVar("AnyHandle", bound=Handle)
ResultT = TypeVar("ResultT")


class Pending(Generic[ResultT]):
    """The result of a collective in flight.

    It holds the tensors the collective reads and writes, so the caller may drop theirs. Dropping
    a Pending without waiting is safe, and loses the result.
    """

    def __init__(self, handle: Handle | None, result: Callable[[], ResultT]) -> None:
        self._handle = handle
        self._result: Callable[[], ResultT] | None = result
        self._value: ResultT | None = None

    def wait(self) -> ResultT:
        """Return the result, waiting for it if need be; further calls return the same one.

        On CUDA the current stream waits, not the host. RuntimeError is what the transport raised (a
        peer that died, a timeout).
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if self._result is not None:
            self._value = self._result()
            self._result = None
        return cast("ResultT", self._value)


class Collective:
    """A collective from one flat tensor into another, prepared once and started often.

    `op` is the name of the public function, for messages and the ledger. Buffers are of the kind
    that will be filled and sent. See Note [Prepared collectives ...]. ValueError: tensors with
    several dimensions or strides, or on several devices.
    """

    overlap_hint = ""
    """What overlap of the two is allowed, for the message that refuses another one."""
    _transfer: Callable[[torch.Tensor, torch.Tensor], Completion]
    """Posts the messages from input to output and returns what is left to do."""

    def __init__(
        self, op: str, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None
    ) -> None:
        lane = lane_of(group)
        self.op, self._lane = op, None if lane is None or lane.size == 1 else lane
        self.size, self.rank = (1, 0) if lane is None else (lane.size, lane.rank)
        require_flat(op, "output", output, group)
        require_flat(op, "input", input, group)
        self.device = require_same_device(op, group, output=output, input=input)
        self._kinds = (output.dtype, output.numel()), (input.dtype, input.numel())
        self._wire_dtype, self._sent = input.dtype, 0

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks, or None for a group of one; RuntimeError if the group is destroyed."""
        lane = self._lane
        return None if lane is None else lane.ref() or lane.ref.group  # which says so

    def _may_overlap(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Whether two tensors that share memory do so in the one way that is allowed."""
        raise NotImplementedError

    def _leaving(self, near: Sequence[int]) -> int:
        """Bytes that this rank sends to other ranks than `near`, those of this host."""
        return self._sent * (self.size - len(near)) // (self.size - 1)

    def fits(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Whether the two are of the kind that was prepared for: dtypes, sizes and device."""
        kinds = (output.dtype, output.numel()), (input.dtype, input.numel())
        return kinds == self._kinds and output.device == self.device == input.device

    def _require_buffers(
        self, output: torch.Tensor, input: torch.Tensor, *, in_place: bool = True
    ) -> None:
        """Refuse buffers of another kind than was prepared for, or that overlap."""
        kinds = (output.dtype, output.numel()), (input.dtype, input.numel())
        flat = output.dim() == input.dim() == 1 and output.is_contiguous() and input.is_contiguous()
        if kinds != self._kinds or not output.device == self.device == input.device or not flat:
            raise ValueError(
                f"{self.op} {where(self.group)}: prepared for flat tensors (dtype, elements) "
                f"{self._kinds} on {self.device}, started with `output` {tuple(output.shape)} "
                f"{output.dtype} on {output.device} and `input` {tuple(input.shape)} "
                f"{input.dtype} on {input.device}; prepare another one for these"
            )
        first, second = output.data_ptr(), input.data_ptr()
        apart = second >= first + output.nbytes or first >= second + input.nbytes
        if not apart and not (in_place and self._may_overlap(output, input)):
            named = ("output", output), ("input", input)
            require_disjoint(self.op, self.group, *named, unless=self.overlap_hint)

    def start(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = True) -> Handle:
        """Move bytes from `input`, which must not change until the handle's `wait`, to `output`.

        ValueError: buffers of another kind than was prepared for, or that share memory.
        """
        output, input = output.detach(), input.detach()
        self._require_buffers(output, input)
        kind = self.op, self._lane, self._wire_dtype
        call = issue(*kind, self._sent, between=self._leaving, async_op=async_op)
        return launch(
            Handle(call, (output, input)),
            self._lane,
            self.device,
            partial(self._transfer, output, input),
            async_op=async_op,
        )


def launch(
    handle: AnyHandle,
    lane: Lane | None,
    device: torch.device,
    begin: Callable[[], Completion],
    *,
    async_op: bool,
) -> AnyHandle:
    """Run a collective and return its handle.

    The handle holds the record, and the tensors that must outlive the collective. A lane of None is
    one rank alone, which is never asynchronous. `begin` posts the messages without blocking and
    returns what is left to do once they are under way (wait for them, sum, copy back), which
    `async_op` leaves to the lane.
    """
    handle._lane, beside = lane, lane if async_op and lane is not None and lane.size > 1 else None
    try:
        with record_function(handle._call.title()) if profiling() else NO_SPAN:
            if device.type == "cuda":
                _launch_on_cuda(handle, beside, device, begin, async_op=async_op)
            else:
                complete = begin()
                if beside is None:
                    complete()
                else:
                    handle._job = beside.worker.submit(complete, handle._call.finish)
    except RuntimeError as error:
        raise_for(error, handle._call, lane)
    if not async_op:
        handle.wait()
    return handle


def _launch_on_cuda(
    handle: Handle,
    lane: Lane | None,
    device: torch.device,
    begin: Callable[[], Completion],
    *,
    async_op: bool,
) -> None:
    call = handle._call
    current = torch.cuda.current_stream(device)
    side = current if lane is None else lane.stream(device)
    started, ended = _event(call.recorded), _event(call.recorded)
    if call.recorded:
        call.device_events = [started, ended]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        started.record()
        complete = begin()

    def finish() -> None:
        with torch.cuda.device(device), torch.cuda.stream(side):
            complete()
            ended.record()

    # gloo blocks the host, so the lane's thread completes it. For NCCL a stream is enough.
    if lane is not None and served_by_gloo(lane.group, device):
        handle._job = lane.worker.submit(finish, call.finish)
    else:
        finish()
    if async_op:  # in a group of one too: who waits may be on another stream than who has called
        handle._event, handle._issued_on = ended, current
    if lane is not None and not torch.cuda.is_current_stream_capturing():
        call.device_ended = ended  # an event of a graph has no end of its own


def _event(timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
