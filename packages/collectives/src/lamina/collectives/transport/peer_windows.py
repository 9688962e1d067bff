"""Ranks of a host read each other's GPU memory: sums and gathers without an exchange.

Over NVLink a GPU can read what lies in another one. torch's symmetric memory maps a block of each
rank into all ranks of a group. A rank copies what the others are to read into its own block, waits
until all ranks have done so, and reads the blocks of the others: for a sum in the kernel that
adds, for a gather by copies, which the copy engines make. Nothing is sent, and no memory waits for
what arrives. See docs/decisions/0317-gpus-of-a-host-read-windows.md.

Note [Two areas need one wait each]
A block has two areas, which are filled in turn. A rank that has passed the wait after it filled one
area knows that every rank has come to that wait. Each rank comes there after it has read the other
area, because all its work in a window is on streams that follow each other. So the other
area may be filled again at once, and no second wait says that it was read.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.compat import shared_block
from lamina.collectives.transport.groups import backend_name, timeout_of, where
from lamina.collectives.transport.lanes import lane_of
from lamina.mesh.engine import host_runs

AREA_BYTES = 32 << 20
"""Bytes of each of the two areas of a window, which is also the most that a slice takes."""
MOST_PEERS = 32  # rows that the kernel of a sum unrolls
_LINE = 1024  # elements that rows are padded to: as many as the smallest block of a sum takes
_LOGGER = logging.getLogger(__name__)


class PeerMemory(Protocol):
    """What torch's handle to the blocks of all ranks can do."""

    buffer_ptrs: Sequence[int]
    """The addresses, in this process, of the ranks' blocks."""

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor over a part of a rank's block; the offset is in elements."""

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait until all ranks' streams have come here."""


@dataclass(frozen=True)
class PeerRows:
    """Rows of equal length, one in each rank's block.

    `addresses`, [ranks] int64, are where the blocks begin, and `start` elements of `dtype` lie from
    there to the row.
    """

    addresses: torch.Tensor
    start: int
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.addresses.numel()


class PeerWindow:
    """A block of this rank that all ranks of its group map, and theirs.

    See Note [Two areas need one wait each].

    `block` is flat uint8, of this rank, and `memory` the handle to the blocks of all ranks. A wait
    for the other ranks fails after `timeout` seconds.
    """

    def __init__(
        self, block: torch.Tensor, memory: PeerMemory, rank: int, timeout: float = 0.0
    ) -> None:
        self.rank, self.size = rank, len(memory.buffer_ptrs)
        self.nbytes = block.numel()
        self.addresses = torch.tensor(memory.buffer_ptrs, dtype=torch.int64, device=block.device)
        self._block, self._memory = block, memory
        self._wait = partial(memory.barrier, timeout_ms=int(1e3 * timeout))
        self._area, self._turn = block.numel() // 2 // 16 * 16, 0
        self._order: torch.cuda.Stream | None = None
        if block.is_cuda:
            self._order = torch.cuda.Stream(block.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Order the current stream after all earlier work in the window, and later work after it.

        The stream that all others wait for runs nothing. It waits first, so that it is a part of a
        CUDA graph which is being captured.
        """
        order = self._order
        if order is None:
            yield
            return
        current = torch.cuda.current_stream(order.device)
        order.wait_stream(current)
        current.wait_stream(order)
        yield
        order.wait_stream(current)

    def _fill(self, rows: torch.Tensor) -> tuple[int, int]:
        """Copy [n, width] into the next area, and wait for all ranks.

        The elements come back, of that dtype, from the begin of the block to the area, and from row
        to row.
        """
        count, width = rows.shape
        pitch, start = -(-width // _LINE) * _LINE, self._turn * self._area
        self._turn = 1 - self._turn  # see Note [Two areas need one wait each]
        nbytes = count * pitch * rows.itemsize
        area = self._block[start : start + nbytes].view(rows.dtype).view(count, pitch)
        area[:, :width].copy_(rows)
        self._wait()
        return start // rows.itemsize, pitch

    def _slices(self, rows: torch.Tensor) -> Iterator[slice]:
        """Runs of the columns of [n, items] of which the rows fit into an area."""
        width = max(self._area // (len(rows) * rows.itemsize * _LINE), 1) * _LINE
        for start in range(0, rows.shape[1], width):
            yield slice(start, min(start + width, rows.shape[1]))

    def rows_for_this_rank(self, pieces: torch.Tensor) -> Iterator[tuple[slice, PeerRows]]:
        """Show [ranks, items] to all ranks; yield each slice of the items, and where to read it."""
        with self._alone():
            for place in self._slices(pieces):
                start, pitch = self._fill(pieces[:, place])
                yield place, PeerRows(self.addresses, start + self.rank * pitch, pieces.dtype)

    def gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Fill [ranks, items] with what each rank has in `input`, [items]."""
        with self._alone():
            for place in self._slices(input.view(1, -1)):
                start, _ = self._fill(input[place].view(1, -1))
                size = (place.stop - place.start,)
                for step in range(1, self.size):  # so that no two ranks begin with the same one
                    peer = (self.rank + step) % self.size
                    piece = self._memory.get_buffer(peer, size, input.dtype, start)
                    output[peer, place].copy_(piece)
        own = output[self.rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)


@dataclass(frozen=True)
class PeerChunks:
    """Every rank's chunk for this rank, to be read in slices by a sum."""

    window: PeerWindow
    pieces: torch.Tensor
    """[ranks, items]: what the other ranks read."""

    def chunks(self) -> "PeerChunks":
        """Nothing is on its way: the sum shows and reads one slice after the other."""
        return self

    def slices(self) -> Iterator[tuple[slice, PeerRows]]:
        """Runs of the sum's elements, each with its rows; all ranks take them in one order."""
        return self.window.rows_for_this_rank(self.pieces)

    def close(self) -> None:
        """Nothing is lent: what the others read is a copy."""


class PeerRoute:
    """How equal pieces travel between ranks that have a window; arguments as in `Route`."""

    needs_scratch = only_posts = False
    tags = run = 1

    def __init__(self, window: PeerWindow) -> None:
        self._window = window

    def gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: int | None = None
    ) -> Callable[[], None]:
        """Show `input` to all ranks, and copy every rank's piece to where it belongs."""
        return partial(self._window.gather, output.view(self._window.size, -1), input)

    def collect(
        self, input: torch.Tensor, scratch: torch.Tensor | None = None, tag: int | None = None
    ) -> PeerChunks:
        """What a sum reads; `scratch` is not needed."""
        return PeerChunks(self._window, input.view(self._window.size, -1))


