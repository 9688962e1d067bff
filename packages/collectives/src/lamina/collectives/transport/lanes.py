"""What a process group needs between calls: tags, a worker thread, a CUDA stream, scratch memory.

A lane is to the CPU what a communication stream is to a GPU: work handed to it runs in the order
it was handed in, beside the caller. Its memory is what one collective leaves for the next, because
on a CPU fresh pages cost as much as the work.

Note [Every group has a lane of its own]
Work in a lane waits for other ranks. If two groups shared a lane, two ranks that use the groups in
different orders would wait for each other for ever. See docs/decisions/0304-lanes.md.

Note [Tags are drawn when a collective is called]
All ranks call the collectives of a group in one order, so they draw equal tags, whichever thread
posts the messages later. If the worker threads drew them, each rank would number its messages in
the order in which its threads happened to run, and messages of two collectives would be mixed up.
A collective of two exchanges draws both tags when it is called. See docs/decisions/0304-lanes.md.

Note [Threads are used again]
A lane has a thread only while it has work, so groups without work cost no threads. The threads stay
for the next lane. torch keeps 120 bytes for ever of each thread that has waited for a message
(`RankLocal` in its registry of works), so a thread per collective would be a leak.
"""

import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.compat import DeviceEnd, has_ended
from lamina.collectives.transport.groups import no_group
from lamina.collectives.transport.shared_host import HostPeer, find_host_peers
from lamina.mesh.engine import ends_with_groups, group_ref, ranks_of

# Messages of collectives carry tags above those that users give to their own sends.
_FIRST_TAG = 1 << 24
_TAGS = 1 << 24
_PATIENCE = 4.0  # seconds: what nobody waits for may need ranks that are gone
_MOST_SCRATCH = 64 << 20  # bytes that a group keeps
_LONG = 1.0  # seconds; younger events are not asked


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
        device_ended: on CUDA, the event after the collective on its stream, or the backend's own
            end of it.
        purpose: the unit or bucket that it is for, in words.
        number: how many collectives this rank has begun in the group, this one included.
        is_recorded: whether a recorder has it.
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
    device_ended: DeviceEnd | None = None
    purpose: str = ""
    number: int = 0
    between: int = 0
    is_recorded: bool = False

    @property
    def recorded(self) -> bool:
        """True if anyone looks (so that device timing events are worth making).

        False while a CUDA graph is captured: a captured event has no time of its own.
        """
        if not self.is_recorded:
            return False
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return not (in_use and torch.cuda.is_current_stream_capturing())

    def finish(self) -> None:
        """Note the end of the transport; only the first note counts."""
        # No lock: a handle's `wait` comes to this only after the worker that has noted it before.
        if self.finished_ns is None:
            self.finished_ns = time.perf_counter_ns()

    def what(self) -> str:
        """The operation, and what it is for."""
        return f"{self.op} of {self.purpose}" if self.purpose else self.op

    def title(self) -> str:
        """The same, and along which axis."""
        return f"{self.what()} ({self.axis})"

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


