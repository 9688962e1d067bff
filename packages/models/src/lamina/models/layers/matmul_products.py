"""The three matrix products of a linear layer, as an interface.

Layers that are cut over ranks interleave these products with communication. Behind the interface
the numbers may be multiplied in their own dtype or in FP8, and the weight's gradient may be
returned, written into a wrapper's bucket, or computed later. `torch.autocast` does not reach these
products, so `under_autocast` casts their inputs.

Other pipeline stages wait only for the input's gradient. For zero-bubble schedules, layers that
have a `WeightGradientQueue` put the weight's product off until the rank would otherwise be idle.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.ddp.engine import gradient_sink, has_gradient_sink
from lamina.models.base.applied import applied
from lamina.models.base.computing_device import computes_on
from lamina.models.compat import HAS_WIDE_ADDMM_ON_META


class Gradients(Protocol):
    """The two products of a backward, given the gradient of the output."""

    def by_input(self, weight: Tensor) -> Tensor:
        """`grad @ weight`: `[..., in]`."""

    def by_weight(self, x: Tensor) -> Tensor:
        """`grad.T @ x` over all leading dimensions: `[out, in]`."""

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write `grad.T @ x` into `total` `[out, in]`, or add it."""


def weight_gradient(gradients: Gradients, weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Compute what a backward returns as the gradient of its weight, from the layer's whole input.

    `weight` is None if the layer was called with another tensor than the parameter, such as a cast
    copy. The result is None if the gradient was written into a wrapper's bucket.
    """
    sink = None if weight is None else gradient_sink(weight)
    if sink is None:
        return gradients.by_weight(x)
    gradients.add_by_weight(x, sink.view, sink.accumulate)
    sink.written()
    return None


def may_sink(weight: Tensor) -> bool:
    """Whether a backward may write this weight's gradient into a wrapper's bucket.

    Layers then use Lamina's autograd functions. Otherwise they use torch's own operators.
    """
    return (
        torch.is_grad_enabled() and not torch.compiler.is_compiling() and has_gradient_sink(weight)
    )


class LinearGradients(Gradients, Protocol):
    """`Gradients` of a layer that may have a bias."""

    def by_bias(self, bias: Tensor | None) -> Tensor | None:
        """`grad` summed over all leading dimensions: `[out]`.

        `bias` is the parameter, or None if the layer was called with another tensor. The result is
        None if the gradient was written into a wrapper's bucket.
        """


class Products(Protocol):
    """How a linear layer multiplies."""

    @property
    def in_graph(self) -> bool:
        """Whether a compiler's graph can hold the products of a layer that is cut over ranks."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x @ weight.T + bias`, and the tensors that `gradients` needs in backward."""

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> LinearGradients:
        """Prepare the products of backward, given the output's gradient `[..., out]`."""


class _PlainGradients:
    """`Gradients` in the dtype of their operands."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def by_input(self, weight: Tensor) -> Tensor:
        """As of `Gradients`."""
        return self.grad @ weight

    def by_weight(self, x: Tensor) -> Tensor:
        """As of `Gradients`."""
        return self.grad.flatten(0, -2).t() @ x.flatten(0, -2)

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """As of `Gradients`; without a temporary where `write_product` needs none."""
        write_product(self.grad.flatten(0, -2).t(), x.flatten(0, -2), total, accumulate)

    def by_bias(self, bias: Tensor | None) -> Tensor | None:
        """As of `Gradients`."""
        return self.grad.flatten(0, -2).sum(dim=0)


class _PlainProducts:
    """`Products` in the dtype of their operands; saves nothing for backward."""

    in_graph = True

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x @ weight.T + bias`; backward needs nothing of it."""
        return F.linear(x, weight, bias), ()

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> _PlainGradients:
        """The products of backward; `kept` is empty."""
        return _PlainGradients(grad)


PLAIN = _PlainProducts()


def write_product(left: Tensor, right: Tensor, total: Tensor, accumulate: bool) -> None:
    """`total = left @ right`, or `total += left @ right`, without a temporary where possible.

    There is no temporary if the dtypes are equal, or on CUDA from bf16 or fp16 into fp32, except
    for a sum in a compiled graph. In other cases the product is computed in the dtype of its
    operands first, and then written or added.
    """
    if total.dtype == left.dtype:
        if accumulate:
            total.addmm_(left, right)
        else:
            torch.mm(left, right, out=total)
    elif total.dtype == torch.float32 and computes_on(left) == "cuda":
        written = left.is_meta and not HAS_WIDE_ADDMM_ON_META  # numbers that nobody has
        if accumulate and torch.compiler.is_compiling():
            # Graphs of torch 2.11 cannot hold the operator below.
            total.add_(torch.ops.aten.mm.dtype(left, right, torch.float32))
        elif accumulate and not written:
            torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=total)
    elif accumulate:
        total.add_(left @ right)
    else:
        total.copy_(left @ right)


def under_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a matrix product to autocast's dtype where it is on.

    The caller casts before it calls the autograd function. So the function's backward sees one
    dtype, and autograd casts the gradients back.
    """
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, matrix products keep the dtype of their inputs."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


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
