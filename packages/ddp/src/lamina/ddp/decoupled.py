"""`decoupled_grad`: gradients under the name that some optimizers read them by.

Megatron's and Transformer Engine's optimizers can read `parameter.decoupled_grad`, since torch lets
`.grad` have the parameter's dtype only. Here `.grad` may have a dtype of its own, so both names
are of one gradient: whoever zeroes, scales or replaces the one has done so to the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["show_decoupled", "shows_decoupled"]


class _Decoupled:
    """Mixin of parameters that have a `decoupled_grad`."""

    grad: torch.Tensor | None

    @property
    def decoupled_grad(self) -> torch.Tensor | None:
        """The gradient; another name of `.grad`."""
        return self.grad

    @decoupled_grad.setter
    def decoupled_grad(self, value: torch.Tensor | None) -> None:
        self.grad = value


def show_decoupled(parameters: Iterable[torch.Tensor]) -> None:
    """Let parameters have a `decoupled_grad` beside `.grad`."""
    for parameter in parameters:
        if not isinstance(parameter, _Decoupled):
            parameter.__class__ = _decoupled(type(parameter))


def shows_decoupled(parameter: torch.Tensor) -> bool:
    """Whether `show_decoupled` was called for a parameter."""
    return isinstance(parameter, _Decoupled)


@functools.cache
def _decoupled(cls: Any) -> Any:
    return type(cls)(f"Decoupled{cls.__name__}", (_Decoupled, cls), {})
