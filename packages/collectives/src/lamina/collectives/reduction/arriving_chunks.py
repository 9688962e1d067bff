"""The chunks of one reduction: brought together from all ranks, summed, let go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lamina.collectives.reduction.summation import sum_chunks
from lamina.collectives.transport.gloo_exchange import Chunk, GlooExchange
from lamina.collectives.transport.groups import served_by_gloo
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Rest, exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lamina.collectives.call.handles import Statistics
    from lamina.collectives.transport.scratch_pool import ScratchPool

__all__ = ["ArrivingChunks"]


class _ChunkMemory:
    """Where chunks that come as messages go. A class of its own, to avoid a reference cycle."""

    def __init__(
        self, own: torch.Tensor, rank: int, scratch_pool: ScratchPool, scratch: torch.Tensor | None
    ) -> None:
        self._own, self._rank, self._scratch_pool, self._scratch = own, rank, scratch_pool, scratch
        self._borrowed: list[torch.Tensor] = []

    def offer(self, place: int, parts: bool) -> torch.Tensor | None:
        """What comes in parts brings its own memory, unless the caller brought some."""
        return None if parts and self._scratch is None else self.room(place)

    def room(self, place: int) -> torch.Tensor:
        numel = self._own.numel()
        if self._scratch is None:
            nbytes = numel * self._own.dtype.itemsize
            self._borrowed.append(self._scratch_pool.borrow(nbytes))
            return self._borrowed[-1][:nbytes].view(self._own.dtype)
        row = place - (place > self._rank)
        return self._scratch[row * numel : (row + 1) * numel]

    def clear(self) -> None:
        for scratch in self._borrowed:
            self._scratch_pool.give_back(scratch)
        self._borrowed.clear()


class ArrivingChunks:
    """Every rank's chunk for this rank; made, its messages are on their way.

    Args:
        sends: per rank of the group the chunk for it; this rank's own entry is used in place. All
            chunks that arrive have its size.
        group: at least two ranks.
        device: where the tensors lie.
        scratch: flat, (N-1) chunks. On CPU it may be None: what cannot be read where it lies then
            goes to scratch memory of the group's lane.
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
        self._memory = _ChunkMemory(self._own, self._rank, self._lane.scratch_pool, scratch)
        self._gloo: GlooExchange | None = None
        self._posted = True
        self._rest: Rest | None = None
        self._rows: list[torch.Tensor] = []
        if served_by_gloo(group, device) and device.type == "cpu":
            expects, tag = [self._own.numel()] * self._size, self._lane.next_tag()
            dtype, offer = self._own.dtype, self._memory.offer
            self._gloo = GlooExchange(sends, expects, dtype, offer, group, tag, parts=True)
            self._posted = self._lane.knows_host_peers
            if self._posted:
                self._gloo.post()
        else:
            places = range(self._size)
            self._rows = [self._own if at == self._rank else self._memory.room(at) for at in places]
            self._rest = exchange(self._rows, sends, group, device)

    def sum_into(
        self,
        output: torch.Tensor,
        factor: float | None,
        accumulate: bool,
        statistics: Statistics | None,
    ) -> None:
        """Wait for all chunks and sum them; afterwards all ranks may reuse their inputs."""
        scratch_pool = self._lane.scratch_pool
        buffers = scratch_pool.borrow_sum_buffers()
        sum_chunks(self._arrived(), output, factor, accumulate, statistics, buffers)
        scratch_pool.give_back_sum_buffers(buffers)
        if self._gloo is not None:
            for source in self._gloo.sources():
                self._gloo.acknowledge(source)
            self._gloo.close()
        self._memory.clear()

    def _arrived(self) -> list[Chunk]:
        """Wait for all chunks; return them in rank order."""
        if self._gloo is None:
            if self._rest is not None:
                self._rest()
            return list(self._rows)
        if not self._posted:  # the first exchange of a group blocks, to find host peers
            self._gloo.post()
        chunks: dict[int, Chunk] = {self._rank: self._own}
        for source in self._gloo.sources():
            chunks[source] = self._gloo.fetch(source)
        return [chunks.get(place, self._own) for place in range(self._size)]
