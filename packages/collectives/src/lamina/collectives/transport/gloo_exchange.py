"""One exchange between the ranks of a gloo group, in host memory.

The bytes of a pair of ranks take one of two ways, and both ends choose the same one. The first is a
message: gloo's send and receive, straight from the source into the destination. The second is
for ranks of one host (`shared_host`) and sizes at which it pays: the sender announces where
the bytes lie, the receiver reads them there and acknowledges, and then the sender may reuse its
buffer. Large messages that a sum waits for come in parts (`chunked_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from lamina.collectives.transport.chunked_messages import (
    ChunkedMessage,
    comes_in_parts,
    cut_in_parts,
)
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.lanes import Lane, lane_of
from lamina.collectives.transport.shared_host import HostPeer, RemoteMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Chunk", "GlooExchange"]

Chunk: TypeAlias = torch.Tensor | RemoteMemory | ChunkedMessage
"""What one rank contributes to a sum: here, in another process's memory, or on its way."""

READ_FROM = 1 << 17  # bytes per pair; below, reading saves nothing


class GlooExchange:
    """Messages, announcements and acknowledgements of one exchange.

    `post` blocks on nothing; then `fetch` each source in `sources` order, `acknowledge` once it is
    read, and `close`.

    Args:
        sends: per rank of the group a contiguous CPU tensor, or None; unchanged until `close`.
        expects: per rank, how many elements it sends here.
        dtype: dtype of what is received.
        memory: gives the tensor to receive a rank's message into; asked only for ranks that are
            not read directly.
        group: at least two ranks.
        tag: tag of the exchange.
        direct: whether ranks of this host may be read.
        parts: whether large messages come in parts, for a sum; on all ranks or on none. `memory`
            may return None for those.
    """

    def __init__(
        self,
        sends: Sequence[torch.Tensor | None],
        expects: Sequence[int],
        dtype: torch.dtype,
        memory: Callable[[int, bool], torch.Tensor | None],
        group: ProcessGroup,
        tag: int,
        *,
        direct: bool = True,
        parts: bool = False,
    ) -> None:
        self._sends, self._expects, self._dtype = sends, expects, dtype
        self._memory, self._group, self._tag = memory, group, tag
        self._lane: Lane = lane_of(group)
        self._direct, self._parts = direct, parts
        self._rank, self._size = group.rank(), group.size()
        self._inbound: dict[int, tuple[Work, torch.Tensor]] = {}
        self._in_parts: dict[int, ChunkedMessage] = {}
        self._outbound: list[tuple[Work, torch.Tensor]] = []
        self._lent: list[tuple[HostPeer, torch.Tensor]] = []

    def sources(self) -> list[int]:
        """Ranks that send here, nearest behind this one first, so that ranks start apart."""
        ranks = ((self._rank - step) % self._size for step in range(1, self._size))
        return [rank for rank in ranks if self._expects[rank]]

    def post(self) -> None:
        """Post all receives, then all sends; neither blocks, so no order can deadlock."""
        if self._direct:
            self._lane.find_host_peers(self._group)
        for source in self.sources():
            if self._read_from(source, self._nbytes_from(source)) is None:
                self._receive(source)
        for step in range(1, self._size):
            target_rank = (self._rank + step) % self._size
            tensor = self._sends[target_rank]
            if tensor is not None and tensor.numel():
                self._send(tensor, target_rank)

    def _receive(self, source: int) -> None:
        cut = self._cut(self._nbytes_from(source))
        target = self._memory(source, cut)
        if cut:
            numel, pool = self._expects[source], self._lane.scratch_pool
            message = ChunkedMessage(
                source, numel, self._dtype, self._group, self._tag, pool, target
            )
            self._in_parts[source] = message
            message.post()
        else:
            assert target is not None  # noqa: S101 - only what comes in parts may do without
            work = dist.irecv(target, group=self._group, group_src=source, tag=self._tag)
            self._inbound[source] = (_posted(work), target)

    def _cut(self, nbytes: int) -> bool:
        return self._parts and comes_in_parts(nbytes)

    def _nbytes_from(self, source: int) -> int:
        return self._expects[source] * self._dtype.itemsize

    def _read_from(self, rank: int, nbytes: int) -> HostPeer | None:
        """The peer whose `nbytes` are read, or None where they are sent."""
        readable = self._direct and nbytes >= READ_FROM
        return self._lane.host_peers[rank] if readable else None

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        peer = self._read_from(target, nbytes)
        if peer is None:
            for part in cut_in_parts(tensor) if self._cut(nbytes) else (tensor,):
                work = dist.isend(part, group=self._group, group_dst=target, tag=self._tag)
                self._outbound.append((_posted(work), part))
            return
        pinned = torch.cuda.is_initialized() and tensor.is_pinned()  # type: ignore[no-untyped-call]
        if pinned:  # such pages may be closed to other processes
            tensor = torch.empty_like(tensor, pin_memory=False).copy_(tensor)
        self._lent.append((peer, tensor))
        peer.announce(self._tag, tensor.data_ptr(), nbytes)

    def fetch(self, source: int) -> Chunk:
        """Wait for what `source` sends: a tensor, or a chunk whose reader waits for each block.

        Raises:
            ValueError: the peer sends another size than is expected here.
            RuntimeError: it does not come in time, or is gone.
        """
        if source in self._inbound:
            work, target = self._inbound[source]
            work.wait()
            return target
        if source in self._in_parts:
            return self._in_parts[source]
        expected = self._nbytes_from(source)
        peer = self._read_from(source, expected)
        assert peer is not None  # noqa: S101 - or `post` would have posted a receive
        address, nbytes = peer.take_announcement(self._tag)
        if nbytes != expected:
            peer.acknowledge(self._tag, expected)
            raise self._mismatch(f"rank {source} sends {nbytes} bytes to this rank", expected)
        return RemoteMemory(peer, address, self._expects[source], self._dtype)

    def acknowledge(self, source: int) -> None:
        """Tell `source` that its memory has been read; nothing to tell after a message."""
        if source not in self._inbound and source not in self._in_parts:
            nbytes = self._nbytes_from(source)
            peer = self._read_from(source, nbytes)
            if peer is not None:
                peer.acknowledge(self._tag, nbytes)

    def close(self) -> None:
        """Wait until nobody needs this rank's send buffers any more.

        Raises:
            ValueError: a peer expected another size.
            RuntimeError: a peer is gone.
        """
        for work, _ in self._outbound:
            work.wait()
        for peer, tensor in self._lent:
            nbytes, read = (
                tensor.numel() * tensor.element_size(),
                peer.take_acknowledgement(self._tag),
            )
            if read != nbytes:
                what = f"this rank sends {nbytes} bytes to rank {peer.rank}"
                raise self._mismatch(what, read)
        for message in self._in_parts.values():
            message.close()
        self._in_parts.clear()
        self._outbound.clear()
        self._lent.clear()

    def _mismatch(self, what: str, expected: int) -> ValueError:
        return ValueError(
            f"collective {where(self._group)}: {what}, which expects {expected}; all ranks must "
            f"pass buffers of the same size and dtype (or matching splits) and make the same calls "
            f"in the same order"
        )


def _posted(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this rank is not in the process group it was asked to communicate in")
    return work
