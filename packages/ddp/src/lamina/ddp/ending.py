"""What autograd calls at the end of a backward, and whether it still will."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

__all__ = ["BackwardEnd"]


class BackwardEnd:
    """Queues a function for the end of the backward at hand.

    Autograd alone holds what is queued, and lets go of it when the backward raises. So who has
    queued an end and was not called can tell a backward that goes on from one that died.
    """

    def __init__(self) -> None:
        self._queued: weakref.ref[Callable[[], None]] | None = None

    def queue(self, end: Callable[[], None]) -> None:
        """Have `end` called when the backward that runs now has ended."""
        held = partial(end)
        self._queued = weakref.ref(held)
        torch.autograd.Variable._execution_engine.queue_callback(held)

    @property
    def will_come(self) -> bool:
        """Whether the newest `end` is still to be called."""
        return self._queued is not None and self._queued() is not None
