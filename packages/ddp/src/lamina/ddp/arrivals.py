"""Gradients as autograd hands them over: one hook per parameter moves them into their buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lamina.ddp.gradients import GroupGradients

__all__ = ["gradient_mover"]

_Method = TypeVar("_Method")
Weakly = Callable[[], _Method | None]
"""A weak reference: what holds hooks must not be held by them."""


def gradient_mover(
    gradients: GroupGradients,
    index: int,
    arrived: set[int],
    announce: Weakly[Callable[[GroupGradients, torch.Tensor | None], None]],
    complete: Callable[[], None] | None,
) -> Callable[[torch.Tensor], None]:
    """A hook that moves a gradient from autograd into its buffer.

    It must not hold the group: the group holds the parameter, and the parameter holds its hooks.

    Args:
        gradients: of the parameter's group.
        index: the parameter's place in it.
        arrived: places whose gradients have come in this backward.
        announce: gives what is called before anything else: a backward may begin with this.
        complete: called when each parameter of the group has got a gradient.
    """

    def move_gradient(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if (before := announce()) is not None:
            before(gradients, gradient)
        if gradient is None and index not in gradients.sunk:
            return
        if gradient is not None:
            _refuse_sparse(gradient, gradients.layout.specs[index].name)
            gradients.accumulate(index, gradient)
        arrived.add(index)
        if complete is not None and len(arrived) == len(gradients.layout.specs):
            complete()

    return move_gradient


def _refuse_sparse(gradient: torch.Tensor, name: str) -> None:
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"{name} has a gradient of layout {gradient.layout}; flat buffers hold strided "
            "gradients only: build the embedding with sparse=False"
        )
