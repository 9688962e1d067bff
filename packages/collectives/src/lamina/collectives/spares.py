"""Memory that one collective leaves for the next: on a CPU fresh pages cost as much as the work."""

from __future__ import annotations

import threading

import torch

from .fused_cpu import Workspace

__all__ = ["Spares"]

_MOST_BYTES = 64 << 20


class Spares:
    """Scratch and workspaces of one group, lent to one collective at a time.

    Kept between calls: as many workspaces as sums ran at once (a few MiB each, see `fused_cpu`),
    and at most 64 MiB of scratch, which only ranks that exchange messages need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scratch: list[torch.Tensor] = []
        self._workspaces: list[Workspace] = []

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """CPU scratch of `numel` elements, uninitialised."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            fitting = [i for i, spare in enumerate(self._scratch) if spare.numel() >= nbytes]
            best = min(fitting, key=lambda i: self._scratch[i].numel(), default=None)
            found = None if best is None else self._scratch.pop(best)
        if found is None:
            found = torch.empty(nbytes, dtype=torch.uint8)
        return found[:nbytes].view(dtype)

    def give_back(self, scratch: torch.Tensor) -> None:
        """Return what was borrowed; the oldest is let go of when there is too much."""
        whole = torch.empty(0, dtype=torch.uint8).set_(scratch.untyped_storage())
        with self._lock:
            self._scratch.append(whole)
            while sum(spare.numel() for spare in self._scratch) > _MOST_BYTES:
                self._scratch.pop(0)

    @property
    def nbytes(self) -> int:
        """Bytes kept now (lent ones not counted)."""
        with self._lock:
            scratch = sum(spare.nbytes for spare in self._scratch)
            return scratch + sum(workspace.nbytes for workspace in self._workspaces)

    def borrow_workspace(self) -> Workspace:
        """Buffers for one sum."""
        with self._lock:
            return self._workspaces.pop() if self._workspaces else Workspace()

    def give_back_workspace(self, workspace: Workspace) -> None:
        """Return a workspace for the next sum."""
        with self._lock:
            self._workspaces.append(workspace)