class Job:
    """Work for a thread, and its end.

    `run` is called in the inference mode of the thread that makes the job. Its end is noted in the
    collective that it is a part of, unless it failed.
    """

    def __init__(self, run: Callable[[], object], call: Call | None = None) -> None:
        self._work: Callable[[], object] | None = run
        self._call = call
        self._inference = torch.is_inference_mode_enabled()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []

    def start(self) -> None:
        """Do the work on a thread that no lane needs."""
        _run_on_a_thread(self.execute)

    def execute(self) -> None:
        """Do the work on the thread that calls."""
        assert self._work is not None  # noqa: S101 - a job is executed once
        try:
            with torch.inference_mode(self._inference):
                self._work()
            if self._call is not None:
                self._call.finished_ns = time.perf_counter_ns()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # their tensors, and the group
            self._error = error
        # Drop the tensors first: whoever waits may count memory.
        self._work = None
        self._done.set()
        self._run_after()

    def when_done(self, action: Callable[[], object]) -> None:
        """Call `action` once the work is done, on the thread that did it; at once if it is done.

        After work that failed it is dropped without a call.
        """
        self._after.append(action)
        if self._done.is_set():  # perhaps since before the line above
            self._run_after()

    def _run_after(self) -> None:
        # Two threads may be here. `pop` gives each action to one of them.
        while self._after:
            try:
                action = self._after.pop()
            except IndexError:
                return
            if self._error is None:
                action()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the work is done, and raise what it raised; False after `timeout` seconds."""
        done = self._done.wait(timeout)
        if self._error is not None:
            raise self._error
        return done


_idle: list[SimpleQueue[Callable[[], object]]] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def _run_on_a_thread(work: Callable[[], object]) -> None:
    """Run work, which must not raise, on an idle thread; see Note [Threads are used again]."""
    try:
        works = _idle.pop()
    except IndexError:
        works = SimpleQueue()
        threading.Thread(target=_run_all, args=(works,), name="lamina-lane", daemon=True).start()
    works.put(work)


def _run_all(works: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        works.get()()
        _idle.append(works)


class Worker:
    """Runs jobs in order, on a thread that it has only while there are some."""

    def __init__(self) -> None:
        self.process = os.getpid()
        """The one that has the thread, and is this rank. A child that it forks has none."""
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._running = False

    def submit(self, run: Callable[[], object], call: Call | None = None) -> Job:
        """Run work, of a collective, after all that was submitted before it."""
        job = Job(run, call)
        with self._lock:
            self._jobs.append(job)
            start = not self._running
            self._running = True
        if start:
            _run_on_a_thread(self._execute_jobs)
        return job

    @property
    def busy(self) -> bool:
        """Whether the thread is running."""
        with self._lock:
            return self._running

    def _execute_jobs(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    # Under the lock: a job that comes later finds that it has to start a thread.
                    self._running = False
                    return
                job = self._jobs.popleft()
            job.execute()


def _host_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that outlives a call. No inference tensor: later calls could not write to it."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device="cpu")


class SumBuffers:
    """Buffers of one sum at a time: each is made when it is first asked for, and kept."""

    def __init__(self) -> None:
        self._kept: dict[int | str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that were made."""
        return sum(buffer.nbytes for buffer in self._kept.values())

    def take(self, use: int | str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a use: a level of the tree, or what its name says; uninitialised."""
        kept = self._kept.get(use)
        if kept is None or kept.numel() < numel or kept.dtype != dtype:
            kept = self._kept[use] = _host_memory(numel, dtype)
        return kept[:numel]


class ScratchPool:
    """Scratch and sum buffers of one group, lent to one collective at a time.

    Kept between calls: as many sets of sum buffers as sums ran at once (a few MiB each), and at
    most 64 MiB of scratch, which only ranks that exchange messages need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scratch: list[torch.Tensor] = []
        self._scratch_bytes = 0
        self.sum_buffers: list[SumBuffers] = []
        """What no sum uses now. To take one from the end, or to add one, needs no lock."""

    def borrow(self, nbytes: int) -> torch.Tensor:
        """CPU scratch: uint8, at least `nbytes`, uninitialised."""
        with self._lock:
            best = None  # the smallest that fits: large ones are left for large messages
            for at, kept in enumerate(self._scratch):
                smaller = best is None or kept.nbytes < self._scratch[best].nbytes
                if kept.nbytes >= nbytes and smaller:
                    best = at
            if best is not None:
                self._scratch_bytes -= self._scratch[best].nbytes
                return self._scratch.pop(best)
        return _host_memory(nbytes, torch.uint8)

    def give_back(self, scratch: torch.Tensor) -> None:
        """Return what was borrowed. Where too much is kept, the oldest is freed."""
        with self._lock:
            self._scratch.append(scratch)
            self._scratch_bytes += scratch.nbytes
            while self._scratch_bytes > _MOST_SCRATCH:
                self._scratch_bytes -= self._scratch.pop(0).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes kept now (lent ones not counted)."""
        with self._lock:
            return self._scratch_bytes + sum(buffers.nbytes for buffers in self.sum_buffers)

    def clear(self) -> None:
        """Give what is kept back to the allocator; what is lent comes back as usual."""
        with self._lock:
            self._scratch.clear()
            self._scratch_bytes = 0
            self.sum_buffers.clear()


class Lane:
    """State of one process group on this rank; made on first use, dropped with the group.

    Where `group` is None it is that of one rank alone, which has nobody to talk to.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.ref = group_ref(group)
        """The group; a lane does not hold it. A call costs less than `group`."""
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.axis = "self" if group is None else str(group.group_desc)
        """Its description, which names the mesh axis."""
        self.ranks = () if group is None else tuple(ranks_of(group) or ())
        """Its members, if torch.distributed has made it."""
        # Collectives may be started by several threads, such as autograd's and the program's.
        self._lock = threading.Lock()
        self.worker = Worker()
        self._tag = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._finding = threading.Lock()
        self.willing = True
        """Whether this rank would read its peers' memory; see `keep_to_messages`."""
        self.host_peers: tuple[HostPeer | None, ...] | None = None
        """Per rank, the peer whose memory can be read; None before `find_host_peers`."""
        self.windows: dict[torch.device, Any] = {}
        """Per GPU what `open_window` found: a `PeerWindow`, or None."""
        self.scratch_pool = ScratchPool()
        self.newest: deque[Call] = deque(maxlen=16)
        """The last collectives that this rank has begun in the group."""

    @property
    def group(self) -> ProcessGroup:
        """The group; RuntimeError if it is destroyed."""
        assert self.ref is not None  # noqa: S101 - one rank alone exchanges nothing
        return self.ref.weak() or self.ref.group  # which says so

    def next_tag(self, count: int = 1) -> int:
        """Tag for the messages of one exchange, or the first of `count`; see Note [Tags ...]."""
        with self._lock:
            begin = self._tag if self._tag + count <= _TAGS else 0
            self._tag = begin + count
            return _FIRST_TAG + begin

    def finish(self, patience: float = _PATIENCE) -> None:
        """Wait until the thread has nothing to do; at most `patience` seconds."""
        end = time.monotonic() + patience
        while self.worker.busy and time.monotonic() < end:
            time.sleep(0.001)

    def find_host_peers(self, group: ProcessGroup) -> tuple[HostPeer | None, ...]:
        """Find out, with all ranks, whose memory can be read; only the first call asks."""
        with self._finding:
            if self.host_peers is None:
                self.host_peers = find_host_peers(group, willing=self.willing)
            return self.host_peers

    def keep_to_messages(self) -> None:
        """Never read a peer's memory; RuntimeError if the ranks have already agreed otherwise."""
        with self._finding:
            windows = any(window is not None for window in self.windows.values())
            if windows or any(self.host_peers or ()):
                raise RuntimeError(
                    "this group's ranks already read each other's memory; call use_messages() "
                    "right after the group is made, before its first collective"
                )
            self.willing = False

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Side stream of this group on `device`."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]


# Not a WeakKeyDictionary: who goes through one takes hold of each group for a moment, and a thread
# beside `destroy_process_group` would then be the one that ends a group, too late.
_lanes: dict[weakref.ref[ProcessGroup], Lane] = {}
_lanes_lock = threading.Lock()


ALONE = Lane(None)
"""The lane of a group of one rank."""


def lane_of(group: ProcessGroup | None) -> Lane:
    """Return the lane of `group`: one per group and process, which dies with the group.

    None is a group of one rank. TypeError: it is no process group.
    """
    if group is None:
        return ALONE
    try:
        if (lane := _lanes.get(weakref.ref(group))) is not None:
            return lane
        with _lanes_lock:  # two threads may come with a new group
            lane = _lanes.get(weakref.ref(group)) or Lane(group)
            _lanes[weakref.ref(group, lambda gone: _lanes.pop(gone, None))] = lane
    except (AttributeError, TypeError):
        raise no_group(group) from None
    ends_with_groups(lane, Lane.finish)
    return lane


def lanes() -> list[Lane]:
    """The lanes of all groups that have been used."""
    with _lanes_lock:
        return list(_lanes.values())


def kept_bytes() -> int:
    """Memory that collectives keep for their next calls, over all groups of this process.

    On CPU: buffers of the sums that ran at once (per group at most
    `threads * 2**17 * (8 + 4 * levels + 4)` bytes each, with `levels` up to log2(ranks) + 1 and
    at most 16 threads counted), and up to 64 MiB per group of what was received by messages. On a
    GPU: the windows in which GPUs of one host read each other's memory, 64 MiB per group.
    """
    kept = 0
    for lane in lanes():
        kept += lane.scratch_pool.nbytes
        kept += sum(window.nbytes for window in lane.windows.values() if window is not None)
    return kept


def release_kept() -> None:
    """Give back what `kept_bytes` counts, as after the last model; the next calls make it anew.

    Windows of GPUs stay as long as their group, because all ranks of it would have to agree.

    No communication: each rank may call it when it likes, also while collectives run.
    """
    for lane in lanes():
        lane.scratch_pool.clear()
