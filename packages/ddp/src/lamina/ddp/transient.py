"""Short-lived flat buffers, kept between the units of one backward."""

from __future__ import annotations

import torch

__all__ = ["TransientBuffers"]


class TransientBuffers:
    """Flat tensors that live from a gradient's first write to its collective's end.

    Freed tensors are kept for the next unit of the same size until `clear`: on a CPU a fresh
    allocation costs a page fault every 4 KiB, about as much as summing the buffer.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor."""
        stack = self._free.get((numel, dtype, device))
        return stack.pop() if stack else torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor back; no work on it may be pending on another stream."""
        key = (tensor.numel(), tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor)

    def clear(self) -> None:
        """Return all free tensors to the allocator."""
        self._free.clear()
