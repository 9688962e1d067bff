"""The chunks of one reduction: brought together from all ranks, summed, let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lamina.collectives.reduction.summation import sum_chunks
from lamina.collectives.transport.gloo_exchange import Swap
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.shared_host import Chunk
from lamina.collectives.transport.transport import Rest, exchange, host_bound

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lamina.collectives.call.handles import Statistics
    from lamina.collectives.transport.scratch_pool import Spares

__all__ = ["Collection"]


class _Rooms:
    """Where chunks that come as messages go. Apart from Collection, lest that refer to itself."""

    def __init__(
        self, own: torch.Tensor, rank: int, spares: Spares, scratch: torch.Tensor | None
    ) -> None:
        self._own, self._rank, self._spares, self._scratch = own, rank, spares, scratch
        self._borrowed: list[torch.Tensor] = []

    def offer(self, place: int, parts: bool) -> torch.Tensor | None:
        """What comes in parts brings its own memory, unless the caller brought some."""
        return None if parts and self._scratch is None else self.room(place)

    def room(self, place: int) -> torch.Tensor:
        numel = self._own.numel()
        if self._scratch is None:
            nbytes = numel * self._own.dtype.itemsize
            self._borrowed.append(self._spares.borrow(nbytes))
            return self._borrowed[-1][:nbytes].view(self._own.dtype)
        row = place - (place > self._rank)
        return self._scratch[row * numel : (row + 1) * numel]

    def clear(self) -> None:
        for scratch in self._borrowed:
            self._spares.give_back(scratch)
        self._borrowed.clear()


class Collection:
    """Every rank's chunk for this rank; made, its messages are on their way.

    Args:
        sends: per rank of the group the chunk for it; this rank's own entry is used in place. All
            chunks that arrive have its size.
        group: at least two ranks.
        device: where the tensors lie.
        scratch: flat, (N-1) chunks. On CPU it may be None: what cannot be read where it lies then
            goes to spare memory of the group's lane.
    """

    def __init__(
        self,
        sends: Sequence[torch.Tensor],
        group: ProcessGroup,
        device: torch.device,
        scratch: torch.Tensor | None,
    ) -> None:
        self._own, self._rank, self._size = sends[group.rank()], group.rank(), group.size()
        self._lane = lane_of(group)
        self._rooms = _Rooms(self._own, self._rank, self._lane.spares, scratch)
        self._swap: Swap | None = None
        self._posted = True
        self._rest: Rest | None = None
        self._rows: list[torch.Tensor] = []
        if host_bound(group, device) and device.type == "cpu":
            expects, tag = [self._own.numel()] * self._size, self._lane.next_tag()
            dtype, offer = self._own.dtype, self._rooms.offer
            self._swap = Swap(sends, expects, dtype, offer, group, tag, parts=True)
            self._posted = self._lane.acquainted
            if self._posted:
                self._swap.post()
        else:
            places = range(self._size)
            self._rows = [self._own if at == self._rank else self._rooms.room(at) for at in places]
            self._rest = exchange(self._rows, sends, group, device)

    def sum_into(
        self,
        output: torch.Tensor,
        factor: float | None,
        accumulate: bool,
        statistics: Statistics | None,
    ) -> None:
        """Wait for all chunks and sum them; afterwards all ranks may reuse their inputs."""
        spares = self._lane.spares
        workspace = spares.borrow_workspace()
        sum_chunks(self._arrived(), output, factor, accumulate, statistics, workspace)
        spares.give_back_workspace(workspace)
        if self._swap is not None:
            for source in self._swap.sources():
                self._swap.receipt(source)
            self._swap.close()
        self._rooms.clear()

    def _arrived(self) -> list[Chunk]:
        """Wait for all chunks; return them in rank order."""
        if self._swap is None:
            if self._rest is not None:
                self._rest()
            return list(self._rows)
        if not self._posted:  # the first exchange of a group: meeting the neighbours blocks
            self._swap.post()
        chunks: dict[int, Chunk] = {self._rank: self._own}
        for source in self._swap.sources():
            chunks[source] = self._swap.fetch(source)
        return [chunks.get(place, self._own) for place in range(self._size)]
