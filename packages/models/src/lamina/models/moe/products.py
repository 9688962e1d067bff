"""The products of rows with the weights of their experts.

`ExpertRuns` has three ways to multiply. The weights' gradients are written into a wrapper's bucket
if there is one, as in linear layers.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.layers.matmul_products import may_sink, weight_gradient, write_product

__all__ = ["ExpertRuns", "Way", "expert_product"]

Way = Literal["batched", "grouped", "loop"]


@dataclass(frozen=True)
class ExpertRuns:
    """The number of rows of each expert, and the way in which they are multiplied.

    Attributes:
        counts: int64 `[experts]`: the number of rows of each, on the rows' device.
        on_host: the same numbers on the host, if the host knows them.
        way: `batched` if all experts have the same number of rows, `grouped` by
            `torch.nn.functional.grouped_mm`, `loop` one expert after the other.
    """

    counts: Tensor
    on_host: tuple[int, ...] | None
    way: Way

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each expert; on CUDA the host may have to wait for it."""
        return list(self.counts.tolist() if self.on_host is None else self.on_host)

    @property
    def ends(self) -> Tensor:
        """Where each expert's rows end, int32 `[experts]`."""
        return self.counts.cumsum(0).to(torch.int32)

    def multiply(self, rows: Tensor, stack: Tensor) -> Tensor:
        """`[rows, in]` with each expert's matrix of `[experts, in, out]`: `[rows, out]`."""
        if self.way == "batched":
            return torch.bmm(self.batched(rows), stack).flatten(0, 1)
        if self.way == "grouped":
            return F.grouped_mm(rows, stack, offs=self.ends)
        # unbind, because the backward of indexing would write zeros for all experts each time.
        parts = zip(torch.split(rows, self.sizes), stack.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])

    def batched(self, rows: Tensor) -> Tensor:
        """`[experts, rows of each, width]`."""
        return rows.view(self.counts.shape[0], -1, rows.shape[1])


def expert_product(rows: Tensor, weight: Tensor, runs: ExpertRuns) -> Tensor:
    """`rows @ weight[e].T` for the rows of each expert e.

    Args:
        rows: `[rows, in]`.
        weight: `[experts, out, in]`.
        runs: the number of rows of each expert, and how to multiply.
    """
    if may_sink(weight):
        sunk: Tensor = _ExpertProduct.apply(rows, weight, runs)  # type: ignore[no-untyped-call]
        return sunk
    results = runs.multiply(rows, weight.transpose(1, 2))
    if runs.way != "grouped":
        return results
    contiguous: Tensor = _ContiguousGradient.apply(results)  # type: ignore[no-untyped-call]
    return contiguous


class ExpertGradients:
    """The two products of a backward, given the gradient of the results `[rows, out]`."""

    def __init__(self, grad: Tensor, runs: ExpertRuns) -> None:
        self.grad = grad.contiguous()
        self.runs = runs

    def by_input(self, weight: Tensor) -> Tensor:
        """`[rows, in]`."""
        return self.runs.multiply(self.grad, weight)

    def by_weight(self, x: Tensor) -> Tensor:
        """`[experts, out, in]`."""
        runs, grad = self.runs, self.grad
        if runs.way == "batched":
            return torch.bmm(runs.batched(grad).transpose(1, 2), runs.batched(x))
        if runs.way == "grouped":
            return F.grouped_mm(grad.t(), x, offs=runs.ends)
        parts = zip(torch.split(grad, runs.sizes), torch.split(x, runs.sizes), strict=True)
        return torch.stack([each.t() @ rows for each, rows in parts])

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write the weight's gradient into `total` `[experts, out, in]`, or add it."""
        runs, grad = self.runs, self.grad
        if runs.way == "batched" and total.dtype == x.dtype:
            sides = runs.batched(grad).transpose(1, 2), runs.batched(x)
            if accumulate:
                total.baddbmm_(*sides)
            else:
                torch.bmm(*sides, out=total)
        elif x.is_cuda and runs.way != "loop":
            # One product for all experts, and one pass to add it, as grouped_mm has no `out`.
            found = self.by_weight(x)
            if accumulate:
                total.add_(found)
            else:
                total.copy_(found)
        else:
            parts = torch.split(grad, runs.sizes), torch.split(x, runs.sizes), total.unbind(0)
            for each, rows, place in zip(*parts, strict=True):
                write_product(each.t(), rows, place, accumulate)


class _ExpertProduct(torch.autograd.Function):
    """See `expert_product`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, runs: ExpertRuns) -> Tensor:
        ctx.runs = runs
        ctx.parameter = weight if weight.is_leaf else None
        ctx.save_for_backward(rows, weight)
        return runs.multiply(rows, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradients = ExpertGradients(grad, ctx.runs)
        grad_rows = gradients.by_input(weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(gradients, ctx.parameter, rows)
        return grad_rows, grad_weight, None


class _ContiguousGradient(torch.autograd.Function):
    """Makes gradients contiguous, as grouped_mm's backward refuses expanded ones (of `sum()`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()
