"""What every collective is: prepared, started, recorded, and a handle to wait for.

A collective is recorded when it is launched: `issue` makes a `Call`, and a ledger, a profile and
the watchdog read it. `launch` posts its messages. Who finds the transport done notes the end in the
`Call`: the thread that has waited for the messages, a device event, or, at the latest, the handle's
`wait`. Functions that are made of other collectives record themselves once and call the unrecorded
parts.

Note [Who records]
The list of active recorders belongs to the thread that installed them, so two models trained by
two threads of one process do not see each other's calls. It is kept in torch's own thread-local
object table and not in a context variable, because autograd carries that table from the thread that
calls `backward` to its worker threads (CUDA device threads, deep re-entrant backwards), which
inherit no context, and gradients are reduced there.

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

Note [The backend has streams of its own]
NCCL's messages are queued on a stream of the communicator, which comes after the stream that was
current when they were posted. So a collective that only posts is posted from the caller's stream,
and a gather needs neither a stream nor an event of ours: its end is the backend's. A sum is
launched on the lane's stream, which comes after the messages, and so after the caller's stream.
Where a recorder wants the device's times, everything goes over the lane's stream, between events.

Note [A plain step pays for no names]
A step makes dozens of collectives, and most runs have neither a profiler nor a ledger. So a name is
put together only where somebody reads it: the purpose is a string that is set and reset, spans look
at one flag of torch's, and times are numbers in a `Call`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Generic, NoReturn, TypeAlias, TypeVar, cast

import torch
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from lamina.collectives.call.checks import require_disjoint, require_flat, require_same_device
from lamina.collectives.compat import (
    DeviceEnd,
    get_in_thread,
    is_in_thread,
    profiling,
    remove_from_thread,
    set_in_thread,
)
from lamina.collectives.transport.groups import served_by_gloo, where
from lamina.collectives.transport.lanes import ALONE, Call, Job, Lane, lane_of, lanes
from lamina.collectives.transport.transport import BackendEnd, Completion
from lamina.mesh.engine import Activity, Wait, host_runs, live_group, running_watchdog

_LOOK_AROUND = 1.0  # seconds
_NO_SPAN = nullcontext()
"""Stands in for a `record_function` where no profiler records."""

purpose: ContextVar[str] = ContextVar("lamina.collectives.purpose", default="")
"""What the collectives that are issued now are for, in words: the unit or bucket; "" where nobody
has said so. Their records, a profile and the messages about long waits name it."""


class Span:
    """A span of a profile that begins in one call and ends in another, as those of hooks do.

    One that is never ended, because what it is about has raised, ends with the next or when it is
    dropped.

    Examples:
        >>> compute = Span()
        >>> compute.begin("forward of", "blocks.0")  # a profile shows what follows under this name
        >>> compute.end()
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: record_function | None = None
        """What a profile records now."""

    def begin(self, what: str, name: str) -> None:
        """Begin it: what is done, and the unit ("" is the root). The one before ends."""
        if self.open is not None:
            self.end()
        if profiling():
            self.open = record_function(f"{what} {name or 'the root'}")
            self.open.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End it, if it has begun."""
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


Recorder: TypeAlias = Callable[[Call], None]
"""Takes note of a collective that is launched, on any thread; its other times are still None."""


def activity() -> Activity:
    """What this rank does in collectives, over all groups."""
    waits, recent = [], []
    for lane in lanes():
        # A copy: other threads may begin collectives meanwhile.
        for call in list(lane.newest):
            seconds = call.waited_for()
            if seconds is not None:
                waits.append(Wait(call.what(), call.axis, call.number, seconds, lane.ranks))
            recent.append((call.issued_ns, f"{call.what()} ({call.axis} {call.number})"))
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
    lane: Lane,
    dtype: torch.dtype,
    nbytes: int,
    *,
    between: Callable[[Sequence[int]], int] | None = None,
    async_op: bool = False,
) -> Call:
    """Record the launch of a collective and return its `Call`.

    `op` is the name of the public function, and this rank sends `nbytes`. `between` says how many
    of them go to other hosts, from the ranks of the group on this one; None where every other rank
    is sent as much. RuntimeError: this process is not the rank, but a child that it forked.
    """
    if lane.size > 1 and lane.worker.process != os.getpid():
        # Its messages would mix with the rank's.
        raise RuntimeError(
            f"{op} along {lane.axis} in process {os.getpid()}, which was forked from rank "
            f"{lane.rank} of {lane.size} (process {lane.worker.process}) and is no rank: a "
            "forward, a step or full_parameters of a wrapped model belongs into the rank itself. "
            "Give a child what it needs (tensors of full_parameters, from the rank), or start it "
            "by multiprocessing's 'spawn' with groups of its own"
        )
    recorders = get_in_thread(_KEY) if is_in_thread(_KEY) else ()  # see Note [Who records]
    now, served, size = time.perf_counter_ns(), purpose.get(), lane.size
    call = Call(op, lane.axis, size, dtype, nbytes, async_op, now, purpose=served)
    call.is_recorded = bool(recorders)
    if size > 1:
        # The watchdog reads the lane's newest calls, but only a lane that has any.
        if not lane.newest and (watchdog := running_watchdog()) is not None:
            watchdog.watch(activity)
        call.number = lane.newest[-1].number + 1 if lane.newest else 1
        lane.newest.append(call)
        if recorders:  # nobody else asks what went to other hosts
            near = host_runs(lane.group).near
            far = nbytes * (size - len(near)) // (size - 1)
            call.between = far if between is None else between(near)
    for recorder in recorders:
        recorder(call)
    return call


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that work on a device is queued on now; None on a CPU."""
    # A number is found in a quarter of the time that a device takes, and this runs per parameter.
    return torch.cuda.current_stream(device.index) if device.type == "cuda" else None


