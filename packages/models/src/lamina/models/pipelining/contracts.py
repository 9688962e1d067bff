"""What stages ask of the wrappers around them; knows nothing of torch's pipelining."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

__all__ = ["OncePerStep", "SumsGradients"]


@runtime_checkable
class SumsGradients(Protocol):
    """What a data-parallel wrapper offers to a stage."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last."""

    def late_gradients(self) -> AbstractContextManager[None]:
        """Gradients that come inside belong to backwards that are over."""

    def start_grad_sync(self) -> None:
        """Begin to sum what was accumulated."""


@runtime_checkable
class OncePerStep(Protocol):
    """What a wrapper that gathers weights offers to a schedule."""

    def gather_once_per_step(self, once: bool = True) -> None:
        """Units stay whole from their first use to the end of a step."""

    def reduce_once_per_step(self, once: bool = True) -> None:
        """Gradients are summed over ranks by final backwards only."""

    def release_units(self) -> None:
        """The step is over."""
