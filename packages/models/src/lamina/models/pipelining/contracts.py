"""Protocols of the wrappers around stages. This module does not import torch's pipelining."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

__all__ = ["OncePerStep", "SumsGradients"]


@runtime_checkable
class SumsGradients(Protocol):
    """A data-parallel wrapper, as a stage uses it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards are not the last of the step."""

    def late_gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients belong to backwards that have ended."""

    def start_grad_sync(self) -> None:
        """Start to sum the accumulated gradients over ranks."""


@runtime_checkable
class OncePerStep(Protocol):
    """A wrapper that gathers weights, as a schedule uses it."""

    def gather_once_per_step(self, once: bool = True) -> None:
        """Keep units gathered from their first use to the end of a step."""

    def reduce_once_per_step(self, once: bool = True) -> None:
        """Sum gradients over ranks in the final backwards only."""

    def release_units(self) -> None:
        """Release the units, as the step has ended."""
