"""The choice of experts, and copies of tokens in rows: without parameters or communication.

A `RowOrder` has the copy in each row as well as the row of each copy. So neither forward nor
backward scatters: there are no atomic additions, sums have one order, and the bits are the same
every time (decision 0623).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.base.configs.moe import Drop, MoEConfig
from lamina.models.invariance.products import row_sum


@dataclass(frozen=True)
class Routing:
    """The experts that the tokens of a rank are sent to.

    Attributes:
        experts: int64 `[tokens, top_k]`; `num_experts` for a copy that is dropped.
        weights: `[tokens, top_k]` in float32 or wider, 0 for a copy that is dropped.
        counts: int64 `[num_experts]`: copies that go to each expert.
        holes: whether copies may be dropped. The host knows without asking the device.
        capacity: send every expert exactly this many rows, or as many as the rank with the largest
            capacity does; None sends the rows that there are.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    holes: bool
    capacity: int | None = None


def choose_experts(
    scores: Tensor, moe: MoEConfig, bias: Tensor | None = None, *, fixed: bool = False
) -> Tensor:
    """Choose each token's best experts, within its best groups if there are groups.

    `scores` are `[tokens, num_experts]`. `bias` `[num_experts]` is added to them for this choice
    only. The result is int64 `[tokens, top_k]`, best first. `fixed` adds in one order
    (`invariant=True`).

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (groups and bias).
    """
    ranking = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_groups > 1:
        grouped = torch.unflatten(ranking, -1, (moe.num_groups, -1))
        best = min(moe.group_best, grouped.shape[-1])
        values = grouped.topk(best, dim=-1).values
        of_group = row_sum(values).squeeze(-1) if fixed else values.sum(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool)
        kept.scatter_(1, of_group.topk(moe.groups_kept, dim=-1).indices, True)
        ranking = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    return ranking.topk(moe.top_k, dim=-1).indices


def count_copies(experts: Tensor, num_experts: int) -> Tensor:
    """Count the copies of each expert, int64 `[num_experts]`, without ids from `num_experts` on."""
    flat = experts.flatten().clamp(max=num_experts)
    # bincount would make the host wait on CUDA.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def within_capacity(experts: Tensor, weights: Tensor, capacity: int, drop: Drop) -> Tensor:
    """Choose the copies that experts with a capacity take: bool `[tokens, top_k]`, as inputs.

    `drop="weight"` keeps the heaviest, `position` the first tokens. Ties go to the first.
    """
    flat = experts.flatten()
    if drop == "weight":
        heaviest = weights.detach().flatten().argsort(descending=True, stable=True)
        order = heaviest[flat[heaviest].argsort(stable=True)]
    else:
        order = flat.argsort(stable=True)
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = _index_in_run(flat[order]) < capacity
    return kept.view_as(experts)


def _index_in_run(ordered: Tensor) -> Tensor:
    """The number of equal ids before each element of a sorted vector."""
    index = torch.arange(ordered.numel(), device=ordered.device)
    if not ordered.numel():
        return index
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return index - torch.where(new, index, 0).cummax(0).values


@dataclass(frozen=True)
class RowOrder:
    """How copies of tokens lie in rows.

    Attributes:
        copy_of_row: int64 `[rows]`: the copy in each row, `tokens * top_k` for a row of zeros.
        row_of_copy: int64 `[tokens, top_k]`: the row of each copy, `rows` for a copy without one.
        holes: whether such rows or copies may occur. The host knows without asking the device.
    """

    copy_of_row: Tensor
    row_of_copy: Tensor
    holes: bool

    def first(self, rows: int) -> RowOrder:
        """The same order where only the first rows are kept; changes `row_of_copy` in place."""
        return RowOrder(self.copy_of_row[:rows], self.row_of_copy.clamp_(max=rows), True)


