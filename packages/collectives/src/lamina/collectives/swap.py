"""One exchange between the ranks of a gloo group, in host memory.

Two ways for the bytes of one pair of ranks, which both ends choose alike: a message (gloo's send
and receive, straight from the source into the destination), or, between neighbours
(`neighbours.py`) and above a size at which it pays, a note that says where the bytes lie; the
receiver reads them there and answers with a receipt, upon which the sender may reuse its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .checks import where
from .lanes import Lane, lane_of
from .neighbours import RemoteRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Chunk", "Swap"]

Chunk = torch.Tensor | RemoteRun

_READ_FROM = 1 << 21  # bytes; below, a note and a receipt cost more than the copies they save


class Swap:
    """Messages, notes and receipts of one exchange.

    :meth:`post` blocks on nothing; then :meth:`fetch` each source in :meth:`sources` order,
    :meth:`receipt` once it is read, and :meth:`close`.

    Args:
        sends: per rank of the group a contiguous CPU tensor, or None; unchanged until `close`.
        expects: per rank, how many elements it sends here.
        dtype: dtype of what is received.
        room: gives the tensor to receive a rank's message into; asked only for ranks that are
            not read directly.
        group: at least two ranks.
        tag: tag of the exchange; tag + 1 is used as well.
        direct: whether neighbours may be read.

    """

    def __init__(
        self,
        sends: Sequence[torch.Tensor | None],
        expects: Sequence[int],
        dtype: torch.dtype,
        room: Callable[[int], torch.Tensor],
        group: ProcessGroup,
        tag: int,
        *,
        direct: bool = True,
    ) -> None:
        self._sends, self._expects, self._dtype = sends, expects, dtype
        self._room, self._group, self._tag = room, group, tag
        self._lane: Lane = lane_of(group)
        self._direct = direct
        self._rank, self._size = group.rank(), group.size()
        self._inbound: dict[int, tuple[Work, torch.Tensor]] = {}
        self._notes: dict[int, torch.Tensor] = {}
        self._receipts: dict[int, tuple[Work, torch.Tensor, int]] = {}
        self._outbound: list[tuple[Work, torch.Tensor]] = []
        self._lent: list[torch.Tensor] = []

    def sources(self) -> list[int]:
        """Ranks that send here, nearest behind this one first, so that ranks start apart."""
        places = ((self._rank - step) % self._size for step in range(1, self._size))
        return [place for place in places if self._expects[place]]

    def post(self) -> None:
        """Post all receives, then all sends; neither blocks, so no order can deadlock."""
        if self._direct:
            self._lane.meet(self._group)
        for source in self.sources():
            if self._reads(source, self._expects[source] * self._dtype.itemsize):
                target = self._notes[source] = torch.zeros(2, dtype=torch.int64)
            else:
                target = self._room(source)
            self._inbound[source] = self._receive(target, source, self._tag)
        for step in range(1, self._size):
            target_rank = (self._rank + step) % self._size
            tensor = self._sends[target_rank]
            if tensor is not None and tensor.numel():
                self._send(tensor, target_rank)

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        message = tensor
        if self._reads(target, nbytes):
            pinned = torch.cuda.is_initialized() and tensor.is_pinned()  # type: ignore[no-untyped-call]
            if pinned:  # such pages may be closed to other processes
                tensor = torch.empty_like(tensor, pin_memory=False).copy_(tensor)
            message = torch.tensor([tensor.data_ptr(), nbytes], dtype=torch.int64)
            receipt = torch.zeros(1, dtype=torch.int64)
            work, _ = self._receive(receipt, target, self._tag + 1)
            self._receipts[target] = (work, receipt, nbytes)
        self._lent.append(tensor)
        self._post_send(message, target, self._tag)

    def _reads(self, place: int, nbytes: int) -> bool:
        return self._direct and nbytes >= _READ_FROM and self._lane.neighbours[place] is not None

    def _receive(self, target: torch.Tensor, source: int, tag: int) -> tuple[Work, torch.Tensor]:
        work = dist.irecv(target, group=self._group, group_src=source, tag=tag)
        return _posted(work), target

    def _post_send(self, message: torch.Tensor, target: int, tag: int) -> None:
        work = dist.isend(message, group=self._group, group_dst=target, tag=tag)
        self._outbound.append((_posted(work), message))

    def fetch(self, source: int) -> Chunk:
        """Wait for what `source` sends: the tensor from `room`, or a run to read.

        Raises:
            ValueError: the neighbour sends another size than is expected here.

        """
        work, target = self._inbound[source]
        work.wait()
        note = self._notes.get(source)
        if note is None:
            return target
        address, nbytes = (int(word) for word in note)
        expected = self._expects[source] * self._dtype.itemsize
        if nbytes != expected:
            self._post_send(torch.tensor([expected]), source, self._tag + 1)
            self._fail(source, sends=nbytes, expects=expected)
        neighbour = self._lane.neighbours[source]
        assert neighbour is not None  # noqa: S101 - _reads said so
        return RemoteRun(neighbour, address, self._expects[source], self._dtype)

    def receipt(self, source: int) -> None:
        """Tell `source` that its memory has been read; nothing to tell after a message."""
        note = self._notes.get(source)
        if note is not None:
            self._post_send(note[1:].clone(), source, self._tag + 1)

    def close(self) -> None:
        """Wait until nobody needs this rank's send buffers any more.

        Raises:
            ValueError: a neighbour expected another size.

        """
        for work, _ in self._outbound:
            work.wait()
        for target, (work, receipt, nbytes) in self._receipts.items():
            work.wait()
            if int(receipt) != nbytes:
                self._fail(target, sends=nbytes, expects=int(receipt), to=True)
        self._outbound.clear()
        self._lent.clear()

    def _fail(self, peer: int, *, sends: int, expects: int, to: bool = False) -> None:
        ends = f"this rank sends {sends} bytes to rank {peer}, which expects {expects}"
        if not to:
            ends = f"rank {peer} sends {sends} bytes to this rank, which expects {expects}"
        raise ValueError(
            f"collective {where(self._group)}: {ends}; all ranks must pass buffers of the same "
            f"size and dtype (or matching splits) and call collectives in the same order"
        )


def _posted(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this rank is not in the process group it was asked to communicate in")
    return work
