"""Memory that one collective leaves for the next: on a CPU fresh pages cost as much as the work."""

from __future__ import annotations

import threading

import torch

from lamina.collectives.reduction.cpu_sum import Workspace, lasting

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

    def borrow(self, nbytes: int) -> torch.Tensor:
        """CPU scratch: uint8, at least `nbytes`, uninitialised."""
        with self._lock:
            fitting = [i for i, spare in enumerate(self._scratch) if spare.numel() >= nbytes]
            best = min(fitting, key=lambda i: self._scratch[i].numel(), default=None)
            if best is not None:
                return self._scratch.pop(best)
        return lasting(nbytes, torch.uint8)

    def give_back(self, scratch: torch.Tensor) -> None:
        """Return what was borrowed; the oldest is let go of when there is too much."""
        with self._lock:
            self._scratch.append(scratch)
            while sum(spare.numel() for spare in self._scratch) > _MOST_BYTES:
                self._scratch.pop(0)

    @property
    def nbytes(self) -> int:
        """Bytes kept now (lent ones not counted)."""
        with self._lock:
            scratch = sum(spare.nbytes for spare in self._scratch)
            return scratch + sum(workspace.nbytes for workspace in self._workspaces)

    def clear(self) -> None:
        """Give what is kept back to the allocator; what is lent comes back as usual."""
        with self._lock:
            self._scratch.clear()
            self._workspaces.clear()

    def borrow_workspace(self) -> Workspace:
        """Buffers for one sum."""
        with self._lock:
            return self._workspaces.pop() if self._workspaces else Workspace()

    def give_back_workspace(self, workspace: Workspace) -> None:
        """Return a workspace for the next sum."""
        with self._lock:
            self._workspaces.append(workspace)
