"""Linear layers, whole or with the rows or columns of the weight cut over tensor-parallel ranks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.collectives import gather_from
from lamina.mesh import mark
from lamina.models.base.config import Reduction
from lamina.models.base.cut_weights import require_divisible
from lamina.models.base.initialise import fill_normal
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.autocast import under_autocast
from lamina.models.layers.matmul_products import PLAIN, Products, may_sink
from lamina.models.layers.sharded_matmul import ColumnLinear, RowLinear
from lamina.models.layers.weight_queue import WeightGradientQueue
from lamina.models.precision.fp8_products import Float8Products

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear"]


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
