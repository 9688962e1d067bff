"""The two linear maps of tensor parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022).

Each map is one autograd function. The autograd regions of `lamina.collectives` would communicate
before or after the products; a function of its own can communicate during them. Its backward
has two products, and only the input's gradient is sent to other ranks, so the weight's gradient is
computed in the meantime.

With sequence parallelism activations between the products are `[tokens / tp, width]`. Each rank
holds a contiguous run of the batch's tokens in row-major order, so gathers need no rearrangement
(decision 0602).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import start_all_gather, start_all_reduce, start_reduce_scatter
from lamina.mesh.engine import MeshAxis
from lamina.models.base.config import Reduction
from lamina.models.layers.matmul_products import Products, weight_gradient

__all__ = ["ColumnLinear", "RowLinear"]


def bias_gradient(grad: Tensor) -> Tensor:
    """Sum over all leading dimensions: `[out]`."""
    return grad.flatten(0, -2).sum(dim=0)


class ColumnLinear(torch.autograd.Function):
    """`x @ weight.T + bias` with the rows of `weight` cut over ranks.

    Under sequence parallelism forward first gathers the tokens. Backward sums the input's gradient
    over ranks, and scatters it under sequence parallelism, while it computes the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: MeshAxis | None,
        sequence: bool,
        products: Products,
        reduction: Reduction,
    ) -> Tensor:
        """Compute `[..., out / size]`; see the class."""
        ctx.group = None if axis is None else axis.group
        ctx.cut, ctx.sequence, ctx.products = axis is not None, sequence, products
        ctx.reduction = reduction
        whole = start_all_gather(x, ctx.group, async_op=False).wait() if sequence else x
        y, kept = products.output(whole, weight, bias)
        ctx.parameter = weight if weight.is_leaf else None
        ctx.save_for_backward(x, weight, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight, *kept = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        group = ctx.group
        products = ctx.products.gradients(grad, kept)
        arriving = departing = grad_x = grad_weight = None
        if ctx.sequence and for_weight:
            # The input is gathered again instead of saved. The product with the weight hides this.
            arriving = start_all_gather(x, group)
        if for_x:
            grad_x = products.by_input(weight)
            if ctx.sequence:
                departing = start_reduce_scatter(grad_x, group, reduction=ctx.reduction)
            elif ctx.cut:
                departing = start_all_reduce(grad_x, group, in_place=True, reduction=ctx.reduction)
        if for_weight:
            whole = x if arriving is None else arriving.wait()
            grad_weight = weight_gradient(products, ctx.parameter, whole)
        grad_bias = bias_gradient(grad) if for_bias else None
        if departing is not None:
            grad_x = departing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


class RowLinear(torch.autograd.Function):
    """`x @ weight.T` with the columns of `weight` cut over ranks and the products summed.

    Every rank has the whole sum. Under sequence parallelism the sum is scattered over tokens
    instead, and backward first gathers the gradient, which both of its products need.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: MeshAxis | None,
        sequence: bool,
        products: Products,
        reduction: Reduction,
    ) -> Tensor:
        """Compute `[..., out]`; see the class."""
        ctx.group = None if axis is None else axis.group
        ctx.sequence, ctx.products = sequence, products
        partial, kept = products.output(x, weight, None)
        ctx.parameter = weight if weight.is_leaf else None
        ctx.save_for_backward(x, weight, *kept)
        if sequence:
            return start_reduce_scatter(
                partial, ctx.group, reduction=reduction, async_op=False
            ).wait()
        if axis is None:
            return partial
        return start_all_reduce(
            partial, ctx.group, in_place=True, reduction=reduction, async_op=False
        ).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight."""
        x, weight, *kept = ctx.saved_tensors
        if ctx.sequence:
            grad = start_all_gather(grad, ctx.group, async_op=False).wait()
        products = ctx.products.gradients(grad, kept)
        grad_x = products.by_input(weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(products, ctx.parameter, x)
        return grad_x, grad_weight, None, None, None, None
