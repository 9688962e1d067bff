"""The kernels of a GPU for rows of tokens: each is one pass over the rows, without temporaries.

torch's operators take a pass for each of a token's rows, and products in float32 go to memory and
back. The forward's bits are those of torch's operators: sums have the same order, and products are
compiled without contraction to fused multiply-adds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns that one program has in registers at a time."""
WARPS = 4
_IN_KERNELS = {torch.float32: tl.float32, torch.float64: tl.float64}


def copy_rows(x: Tensor, copy_of_row: Tensor, copies: int, rows: Tensor) -> None:
    """Write each row's token into `rows`.

    Args:
        x: `[tokens, hidden]`, contiguous.
        copy_of_row: int64 `[rows]`, contiguous; `tokens * copies` for a row of zeros.
        copies: of each token.
        rows: `[rows, hidden]`, contiguous, in x's dtype.
    """
    count, hidden = rows.shape
    with _gpu_of(x):
        copy_kernel[(count, triton.cdiv(hidden, BLOCK))](
            x,
            len(x),
            hidden,
            copy_of_row,
            rows,
            COPIES=copies,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def sum_rows(rows: Tensor, row_of_copy: Tensor, weights: Tensor | None, total: Tensor) -> None:
    """Write into `total` the weighted sums of each token's rows, in the order of its copies.

    Args:
        rows: `[rows, hidden]`, contiguous.
        row_of_copy: int64 `[tokens, top_k]`, contiguous; the number of rows means no row.
        weights: `[tokens, top_k]`, contiguous, float32 or float64; None adds without weights.
        total: `[tokens, hidden]`, contiguous. Sums are in the widest of all dtypes, float32 at
            least.
    """
    (tokens, copies), hidden = row_of_copy.shape, rows.shape[1]
    wide = torch.promote_types(rows.dtype, torch.float32 if weights is None else weights.dtype)
    with _gpu_of(rows):
        sum_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
            rows,
            len(rows),
            hidden,
            row_of_copy,
            weights,
            total,
            COPIES=copies,
            WIDE=_IN_KERNELS[wide],
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def differentiate_rows(
    rows: Tensor,
    grad: Tensor,
    weights: Tensor,
    copy_of_row: Tensor,
    grad_rows: Tensor,
    grad_weights: Tensor,
) -> None:
    """Write the gradients of `sum_rows`, of each row in one program.

    Args:
        rows: `[rows, hidden]`, contiguous.
        grad: the sums' gradient `[tokens, hidden]`, contiguous.
        weights: `[tokens, top_k]`, contiguous, float32 or float64.
        copy_of_row: int64 `[rows]`; `tokens * top_k` for a row of no copy, whose gradient is 0.
        grad_rows: as rows.
        grad_weights: as weights. What belongs to a copy without a row stays as it is.
    """
    with _gpu_of(rows):
        gradient_kernel[(len(rows),)](
            rows,
            grad,
            rows.shape[1],
            weights,
            weights.numel(),
            copy_of_row,
            grad_rows,
            grad_weights,
            COPIES=weights.shape[1],
            WIDE=_IN_KERNELS[torch.promote_types(rows.dtype, weights.dtype)],
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _gpu_of(tensor: Tensor) -> Any:
    """Launches go to the current GPU, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.device(tensor.device)


def _costs(grid: Any, metadata: Any, arguments: Any) -> dict[str, Any]:
    """What a launch moves, for Triton's profiler and the virtual GPU's clock.

    All tensors once: what several programs read comes from the cache but for the first time.
    """
    tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
    return {"name": metadata.name, "bytes": sum(each.nbytes for each in tensors)}


# The number of rows changes with each step where rows travel. It must not compile a kernel anew.
@triton.jit(do_not_specialize=["tokens"], launch_metadata=_costs)
def copy_kernel(
    x,
    tokens,
    hidden,
    copy_of_row,
    rows,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(copy_of_row + row) // COPIES
    value = tl.load(x + token * hidden + column, mask=(column < hidden) & (token < tokens), other=0)
    tl.store(rows + row * hidden + column, value, mask=column < hidden)


@triton.jit(do_not_specialize=["count"], launch_metadata=_costs)
def sum_kernel(
    rows,
    count,
    hidden,
    row_of_copy,
    weights,
    total,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(COPIES):
        row = tl.load(row_of_copy + token * COPIES + j)
        within = (column < hidden) & (row < count)
        value = tl.load(rows + row * hidden + column, mask=within, other=0.0).to(WIDE)
        if weights is not None:
            value = value * tl.load(weights + token * COPIES + j).to(WIDE)
        # Zero plus the first value would lose the sign of a zero.
        if j == 0:
            added = value
        else:
            added += value
    tl.store(total + token * hidden + column, added, mask=column < hidden)


@triton.jit(do_not_specialize=["copies"], launch_metadata=_costs)
def gradient_kernel(
    rows,
    grad,
    hidden: tl.constexpr,
    weights,
    copies,
    copy_of_row,
    grad_rows,
    grad_weights,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its own gradient, and that of its copy's weight."""
    row = tl.program_id(0).to(tl.int64)
    copy = tl.load(copy_of_row + row)
    live = copy < copies
    token = copy // COPIES
    weight = tl.load(weights + copy, mask=live, other=0.0).to(WIDE)
    products = tl.zeros((BLOCK,), WIDE)
    for first in range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        within = column < hidden
        slope = tl.load(grad + token * hidden + column, mask=within & live, other=0.0).to(WIDE)
        value = tl.load(rows + row * hidden + column, mask=within, other=0.0).to(WIDE)
        tl.store(grad_rows + row * hidden + column, slope * weight, mask=within)
        products += value * slope
    tl.store(grad_weights + copy, tl.sum(products, 0), mask=live)
