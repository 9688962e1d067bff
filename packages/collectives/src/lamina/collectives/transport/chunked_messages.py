"""A large run of elements that comes in parts, as messages, and is summed as it comes.

A sum needs only a block of every rank's chunk at a time. So what comes over a wire is received
in parts of a fixed size, a few ahead of the sum: memory for some parts instead of a whole chunk,
parts still in cache when they are added, and the sum done soon after the last part has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from lamina.collectives.transport.scratch_pool import ScratchPool

__all__ = ["ChunkedMessage", "comes_in_parts", "cut_in_parts"]

PART = 1 << 20  # bytes; a power of two, so that blocks of a sum never straddle two parts
AHEAD = 3  # parts on their way or being summed: a 2 gbit link may go unattended for 12 ms


def comes_in_parts(nbytes: int) -> bool:
    """Whether a message of `nbytes` is cut. Both ends ask; both get the same answer."""
    return nbytes > AHEAD * PART


def cut_in_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a flat tensor into the parts that are sent one by one."""
    return torch.split(tensor, PART // tensor.element_size())


class ChunkedMessage:
    """What one rank sends, received part by part; read once, in order, by `window`.

    Args:
        source: the sender's rank in `group`.
        numel: elements in all.
        dtype: their dtype.
        group: sender and receiver.
        tag: tag of the exchange; parts share it, as messages of one pair and tag keep their order.
        scratch_pool: lends the parts' memory.
        whole: flat [numel], to receive everything at once where the caller brought the memory.
    """

    def __init__(
        self,
        source: int,
        numel: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        tag: int,
        scratch_pool: ScratchPool,
        whole: torch.Tensor | None = None,
    ) -> None:
        self.numel, self.dtype = numel, dtype
        self._source, self._group, self._tag = source, group, tag
        self._scratch_pool = scratch_pool
        self._borrowed: list[torch.Tensor] = []
        self._works: dict[int, Work] = {}
        self.part_numel = PART // dtype.itemsize
        if whole is not None:
            self._rooms = list(cut_in_parts(whole))
        else:
            self._borrowed = [scratch_pool.borrow(PART) for _ in range(AHEAD)]
            self._rooms = [room[:PART].view(dtype) for room in self._borrowed]
        self._current = 0

    def post(self) -> None:
        """Post the receives of as many parts as there is room for."""
        for part in range(min(len(self._rooms), self._count)):
            self._receive(part)

    def window(self, start: int, width: int) -> torch.Tensor:
        """Wait for elements start .. start + width, which lie in one part; no copy.

        The tensor holds until a window of a later part is asked for.
        """
        part = start // self.part_numel
        while self._current < part:  # its room is free: the sum has gone past it
            following = self._current + len(self._rooms)
            if following < self._count:
                self._receive(following)
            self._current += 1
        work = self._works.pop(part, None)
        if work is not None:
            work.wait()
        offset = start - part * self.part_numel
        return self._room(part)[offset : offset + width]

    def close(self) -> None:
        """Give the memory back."""
        for room in self._borrowed:
            self._scratch_pool.give_back(room)
        self._borrowed, self._rooms = [], []

    @property
    def _count(self) -> int:
        return -(-self.numel // self.part_numel)

    def _room(self, part: int) -> torch.Tensor:
        width = min(self.part_numel, self.numel - part * self.part_numel)
        return self._rooms[part % len(self._rooms)][:width]

    def _receive(self, part: int) -> None:
        room = self._room(part)
        work = dist.irecv(room, group=self._group, group_src=self._source, tag=self._tag)
        if work is not None:
            self._works[part] = work
