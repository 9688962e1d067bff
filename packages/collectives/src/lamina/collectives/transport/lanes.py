"""What a process group needs between calls: tags, a worker thread, a CUDA stream, scratch memory.

A lane is to the CPU what a communication stream is to a GPU: work handed to it runs in the order
it was handed in, beside the caller. Every group has a lane of its own, because work in a lane waits
for other ranks: were two groups to share one, two ranks that use the groups in different orders
would wait for each other for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lamina.collectives.transport.scratch_pool import ScratchPool
from lamina.collectives.transport.shared_host import HostPeer, find_host_peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Lane", "Ticket", "kept_bytes", "lane_of", "release_kept"]

# Messages of collectives carry tags above those that users give to their own sends.
_FIRST_TAG = 1 << 24
_TAGS = 1 << 24


class Ticket:
    """The end of one job: set by the worker, awaited by whoever needs the result."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the job as done, or as failed with `error`."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Block until the job is done; raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Lane:
    """State of one process group on this rank; made on first use, dropped with the group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], None], Ticket]] = deque()
        self._running = False
        self._tag = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._finding = threading.Lock()
        self._willing = True
        self._host_peers: tuple[HostPeer | None, ...] | None = None
        self.scratch_pool = ScratchPool()

    def next_tag(self) -> int:
        """Tag for the messages of one collective.

        Ranks call collectives of one group in one order, so they draw equal tags, and messages of
        two collectives in flight cannot be taken for each other, whichever thread posts them.
        """
        with self._lock:
            tag = _FIRST_TAG + self._tag
            self._tag = (self._tag + 1) % _TAGS
            return tag

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Run `job` on the worker thread, after all jobs submitted before it."""
        ticket = Ticket()
        with self._lock:
            self._jobs.append((job, ticket))
            start = not self._running
            self._running = True
        if start:
            # A thread lives while there is work: nothing to shut down, nothing left at a fork.
            threading.Thread(target=self._work, name="lamina-lane", daemon=True).start()
        return ticket

    @property
    def busy(self) -> bool:
        """Whether a worker thread is running."""
        with self._lock:
            return self._running

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job, ticket = self._jobs.popleft()
            failure = None
            try:
                job()
            except BaseException as error:
                failure = error
            # First of all: whoever waits may count memory, and tensors live as long as the job.
            del job
            ticket.finish(failure)
            del ticket, failure

    @property
    def knows_host_peers(self) -> bool:
        """Whether `find_host_peers` has been called."""
        return self._host_peers is not None

    @property
    def host_peers(self) -> tuple[HostPeer | None, ...]:
        """Per rank, the peer whose memory can be read; known after `find_host_peers`."""
        assert self._host_peers is not None  # noqa: S101 - the caller has found them
        return self._host_peers

    def find_host_peers(self, group: ProcessGroup) -> None:
        """Find the host peers, with all ranks of `group`; only the first call does."""
        with self._finding:
            if self._host_peers is None:
                self._host_peers = find_host_peers(group, willing=self._willing)

    def keep_to_messages(self) -> None:
        """Never read a peer's memory; before the first exchange.

        Raises:
            RuntimeError: the ranks have already agreed otherwise.
        """
        with self._finding:
            if self._host_peers is not None and any(self._host_peers):
                raise RuntimeError(
                    "this group's ranks already read each other's memory; call use_messages() "
                    "right after the group is made, before its first collective"
                )
            self._willing = False

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Side stream of this group on `device`."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]


_lanes: weakref.WeakKeyDictionary[ProcessGroup, Lane] = weakref.WeakKeyDictionary()
_lanes_lock = threading.Lock()


def lane_of(group: ProcessGroup) -> Lane:
    """Return the lane of `group` (one per group and process; it dies with the group)."""
    with _lanes_lock:
        lane = _lanes.get(group)
        if lane is None:
            lane = _lanes[group] = Lane()
        return lane


def kept_bytes() -> int:
    """Host memory that collectives keep for their next calls, over all groups of this process.

    On CPU only: buffers of the sums that ran at once (per group at most
    `threads * 2**17 * (8 + 4 * levels + 4)` bytes each, with `levels` up to log2(ranks) + 1 and
    at most 16 threads counted), and up to 64 MiB per group of what was received by messages.
    """
    with _lanes_lock:
        lanes = list(_lanes.values())
    return sum(lane.scratch_pool.nbytes for lane in lanes)


def release_kept() -> None:
    """Give back what `kept_bytes` counts, as after the last model; the next calls make it anew.

    No communication: each rank may call it when it likes, also while collectives run.
    """
    with _lanes_lock:
        lanes = list(_lanes.values())
    for lane in lanes:
        lane.scratch_pool.clear()