def rows_by_expert(experts: Tensor) -> RowOrder:
    """Lay copies `[tokens, top_k]` out by expert, and those of one expert in token order.

    Copies of an id that no expert has lie behind.
    """
    copy_of_row = experts.flatten().argsort(stable=True)
    row_of_copy = torch.empty_like(copy_of_row)
    row_of_copy[copy_of_row] = torch.arange(copy_of_row.numel(), device=copy_of_row.device)
    return RowOrder(copy_of_row, row_of_copy.view_as(experts), False)


def rows_to_capacity(experts: Tensor, num_experts: int, capacity: int) -> RowOrder:
    """Lay copies out by expert with `capacity` rows for each expert.

    No expert may have more copies than rows.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    ordered = flat[order]
    rows = num_experts * capacity
    row_of_copy = torch.empty_like(flat)
    row_of_copy[order] = (ordered * capacity + _index_in_run(ordered)).clamp_(max=rows)
    row_of_copy[flat >= num_experts] = rows
    copy_of_row = torch.full((rows + 1,), flat.numel(), dtype=torch.int64, device=flat.device)
    copy_of_row.scatter_(0, row_of_copy, torch.arange(flat.numel(), device=flat.device))
    return RowOrder(copy_of_row[:rows], row_of_copy.view_as(experts), True)


def copies_to_rows(x: Tensor, order: RowOrder) -> Tensor:
    """Copy tokens `[tokens, hidden]` into rows `[rows, hidden]`."""
    return applied(_CopiesToRows, x, order.copy_of_row, order.row_of_copy, order.holes)


def rows_to_tokens(
    rows: Tensor, weights: Tensor, order: RowOrder, *, fixed: bool = False
) -> Tensor:
    """Add up each token's rows `[rows, hidden]`, weighted by `[tokens, top_k]`.

    The result `[tokens, hidden]` has the rows' dtype. Sums are in the weights', in the order of the
    copies. With `fixed` a weight's gradient does not depend on other tokens (`invariant=True`).
    """
    indices = order.copy_of_row, order.row_of_copy, order.holes
    return applied(_RowsToTokens, rows, weights, *indices, fixed)


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
        rows: Tensor = _rows_of_tokens(x, copy_of_row, row_of_copy.shape[1], holes)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_rows(grad, *ctx.saved_tensors, None, ctx.holes), None, None, None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        copy_of_row: Tensor,
        row_of_copy: Tensor,
        holes: bool,
        fixed: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, copy_of_row, row_of_copy)
        ctx.holes, ctx.fixed = holes, fixed
        total: Tensor = _sum_of_rows(rows, row_of_copy, weights, holes)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients_of_rows(*ctx.saved_tensors, grad, ctx.holes, ctx.fixed)
        return *gradients, None, None, None, None


# Note [One pass over the rows of tokens]
# torch's operators take a pass for each of a token's rows, and keep products in float32. So copies,
# sums and gradients are operators of Lamina's own: a GPU has kernels, and other devices use torch's
# operators, where there are temporaries on so few rows at a time that these stay in the cache. A
# compiler and a plan see an operator with its inputs and results.
_CACHED = 1 << 16  # elements of a temporary on a CPU


def _blocks(rows: Tensor, count: int) -> list[slice]:
    """Cut `count` rows as wide as `rows` into blocks; a GPU takes all at once."""
    size = max(count if rows.is_cuda else _CACHED // max(rows.shape[1], 1), 1)
    return [slice(start, start + size) for start in range(0, count, size)]


@torch.library.custom_op("lamina::rows_of_tokens", mutates_args=())
def _rows_of_tokens(x: Tensor, copy_of_row: Tensor, copies: int, holes: bool) -> Tensor:
    return _take(x, copy_of_row.div(copies, rounding_mode="floor"), holes)


@_rows_of_tokens.register_kernel("cuda")
def _(x: Tensor, copy_of_row: Tensor, copies: int, holes: bool) -> Tensor:
    rows = x.new_empty(copy_of_row.shape[0], x.shape[1])
    _kernels().copy_rows(x.contiguous(), copy_of_row.contiguous(), copies, rows)
    return rows


@_rows_of_tokens.register_fake
def _(x: Tensor, copy_of_row: Tensor, copies: int, holes: bool) -> Tensor:
    return x.new_empty(copy_of_row.shape[0], x.shape[1])


@torch.library.custom_op("lamina::sum_of_rows", mutates_args=())
def _sum_of_rows(rows: Tensor, row_of_copy: Tensor, weights: Tensor | None, holes: bool) -> Tensor:
    total = rows.new_empty(row_of_copy.shape[0], rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)

    def values(block: slice) -> Iterator[Tensor]:
        for j, index in enumerate(row_of_copy[block].unbind(1)):
            value = _take(rows, index, holes).to(wide)
            yield value if weights is None else value.mul_(weights[block, j : j + 1])

    for block in _blocks(rows, row_of_copy.shape[0]):
        total[block] = reduce(Tensor.add_, values(block))
    return total


@_sum_of_rows.register_kernel("cuda")
def _(rows: Tensor, row_of_copy: Tensor, weights: Tensor | None, holes: bool) -> Tensor:
    total = rows.new_empty(row_of_copy.shape[0], rows.shape[1])
    factors = None if weights is None else weights.contiguous()
    _kernels().sum_rows(rows.contiguous(), row_of_copy.contiguous(), factors, total)
    return total


@_sum_of_rows.register_fake
def _(rows: Tensor, row_of_copy: Tensor, weights: Tensor | None, holes: bool) -> Tensor:
    return rows.new_empty(row_of_copy.shape[0], rows.shape[1])


def _differentiated(
    rows: Tensor,
    weights: Tensor,
    copy_of_row: Tensor,
    row_of_copy: Tensor,
    grad: Tensor,
    holes: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights, by torch's operators."""
    grad_rows, products = rows.new_empty(rows.shape), weights.new_empty(rows.shape[0])
    for block in _blocks(rows, rows.shape[0]):
        copy = copy_of_row[block]
        slope = _take(grad, copy.div(weights.shape[1], rounding_mode="floor"), holes)
        product = rows[block].to(weights.dtype) * slope
        products[block] = row_sum(product).squeeze(-1) if fixed else product.sum(-1)
        grad_rows[block] = slope * _take(weights.flatten(), copy, holes).unsqueeze(-1)
    return grad_rows, _take(products, row_of_copy.flatten(), holes).view(weights.shape)