class PeerLostError(RuntimeError):
    """A rank that a collective needs is gone."""


class DamagedMessageError(RuntimeError):
    """What a rank has sent is not what arrived, or not what was summed."""


def raise_for(error: RuntimeError, call: Call, lane: Lane) -> NoReturn:
    """Raise what a transport has raised, with the rank that is gone and why, if one is."""
    group = None if lane.ref is None else lane.ref.weak()
    if isinstance(error, DamagedMessageError):
        raise DamagedMessageError(f"{call.what()} {where(group)}: {error}") from error
    # The transport knows that a connection broke; the watchdog knows which process ended and why.
    watchdog = running_watchdog()
    lost = None
    if watchdog is not None and not isinstance(error, PeerLostError):
        lost = watchdog.cause(lane.ranks)
    if lost is None:
        raise error
    raise PeerLostError(f"{call.what()} {where(group)}: {lost}\n({error})") from error


class _EndOnDevice:
    """The end of a collective on a GPU, which the stream of who has called has to come after.

    If it is dropped before anybody has waited, `keep` is about to be freed on that stream, which
    therefore comes after the collective first. On a CPU the lane's thread holds the tensors.
    `event` is recorded after the collective, or the end of what the backend has queued alone.
    """

    __slots__ = ("_call", "_job", "_keep", "event", "stream")

    def __init__(
        self,
        call: Call,
        event: DeviceEnd,
        stream: torch.cuda.Stream,
        job: Job | None,
        keep: tuple[object, ...],
    ) -> None:
        self.event: DeviceEnd | None = event
        """After the collective on its own stream; None once somebody has waited."""
        self.stream = stream
        self._call, self._job, self._keep = call, job, keep

    def forget(self) -> None:
        """A stream has come after it: nothing is left to do when it is dropped."""
        event, call = self.event, self._call
        self.event, self._keep = None, ()
        # The backend's own end keeps the output alive. A watchdog asks an event in its place.
        if isinstance(event, BackendEnd) and call.device_ended is event:
            call.device_ended = None
            if running_watchdog() is not None:
                call.device_ended = ended = _event(False)
                ended.record()

    def __del__(self) -> None:
        if self.event is None:
            return
        if self._job is None:
            self.event.wait(self.stream)
            self.forget()
        else:
            self._job.when_done(partial(_order, self.event, self.stream, self._keep))


