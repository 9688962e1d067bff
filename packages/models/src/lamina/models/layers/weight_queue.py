"""Weights' gradients that are computed later than inputs' gradients, for zero-bubble schedules.

A linear layer's backward has two products, and other pipeline stages wait only for the input's
gradient. Layers that have a queue put the other product off: their backward returns no gradient for
the weight, and the schedule runs the product when the rank would otherwise be idle. A module
without a queue computes its weights' gradients in the first pass, which is correct, and leaves less
work to fill idle time with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.layers.matmul_products import Gradients, Products, weight_gradient

__all__ = ["Late", "WeightGradientQueue", "attach_queue", "deliver"]


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

    @property
    def is_open(self) -> bool:
        """Whether the backward that runs now puts weights' gradients off."""
        return self._open is not None

    @contextmanager
    def collecting(self) -> Iterator[list[Late]]:
        """Inside, backwards append to the list that this yields."""
        late: list[Late] = []
        self._open = late
        try:
            yield late
        finally:
            self._open = None

    def put(self, late: Late) -> None:
        """Append a product. Raises RuntimeError outside of `collecting`."""
        if self._open is None:
            raise RuntimeError("no backward is collecting weights' gradients")
        self._open.append(late)

    def deferring(self, products: Products) -> Products:
        """The same products, whose weights' gradients go to this queue while it is open."""
        return _DeferringProducts(products, self)


@runtime_checkable
class PutsOffWeights(Protocol):
    """A module that can put off its weight's gradient."""

    weight_queue: WeightGradientQueue | None


def attach_queue(module: nn.Module, queue: WeightGradientQueue | None) -> int:
    """Give a queue to all layers below a module that can use one; returns their number."""
    layers = [layer for layer in module.modules() if isinstance(layer, PutsOffWeights)]
    for layer in layers:
        layer.weight_queue = queue
    return len(layers)


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


class _DeferringProducts:
    def __init__(self, products: Products, queue: WeightGradientQueue) -> None:
        self._products = products
        self._queue = queue
        self.output: Callable[..., tuple[Tensor, tuple[Tensor, ...]]] = products.output

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> Gradients:
        """See `Products`."""
        plain = self._products.gradients(grad, kept)
        return _DeferringGradients(plain, self._queue) if self._queue.is_open else plain


class _DeferringGradients:
    def __init__(self, plain: Gradients, queue: WeightGradientQueue) -> None:
        self._plain = plain
        self._queue = queue
        self.by_input = plain.by_input
        self.by_weight = plain.by_weight

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """See `Gradients`."""
        self._plain.add_by_weight(x, total, accumulate)

    def put_off(self, weight: Tensor, x: Tensor) -> None:
        """Put off the product for a weight; autograd gets no gradient for it now."""
        # Detached, because the saved input would otherwise keep the whole graph alive.
        self._queue.put((weight, self._plain, x.detach()))