def open_window(group: ProcessGroup | None, device: torch.device) -> None:
    """Let the ranks of `group` read each other's memory on `device`, if they are GPUs of one host.

    Collective over the group, where `device` is a GPU. The first call decides, and the first rank
    logs the choice. Collectives that are prepared later use it.
    """
    if group is None or device.type != "cuda":
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    lane = lane_of(group)
    if device in lane.windows:
        return
    reason, window = _refusal(group, device), None
    if reason is None and not _all_agree(group, device, lane.willing):
        reason = "use_messages() was called"
    if reason is None:
        window, reason = _make_window(group, device)
    lane.windows[device] = window
    if group.rank() == 0:
        choice = "read each other's memory" if window else f"exchange messages: {reason}"
        _LOGGER.info("collectives %s: its ranks %s", where(group), choice)


def window_bytes(group: ProcessGroup | None, device: torch.device) -> int:
    """GPU memory of this rank that a group's window takes; 0 where messages are exchanged."""
    window: PeerWindow | None = None if group is None else lane_of(group).windows.get(device)
    return 0 if window is None else window.nbytes


def _refusal(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks have to exchange messages, as all of them know; None if nothing is known."""
    size, backend = group.size(), backend_name(group, device)
    if not 1 < size <= MOST_PEERS:
        return f"it has {size} ranks, and windows serve 2 to {MOST_PEERS}"
    if host_runs(group).run != size:
        return "it spans several hosts"
    return None if backend == "nccl" else f"{backend} serves it, and windows are for NCCL's groups"


def _make_window(group: ProcessGroup, device: torch.device) -> tuple[PeerWindow | None, str | None]:
    """The window, or None and why; each step needs all ranks, so all must have done the last."""
    window, reason = None, "another rank has no symmetric memory"
    try:
        block, memory = shared_block(2 * AREA_BYTES, device, group)
        window = PeerWindow(block, memory, group.rank(), timeout_of(group, device))
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        reason = f"torch gives no symmetric memory: {error}"
    # Each rank may fail alone, and the next step hangs unless all of them take it.
    if not _all_agree(group, device, window is not None) or window is None:
        return None, reason
    if not _all_agree(group, device, _reads_right(window, device)):
        return None, "a trial read other values than the ranks had written"
    return window, None


def _all_agree(group: ProcessGroup, device: torch.device, yes: bool) -> bool:
    """Whether all ranks say yes."""
    said = torch.tensor(int(yes), dtype=torch.int32, device=device)
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())


def _reads_right(window: PeerWindow, device: torch.device) -> bool:
    """Whether this rank reads what the others have written, in both areas."""
    own = torch.arange(1000, device=device, dtype=torch.float32) + 1000 * window.rank
    whole = torch.arange(1000 * window.size, device=device, dtype=torch.float32)
    right = True
    for _ in range(2):
        gathered = torch.zeros_like(whole)
        window.gather(gathered.view(window.size, -1), own)
        right = right and torch.equal(gathered, whole)
    return right
