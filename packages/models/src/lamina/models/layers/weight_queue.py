"""Gradients of weights apart from those of inputs: what zero-bubble schedules fill bubbles with.

A linear layer's backward has two products, and only the one for the input is waited for by another
stage. Under a queue the layer puts the other one off: backward returns no gradient for the weight,
and the queue's list runs the product when the schedule says so.

torch's own way (walking the autograd graph twice) fires no gradient hooks, runs a custom function's
backward twice with all it sends, and undoes recomputation. A module that knows no queue simply
computes its weights' gradients in the first pass: right, only with less to fill bubbles with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.models.layers.matmul_products import Gradients, Products, weight_gradient

__all__ = ["Late", "WeightGradientQueue", "attach_queue", "deliver"]


Late = tuple[Tensor, Gradients, Tensor]
"""A weight, and what its gradient is made of: the products and the layer's input."""


class WeightGradientQueue:
    """Where the layers of a stage put off their weights' gradients to."""

    def __init__(self) -> None:
        self._open: list[Late] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the present backward puts weights' gradients off."""
        return self._open is not None

    @contextmanager
    def collecting(self) -> Iterator[list[Late]]:
        """Backwards inside put weights' gradients off, onto the list that this yields."""
        late: list[Late] = []
        self._open = late
        try:
            yield late
        finally:
            self._open = None

    def put(self, late: Late) -> None:
        """Put a product off. Raises RuntimeError outside of `collecting`."""
        if self._open is None:
            raise RuntimeError("no backward is collecting weights' gradients")
        self._open.append(late)

    def deferring(self, products: Products) -> Products:
        """The same products, but weights' gradients go to this queue while it is open."""
        return _DeferringProducts(products, self)


@runtime_checkable
class PutsOffWeights(Protocol):
    """A module that can put its weight's gradient off."""

    weight_queue: WeightGradientQueue | None


def attach_queue(module: nn.Module, queue: WeightGradientQueue | None) -> int:
    """Let all layers below a module that can use a queue; returns their number."""
    layers = [layer for layer in module.modules() if isinstance(layer, PutsOffWeights)]
    for layer in layers:
        layer.weight_queue = queue
    return len(layers)


def deliver(late: Sequence[Late]) -> None:
    """Compute gradients that were put off, as one backward of the weights alone.

    It ends where every backward ends, in the weights' `.grad`s and hooks, so wrappers find these
    gradients where they find all others.
    """
    if late:
        with torch.enable_grad():
            outputs = [_LateGradient.apply(*item) for item in late]  # type: ignore[no-untyped-call]
        torch.autograd.backward(outputs)


class _LateGradient(torch.autograd.Function):
    """Nothing forward; backward is the product that was put off."""

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
        """Put the product for a weight off: autograd gets no gradient for it now."""
        # Detached: what was saved of a layer's input would hold the whole graph.
        self._queue.put((weight, self._plain, x.detach()))