# Note [Who drops a handle waits for nothing]
# Python may drop a handle on any thread: on the lane's, whose job was the last to refer to it, or
# where the garbage collector happens to run. That thread may be the one that the collective needs
# in order to end, so it must not wait for it. The job's thread does, once the collective has ended,
# what is left to do, and holds the tensors until then.


def _order(event: DeviceEnd, stream: torch.cuda.Stream, keep: tuple[object, ...]) -> None:
    """Let a stream come after a collective, before the tensors in `keep` are freed."""
    with suppress(RuntimeError):  # a device that has failed says so to whoever uses it next
        event.wait(stream)


class Handle:
    """A collective in flight; `wait` makes its result safe to use.

    On CPU `wait` blocks. On CUDA it makes the current stream wait and does not block the host
    (except over gloo, where the host moves the bytes).
    """

    def __init__(self, call: Call, keep: tuple[object, ...] = ()) -> None:
        self._call = call
        self._keep = keep  # see Note [Handles hold tensors until wait]
        self._pending = True
        self._job: Job | None = None
        self._lane = ALONE
        self._end: _EndOnDevice | None = None

    def wait(self) -> None:
        """Wait for the result; a second call returns at once.

        Raises:
            RuntimeError: what the transport raised (a peer that died, a timeout).
        """
        if not self._pending:
            return
        call, job = self._call, self._job
        if call.waited_ns is None:  # of a wait that failed before, the first begin counts
            call.waited_ns = time.perf_counter_ns()
            if call.device_events is not None:
                call.device_events.append(_event(timed=True))
                call.device_events[-1].record()
        try:
            with record_function(f"wait for {call.title()}") if profiling() else _NO_SPAN:
                # Another thread waits for the messages, so this one can leave when a rank is gone
                # that this rank has no connection to.
                while job is not None and not job.wait(_LOOK_AROUND):
                    watchdog = running_watchdog()
                    if watchdog is not None and watchdog.gives_up() is not None:
                        raise RuntimeError("the collective cannot end any more")
                if (end := self._end) is not None and end.event is not None:
                    end.event.wait(torch.cuda.current_stream(end.stream.device))
                    end.forget()
            self._pending = False  # not after a failure, which every further wait reports again
        except RuntimeError as error:
            raise_for(error, call, self._lane)
        finally:
            if call.finished_ns is None:
                call.finish()
            self._keep = ()


class Statistics:
    """Squared norm and non-finite flag of a reduced shard, filled in by the sum itself."""

    def __init__(self, device: torch.device) -> None:
        self.squared_norm = torch.empty((), dtype=torch.float64, device=device)
        self.nonfinite = torch.empty((), dtype=torch.bool, device=device)


