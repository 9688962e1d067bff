"""Copies of tokens into rows and back, by gathers in both directions.

A `RowOrder` has the copy in each row as well as the row of each copy. So neither forward nor
backward scatters: there are no atomic additions, sums have one order, and the bits are the same
every time (decision 0623).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.moe.routing import RowOrder

__all__ = ["copies_to_rows", "rows_to_tokens"]


def copies_to_rows(x: Tensor, order: RowOrder) -> Tensor:
    """Copy tokens `[tokens, hidden]` into rows `[rows, hidden]`."""
    rows: Tensor = _CopiesToRows.apply(  # type: ignore[no-untyped-call]
        x, order.copy_of_row, order.row_of_copy, order.holes
    )
    return rows


def rows_to_tokens(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """Add up each token's rows, weighted.

    Args:
        rows: `[rows, hidden]`.
        weights: `[tokens, top_k]`, in float32 or wider.
        order: how the tokens' copies lie in the rows.

    Returns:
        `[tokens, hidden]` in the rows' dtype; summed in the weights', best expert first.
    """
    tokens: Tensor = _RowsToTokens.apply(  # type: ignore[no-untyped-call]
        rows, weights, order.copy_of_row, order.row_of_copy, order.holes
    )
    return tokens


def _take(rows: Tensor, index: Tensor, holes: bool) -> Tensor:
    """`rows[index]`, zero where the index is the number of rows."""
    if not holes:
        return rows.index_select(0, index)
    count = rows.shape[0]
    if count == 0:
        return rows.new_zeros(index.numel(), *rows.shape[1:])
    taken = rows.index_select(0, index.clamp(max=count - 1))
    missing = (index == count).view(-1, *(1 for _ in rows.shape[1:]))
    return taken.masked_fill_(missing, 0)


class _CopiesToRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, copy_of_row: Tensor, row_of_copy: Tensor, holes: bool
    ) -> Tensor:
        ctx.save_for_backward(row_of_copy)
        ctx.holes = holes
        return _take(x, copy_of_row.div(row_of_copy.shape[1], rounding_mode="floor"), holes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_copy,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = _take(grad, row_of_copy[:, 0], ctx.holes).to(wide)
        for j in range(1, row_of_copy.shape[1]):
            total += _take(grad, row_of_copy[:, j], ctx.holes)
        return total.to(grad.dtype), None, None, None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        copy_of_row: Tensor,
        row_of_copy: Tensor,
        holes: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, copy_of_row, row_of_copy)
        ctx.holes = holes
        total = _take(rows, row_of_copy[:, 0], holes) * weights[:, :1]
        for j in range(1, weights.shape[1]):
            total += _take(rows, row_of_copy[:, j], holes) * weights[:, j : j + 1]
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, copy_of_row, row_of_copy = ctx.saved_tensors
        token = copy_of_row.div(weights.shape[1], rounding_mode="floor")
        of_row = _take(grad, token, ctx.holes)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[1]:
            products = (rows.to(weights.dtype) * of_row).sum(-1)
            grad_weights = _take(products, row_of_copy.flatten(), ctx.holes).view(weights.shape)
        if ctx.needs_input_grad[0]:
            weight = _take(weights.flatten(), copy_of_row, ctx.holes)
            grad_rows = (of_row * weight.unsqueeze(-1)).to(rows.dtype)
        return grad_rows, grad_weights, None, None, None
