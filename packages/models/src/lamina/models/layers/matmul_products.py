"""The three matrix products of a linear layer, behind one face.

Cut layers interleave the products with what they send; they need not know whether numbers are
multiplied as they are or as eight bits, nor where a weight's gradient goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.ddp.engine import gradient_sink, has_gradient_sink

__all__ = ["PLAIN", "Gradients", "Products", "may_sink", "weight_gradient", "write_product"]


class Gradients(Protocol):
    """The two products of a backward, made from the output's gradient."""

    def by_input(self, weight: Tensor) -> Tensor:
        """`grad @ weight`: `[..., in]`."""

    def by_weight(self, x: Tensor) -> Tensor:
        """`grad.T @ x` over all leading dimensions: `[out, in]`."""

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write `grad.T @ x` into `total` `[out, in]`, or add it."""


@runtime_checkable
class PutsOff(Protocol):
    """Gradients whose product for the weight is computed later, apart from the backward."""

    def put_off(self, weight: Tensor, x: Tensor) -> None:
        """Take note of `grad.T @ x` for the parameter `weight`."""


def weight_gradient(gradients: Gradients, weight: Tensor | None, x: Tensor) -> Tensor | None:
    """What a backward returns for its weight.

    Args:
        gradients: the products.
        weight: the parameter that the layer was called with; None where that was a copy of one.
        x: the layer's input, whole.

    Returns:
        The gradient, or None where the parameter gets it in another way.
    """
    if weight is not None and isinstance(gradients, PutsOff):
        gradients.put_off(weight, x)
        return None
    sink = None if weight is None else gradient_sink(weight)
    if sink is None:
        return gradients.by_weight(x)
    gradients.add_by_weight(x, sink.view, sink.accumulate)
    sink.written()
    return None


def may_sink(weight: Tensor) -> bool:
    """Whether a backward may write this weight's gradient where a wrapper's collective reads it.

    Layers that are torch's own operators otherwise then use functions of ours.
    """
    return (
        not torch.compiler.is_compiling() and torch.is_grad_enabled() and has_gradient_sink(weight)
    )


class Products(Protocol):
    """How a linear layer multiplies."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x @ weight.T + bias`, and what `gradients` wants back."""

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> Gradients:
        """Prepare backward's products from the output's gradient `[..., out]`."""


class PlainGradients:
    """Products in the dtype of their sides."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def by_input(self, weight: Tensor) -> Tensor:
        """See `Gradients`."""
        return self.grad @ weight

    def by_weight(self, x: Tensor) -> Tensor:
        """See `Gradients`."""
        return self.grad.flatten(0, -2).t() @ x.flatten(0, -2)

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """See `Gradients`."""
        write_product(self.grad.flatten(0, -2).t(), x.flatten(0, -2), total, accumulate)


class PlainProducts:
    """Products in the dtype of their sides; keeps nothing."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Products`."""
        return F.linear(x, weight, bias), ()

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> PlainGradients:
        """See `Products`."""
        return PlainGradients(grad)


PLAIN = PlainProducts()


def write_product(left: Tensor, right: Tensor, total: Tensor, accumulate: bool) -> None:
    """`total = left @ right`, or `total += left @ right`, without a temporary where possible.

    One product where both dtypes are the same, and on CUDA from bf16 or fp16 into fp32. Elsewhere
    the product is computed in the dtype of its sides first, and then written in one pass.
    """
    if total.dtype == left.dtype:
        if accumulate:
            total.addmm_(left, right)
        else:
            torch.mm(left, right, out=total)
    elif left.is_cuda and total.dtype == torch.float32:
        if accumulate:
            torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=total)
    elif accumulate:
        total.add_(left @ right)
    else:
        total.copy_(left @ right)