class ReduceHandle(Handle):
    """A reduction in flight. Reading a statistic waits first."""

    def __init__(self, call: Call, keep: tuple[object, ...], statistics: Statistics | None) -> None:
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
    _in_place: int | None = None
    """How many bytes after the output the input begins where it may share memory with it."""
    _only_posts = False
    """Whether all that a start does on a GPU is to give the backend messages."""
    _transfer: Callable[[torch.Tensor, torch.Tensor], Completion]
    """Posts the messages from input to output and returns what is left to do."""

    def __init__(
        self, op: str, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None
    ) -> None:
        lane = lane_of(group)
        self.op, self._lane = op, lane if lane.size > 1 else ALONE
        self.size, self.rank = lane.size, lane.rank
        require_flat(op, "output", output, group)
        require_flat(op, "input", input, group)
        self.device = require_same_device(op, group, output=output, input=input)
        self._kinds = (output.dtype, output.numel()), (input.dtype, input.numel())
        self._wire_dtype, self._sent = input.dtype, 0

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks, or None for a group of one; RuntimeError if the group is destroyed."""
        return live_group(self._lane.ref)

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
        # Most calls end here, at a comparison of two addresses.
        first, second = output.data_ptr(), input.data_ptr()
        apart = second >= first + output.nbytes or first >= second + input.nbytes
        if not apart and not (in_place and second - first == self._in_place):
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
        transfer = partial(self._transfer, output, input)
        handle = Handle(call, (output, input))
        return launch(handle, self._lane, self.device, transfer, only_posts=self._only_posts)


def launch(
    handle: AnyHandle,
    lane: Lane,
    device: torch.device,
    begin: Callable[[], Completion],
    *,
    only_posts: bool = False,
) -> AnyHandle:
    """Run a collective and return its handle.

    The handle holds the record, and the tensors that must outlive the collective. One rank alone is
    never asynchronous. `begin` posts the messages without blocking and
    returns what is left to do once they are under way (wait for them, sum, copy back), which an
    asynchronous call leaves to the lane. With `only_posts` it queues no work of its own on a GPU.
    """
    call = handle._call
    # Who waits at once anyway needs no other thread, and one rank alone waits for nobody.
    beside = lane if call.async_op and call.group_size > 1 else None
    handle._lane = lane
    try:
        with record_function(call.title()) if profiling() else _NO_SPAN:
            if device.type == "cuda":
                _launch_on_cuda(handle, beside, device, begin, only_posts)
            else:
                complete = begin()
                if beside is None:
                    complete()
                else:
                    handle._job = beside.worker.submit(complete, call)
    except RuntimeError as error:
        raise_for(error, call, lane)
    if not call.async_op:
        handle.wait()
    return handle


def _launch_on_cuda(
    handle: Handle,
    lane: Lane | None,
    device: torch.device,
    begin: Callable[[], Completion],
    only_posts: bool,
) -> None:
    call = handle._call
    current = torch.cuda.current_stream(device.index)
    side = current if lane is None else lane.stream(device)
    if timed := call.recorded:
        call.device_events = [_event(True), _event(True)]
    if only_posts and not timed:
        # See Note [The backend has streams of its own].
        complete = begin()
    else:
        # The input may still be written on the caller's stream.
        if side != current:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            if call.device_events is not None:
                call.device_events[0].record()
            complete = begin()
    if call.async_op and isinstance(complete, BackendEnd) and not timed:
        ended: DeviceEnd = complete
    else:
        ended = _complete_on(side, handle, lane, device, complete)
    if call.async_op:  # of one rank too: who waits may be on another stream than who has called
        handle._end = _EndOnDevice(call, ended, current, handle._job, handle._keep)
    if lane is not None and not torch.cuda.is_current_stream_capturing():
        call.device_ended = ended  # an event of a graph has no end of its own


def _complete_on(
    side: torch.cuda.Stream,
    handle: Handle,
    lane: Lane | None,
    device: torch.device,
    complete: Completion,
) -> torch.cuda.Event:
    """Complete a collective on its own stream, on whichever thread, and return an event after."""
    call = handle._call  # not the handle, which ends when its owner drops it
    events = call.device_events
    ended = _event(False) if events is None else events[1]

    def finish() -> None:
        """Complete it on its own stream, whichever thread does."""
        with torch.cuda.device(device), torch.cuda.stream(side):
            complete()
            if call.async_op or events is not None:  # who is on the stream needs no event
                ended.record()

    # gloo blocks the host, so the lane's thread completes it. For NCCL a stream is enough.
    if lane is not None and served_by_gloo(lane.group, device):
        handle._job = lane.worker.submit(finish, call)
    else:
        finish()
    return ended


def _event(timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
