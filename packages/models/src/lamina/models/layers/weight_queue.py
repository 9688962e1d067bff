"""Weights' gradients that are computed later than inputs' gradients, for zero-bubble schedules.

A linear layer's backward has two products, and other pipeline stages wait only for the input's
gradient. Layers that have a queue put the other product off until the rank would otherwise be idle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.layers.matmul_products import Gradients, weight_gradient

__all__ = ["Late", "WeightGradientQueue", "deliver"]


# Note [Weights' gradients are put off by layers]
# torch's schedules split a backward by walking the autograd graph twice, first for inputs and then
# for weights. That fires no gradient hooks, so wrappers would not see the gradients. It runs the
# backward of a custom function twice, with all of its communication, and it runs recomputed blocks
# again. Here the first walk is an ordinary backward, and `deliver` is another ordinary backward
# over nodes that do nothing but the products that were put off (decision 0641).
Late = tuple[Tensor, Gradients, Tensor]
"""A weight, and what its gradient is computed from: the products, and the layer's input."""


class WeightGradientQueue:
    """Collects the products that the layers of a stage put off."""

    def __init__(self) -> None:
        self._open: list[Late] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Late]]:
        """Inside, backwards append to the list that this yields."""
        late: list[Late] = []
        self._open = late
        try:
            yield late
        finally:
            self._open = None

    def put(self, weight: Tensor, gradients: Gradients, x: Tensor) -> bool:
        """Put a product off, if the backward that runs now does so; whether it does."""
        if self._open is not None:
            # Detached, because the saved input would otherwise keep the whole graph alive.
            self._open.append((weight, gradients, x.detach()))
        return self._open is not None


def deliver(late: Sequence[Late]) -> None:
    """Compute the gradients that were put off, in one backward over the weights alone.

    The gradients arrive in `.grad` and in the weights' hooks as in every backward, so wrappers need
    not know of the queue.
    """
    if late:
        with torch.enable_grad():
            outputs = [applied(_LateGradient, *item) for item in late]
        torch.autograd.backward(outputs)


class _LateGradient(torch.autograd.Function):
    """Returns a zero; its backward is the product that was put off."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: Gradients, x: Tensor) -> Tensor:
        ctx.weight, ctx.gradients, ctx.x = weight, gradients, x
        return torch.zeros((), device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None]:
        gradient = weight_gradient(ctx.gradients, ctx.weight, ctx.x)
        ctx.gradients = ctx.x = None
        return gradient, None, None