_gradients_of_rows = torch.library.custom_op("lamina::gradients_of_rows", mutates_args=())(
    _differentiated
)


@_gradients_of_rows.register_kernel("cuda")
def _(
    rows: Tensor,
    weights: Tensor,
    copy_of_row: Tensor,
    row_of_copy: Tensor,
    grad: Tensor,
    holes: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor]:
    if fixed:  # the kernel's order is not that of `row_sum`
        return _differentiated(rows, weights, copy_of_row, row_of_copy, grad, holes, fixed)
    rows, weights, grad = rows.contiguous(), weights.contiguous(), grad.contiguous()
    grad_rows = torch.empty_like(rows)
    # A copy that has no row has no gradient.
    grad_weights = torch.zeros_like(weights) if holes else torch.empty_like(weights)
    _kernels().differentiate_rows(rows, grad, weights, copy_of_row, grad_rows, grad_weights)
    return grad_rows, grad_weights


@_gradients_of_rows.register_fake
def _(
    rows: Tensor,
    weights: Tensor,
    copy_of_row: Tensor,
    row_of_copy: Tensor,
    grad: Tensor,
    holes: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _kernels() -> ModuleType:
    """Import the kernels when they are first needed: users of CPUs need not have Triton."""
    try:
        from lamina.models.moe import row_kernels
    except ImportError as error:
        raise ImportError(
            "mixture of experts on a GPU needs Triton, which could not be imported; install "
            "`lamina-models[triton]` (CUDA builds of torch bring it along)"
        ) from error
    return row_kernels
