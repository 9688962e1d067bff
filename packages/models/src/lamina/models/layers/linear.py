"""Linear layers, whole or with the rows or columns of the weight cut over tensor-parallel ranks.

The cut maps are those of Shoeybi et al. (2019) and Korthikanti et al. (2022). Each is one autograd
function. The autograd regions of `lamina.collectives` would communicate before or after the
products; a function of its own can communicate during them. Its backward has two products, and only
the input's gradient is sent to other ranks, so the weight's gradient is computed in the meantime.

With sequence parallelism activations between the products are `[tokens / tp, width]`. Each rank
holds a contiguous run of the batch's tokens in row-major order, so gathers need no rearrangement
(decision 0602).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.collectives import gather_from
from lamina.collectives.engine import start_all_gather, start_all_reduce, start_reduce_scatter
from lamina.mesh import mark
from lamina.mesh.engine import MeshAxis
from lamina.models.base.config import Reduction
from lamina.models.base.cut_weights import require_divisible
from lamina.models.base.initialise import fill_normal
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.matmul_products import (
    PLAIN,
    Products,
    may_sink,
    under_autocast,
    weight_gradient,
)
from lamina.models.layers.weight_queue import WeightGradientQueue
from lamina.models.precision.fp8_products import Float8Products

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear"]


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


class Linear(nn.Module):
    """`x @ weight.T + bias`, whole on every rank.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is a bias (it starts at zero).
        init_std: standard deviation of the initial weight.
        partial: each tensor-parallel rank sees other tokens, so that gradients are summed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        init_std: float = 0.02,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.partial = partial
        self.init_std = init_std
        self.init_seed: int | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2), set the bias to zero, and mark their roles."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                mark(parameter, tp_grad="sum" if self.partial else None)
        fill_normal(self.weight, self.init_std, self.init_seed)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if not may_sink(self.weight):
            return F.linear(x, self.weight, self.bias)
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        y: Tensor = ColumnLinear.apply(x, weight, bias, None, False, PLAIN, "ordered")  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        out_features, in_features = self.weight.shape
        return f"{in_features} -> {out_features}, bias={self.bias is not None}"


def _products(float8: Float8Products | None, queue: WeightGradientQueue | None) -> Products:
    if float8 is not None and float8.amax_history is not None:
        float8.remembers = torch.is_grad_enabled()
    products = PLAIN if float8 is None else float8
    return products if queue is None else queue.deferring(products)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output is cut over ranks (Shoeybi et al., 2019, section 3).

    Each rank holds some rows of `weight`. The whole weight is the same for all numbers of ranks.

    Args:
        in_features: width of the input.
        out_features: width of the output over all ranks.
        mesh: has an axis `tp`, or is that axis; None is one process.
        bias: whether there is a bias (it starts at zero).
        blocks: widths, over all ranks, of the projections that are fused in the output (queries,
            keys, values; gate, up). Each is cut separately. None is one projection.
        sequence_parallel: the input is `[tokens / size, in_features]` and is gathered first
            (Korthikanti et al., 2022).
        gather_output: gather the output, so that every rank returns the whole.
        init_std: standard deviation of the initial weight.
        reduction: who sums over the ranks, see `TransformerConfig.tp_reduction`.

    Raises:
        ValueError: if a width is not divisible by the number of ranks.

    Examples:
        >>> ColumnParallelLinear(8, 16)(torch.ones(2, 8)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: MeshLike = None,
        *,
        bias: bool = False,
        blocks: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        init_std: float = 0.02,
        reduction: Reduction = "ordered",
    ) -> None:
        super().__init__()
        self.axis = axis_of(mesh, "tp")
        self.blocks = (out_features,) if blocks is None else tuple(blocks)
        if sum(self.blocks) != out_features:
            raise ValueError(
                f"blocks {self.blocks} sum to {sum(self.blocks)}, not out_features {out_features}"
            )
        self.local_blocks = tuple(
            require_divisible("output width", block, self.axis) for block in self.blocks
        )
        if gather_output and len(self.blocks) > 1:
            raise ValueError(f"gather_output with blocks {self.blocks}: gather each by itself")
        self.sequence_parallel = sequence_parallel and self.axis is not None
        self.reduction = reduction
        self.gather_output = gather_output
        self.init_std = init_std
        self.init_seed: int | None = None
        self.float8: Float8Products | None = None
        self.weight_queue: WeightGradientQueue | None = None
        self.weight = nn.Parameter(torch.empty(sum(self.local_blocks), in_features))
        self.bias = nn.Parameter(torch.empty(sum(self.local_blocks))) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2); mark the roles."""
        fused = self.blocks if len(self.blocks) > 1 else None
        if self.axis is not None:
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    mark(parameter, tp_shard_dim=0, tp_blocks=fused)
        fill_normal(self.weight, self.init_std, self.init_seed, self.axis, dim=0, blocks=fused)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features / size]`, whole with gather_output."""
        products = _products(self.float8, self.weight_queue)
        if self.axis is None and products is PLAIN and not may_sink(self.weight):
            return F.linear(x, self.weight, self.bias)
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        y: Tensor = ColumnLinear.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, self.axis, self.sequence_parallel, products, self.reduction
        )
        if self.axis is None or not self.gather_output:
            return y
        return gather_from(y, self.axis.group, dim=-1)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        size = 1 if self.axis is None else self.axis.size
        return f"{self.weight.shape[1]} -> {' + '.join(map(str, self.blocks))}, cut by {size}"


