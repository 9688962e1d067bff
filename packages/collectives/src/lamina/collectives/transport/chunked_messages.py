"""A large message that comes in parts, and is summed as it comes.

A sum needs only a block of every rank's chunk at a time. So what comes over a wire is received
in parts of a fixed size, a few ahead of the sum: memory for some parts instead of a whole chunk,
parts still in cache when they are added, and the sum done soon after the last part has come.
"""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lamina.collectives.transport.lanes import ScratchPool

PART = 1 << 20  # bytes, at most
AHEAD = 3  # parts on their way or being summed: a 2 gbit link may go unattended for 12 ms
CUT_FROM = AHEAD * PART  # bytes; both ends cut messages that are larger


def part_items(dtype: torch.dtype, unit: int) -> int:
    """Items of `dtype` in a part: a power of two of units, which no part cuts."""
    return unit << (PART // (unit * dtype.itemsize)).bit_length() - 1


class ChunkedMessage:
    """What one rank sends, received part by part; read once, in order, by `window`.

    `numel` items of `dtype` come from rank `source` of the group, in parts that do not cut `unit`
    items and whose memory `scratch_pool` lends; or all at once into `whole`, flat [numel]. Parts
    share a tag, as messages of one pair and tag keep their order.
    """

    def __init__(
        self,
        source: int,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        tag: int,
        unit: int,
        scratch_pool: ScratchPool,
        whole: torch.Tensor | None = None,
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self.part_items = part_items(dtype, unit)
        self._source, self._group, self._tag = source, group, tag
        self._scratch_pool = scratch_pool
        self._borrowed: list[torch.Tensor] = []
        self._works: dict[int, Work] = {}
        if whole is not None:
            self._buffers = list(torch.split(whole, self.part_items))
        else:
            nbytes = self.part_items * dtype.itemsize
            self._borrowed = [scratch_pool.borrow(nbytes) for _ in range(AHEAD)]
            self._buffers = [buffer[:nbytes].view(dtype) for buffer in self._borrowed]
        self._current = 0
        # As many parts as there is memory for come without being asked for.
        for part in range(min(len(self._buffers), self._count)):
            self._receive(part)

    def window(self, start: int, width: int) -> torch.Tensor:
        """Wait for items start .. start + width, which lie in one part; no copy.

        The tensor holds until a window of a later part is asked for.
        """
        part = start // self.part_items
        while self._current < part:  # the sum has gone past it, so its buffer is free
            following = self._current + len(self._buffers)
            if following < self._count:
                self._receive(following)
            self._current += 1
        work = self._works.pop(part, None)
        if work is not None:
            work.wait()
        offset = start - part * self.part_items
        return self._buffer(part)[offset : offset + width]

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self._borrowed:
            self._scratch_pool.give_back(buffer)
        self._borrowed, self._buffers = [], []

    @property
    def _count(self) -> int:
        return -(-self.numel // self.part_items)

    def _buffer(self, part: int) -> torch.Tensor:
        width = min(self.part_items, self.numel - part * self.part_items)
        return self._buffers[part % len(self._buffers)][:width]

    def _receive(self, part: int) -> None:
        buffer = self._buffer(part)
        work = dist.irecv(buffer, group=self._group, group_src=self._source, tag=self._tag)
        if work is not None:
            self._works[part] = work
