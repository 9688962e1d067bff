"""Short-lived flat buffers, kept between the units of one backward."""

from __future__ import annotations

import torch

__all__ = ["ScratchBuffers"]

_WASTE = 1.25
"""A free buffer serves a request that is at most this much smaller."""


class ScratchBuffers:
    """Flat tensors that live from a gradient's first write to its collective's end.

    Freed tensors are kept for the next unit of about the same size until `clear`: on a CPU a
    fresh allocation costs a page fault every 4 KiB, about as much as summing the buffer. A request
    that none of them fits lets them go, so that none is held beside a new one of another size.

    `keep_on_cpu` keeps free CPU buffers from step to step as well, whatever their sizes. They were
    held at the end of the last backward too, so a step whose peak is there needs no more memory.
    """

    def __init__(self, *, keep_on_cpu: bool = False) -> None:
        self._keep_on_cpu = keep_on_cpu
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.UntypedStorage]] = {}

    def share(self, other: ScratchBuffers) -> None:
        """Take from, and give to, the same free tensors as `other` from now on."""
        self._free = other._free

    @property
    def nbytes(self) -> int:
        """Bytes of buffers that nobody uses now."""
        return sum(storage.nbytes() for free in self._free.values() for storage in free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor."""
        free = self._free.get((dtype, device), [])
        needed = numel * dtype.itemsize
        fitting = [i for i, one in enumerate(free) if needed <= one.nbytes() <= _WASTE * needed]
        if not fitting:
            if not (self._keep_on_cpu and device.type == "cpu"):
                free.clear()
            return torch.empty(numel, dtype=dtype, device=device)
        storage = free.pop(min(fitting, key=lambda i: free[i].nbytes()))
        # Not a slice: a view would not be told from a part of somebody else's buffer.
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor back; no work on it may be pending on another stream."""
        key = (tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor.untyped_storage())

    def clear(self) -> None:
        """Return free tensors to the allocator."""
        for key in list(self._free):
            if not (self._keep_on_cpu and key[1].type == "cpu"):
                del self._free[key]