class RowParallelLinear(nn.Module):
    """A linear layer whose input is cut over ranks; the products of the ranks are summed.

    Each rank holds some columns of `weight`. The whole weight is the same for all numbers of ranks.

    Args:
        in_features: width of the input over all ranks.
        out_features: width of the output.
        mesh: has an axis `tp`, or is that axis; None is one process.
        bias: whether there is a bias (it starts at zero), whole on every rank.
        sequence_parallel: the sum is scattered: the output is `[tokens / size, out_features]`.
        init_std: standard deviation of the initial weight.
        reduction: who sums over the ranks, see `TransformerConfig.tp_reduction`.

    Raises:
        ValueError: if `in_features` is not divisible by the number of ranks.

    Examples:
        >>> RowParallelLinear(16, 8)(torch.ones(2, 16)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: MeshLike = None,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        reduction: Reduction = "ordered",
    ) -> None:
        super().__init__()
        self.axis = axis_of(mesh, "tp")
        self.sequence_parallel = sequence_parallel and self.axis is not None
        self.reduction = reduction
        self.init_std = init_std
        self.init_seed: int | None = None
        width = require_divisible("input width", in_features, self.axis)
        self.float8: Float8Products | None = None
        self.weight_queue: WeightGradientQueue | None = None
        self.weight = nn.Parameter(torch.empty(out_features, width))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2); mark the roles."""
        if self.axis is not None:
            mark(self.weight, tp_shard_dim=1)
        fill_normal(self.weight, self.init_std, self.init_seed, self.axis, dim=1)
        if self.bias is not None:
            # The bias is added after the sum. Under sequence parallelism it is added to this rank's
            # tokens only, so its gradients are summed over ranks.
            mark(self.bias, tp_grad="sum" if self.sequence_parallel else None)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features / size]` to `[..., out_features]`."""
        products = _products(self.float8, self.weight_queue)
        if self.axis is None and products is PLAIN and not may_sink(self.weight):
            return F.linear(x, self.weight, self.bias)
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        y: Tensor = RowLinear.apply(  # type: ignore[no-untyped-call]
            x, weight, self.axis, self.sequence_parallel, products, self.reduction
        )
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        size = 1 if self.axis is None else self.axis.size
        return f"{self.weight.shape[1] * size} -> {self.weight.shape[0]}, cut by {size}"
