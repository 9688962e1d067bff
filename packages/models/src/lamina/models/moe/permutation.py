"""Copies of tokens into rows and back, with gathers in both directions.

`source` says which copy each row is and `place` which row each copy is, so neither forward nor
backward scatters: no atomics, one order of summation, the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["copies_to_rows", "rows_to_tokens"]


def copies_to_rows(x: Tensor, source: Tensor, place: Tensor, top_k: int, holes: bool) -> Tensor:
    """Copy tokens into rows.

    Args:
        x: `[tokens, hidden]`.
        source: int64 `[rows]`: the copy in each row, `tokens * top_k` for a row of zeros.
        place: int64 `[tokens * top_k]`: the row of each copy, `rows` for none.
        top_k: copies per token.
        holes: whether such rows or copies may occur.

    Returns:
        `[rows, hidden]`.
    """
    rows: Tensor = _CopiesToRows.apply(x, source, place, top_k, holes)  # type: ignore[no-untyped-call]
    return rows


def rows_to_tokens(
    rows: Tensor, weights: Tensor, source: Tensor, place: Tensor, holes: bool
) -> Tensor:
    """Add up each token's rows, weighted.

    Args:
        rows: `[rows, hidden]`.
        weights: `[tokens, top_k]`, in float32 or wider.
        source: as of `copies_to_rows`.
        place: as of `copies_to_rows`.
        holes: as of `copies_to_rows`.

    Returns:
        `[tokens, hidden]` in the rows' dtype; summed in the weights', best expert first.
    """
    tokens: Tensor = _RowsToTokens.apply(rows, weights, source, place, holes)  # type: ignore[no-untyped-call]
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
        ctx: Any, x: Tensor, source: Tensor, place: Tensor, top_k: int, holes: bool
    ) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k, ctx.holes = top_k, holes
        return _take(x, source.div(top_k, rounding_mode="floor"), holes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        copies = place.view(-1, ctx.top_k)
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = _take(grad, copies[:, 0], ctx.holes).to(wide)
        for j in range(1, ctx.top_k):
            total += _take(grad, copies[:, j], ctx.holes)
        return total.to(grad.dtype), None, None, None, None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, source: Tensor, place: Tensor, holes: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, source, place)
        ctx.holes = holes
        copies = place.view(weights.shape)
        total = _take(rows, copies[:, 0], holes) * weights[:, :1]
        for j in range(1, weights.shape[1]):
            total += _take(rows, copies[:, j], holes) * weights[:, j : j + 1]
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, source, place = ctx.saved_tensors
        token = source.div(weights.shape[1], rounding_mode="floor")
        of_row = _take(grad, token, ctx.holes)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[1]:
            products = (rows.to(weights.dtype) * of_row).sum(-1)
            grad_weights = _take(products, place, ctx.holes).view(weights.shape)
        if ctx.needs_input_grad[0]:
            weight = _take(weights.flatten(), source, ctx.holes)
            grad_rows = (of_row * weight.unsqueeze(-1)).to(rows.dtype)
        return grad_rows, grad_weights, None, None, None
