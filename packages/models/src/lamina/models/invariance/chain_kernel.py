"""The kernel of products on a GPU: tiles of one shape, and no dimension that is split.

An element of a tile is a chain of fused multiply-adds in float32, as on a CPU, whatever lies beside
it. So its bits depend on its row, its column and the cuts of the inner dimension alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Rows and columns that one program computes."""
STEP = 16
"""Elements of the inner dimension that are in fast memory at a time; they divide a chunk."""
WARPS = 4
STAGES = 1


def add_chains(
    left: Tensor, right: Tensor, pieces: Iterable[slice], chunk: int, total: Tensor
) -> None:
    """Write into `total` the sum of the chunks of some pieces, one chunk after the other.

    Args:
        left: float32 `[b, m, k]`. Of bfloat16 Triton would make a tensor core's product on some
            GPUs and not on others.
        right: float32 `[b, k, n]`.
        pieces: of the inner dimension.
        chunk: elements of a piece that are one chain, from the piece's first element on.
        total: float32 `[b, m, n]`, contiguous.
    """
    batch, rows, columns = total.shape
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), batch)
    # Launches go to the current GPU, which need not be that of the tensors.
    with torch.cuda.device(left.device) if left.is_cuda else torch.device(left.device):
        for number, piece in enumerate(pieces):
            chain_kernel[grid](
                left,
                *left.stride(),
                right,
                *right.stride(),
                total,
                rows,
                columns,
                piece.start,
                piece.stop,
                ADDS=number > 0,
                CHUNK=chunk,
                TILE=TILE,
                STEP=STEP,
                num_warps=WARPS,
                num_stages=STAGES,
            )


def _costs(grid: Any, metadata: Any, arguments: Any) -> dict[str, Any]:
    """What a launch computes and moves, for Triton's profiler and the virtual GPU's clock."""
    rows, columns, batch = arguments["rows"], arguments["columns"], grid[2]
    inner = arguments["stop"] - arguments["start"]
    # A tile reads its rows and columns from the cache, which has them of the tiles beside it.
    moved = rows * inner + inner * columns + (1 + arguments["ADDS"]) * rows * columns
    return {
        "name": metadata.name,
        "flops32": 2 * batch * rows * columns * inner,
        "bytes": batch * moved * arguments["total"].element_size(),
    }


# Sizes and strides change with the layout. A kernel that is compiled for some of them (those that
# 16 divides, or 1) could multiply in another order.
@triton.jit(
    do_not_specialize=[
        "left_batch", "left_row", "left_inner", "right_batch", "right_inner", "right_column",
        "rows", "columns", "start", "stop",
    ],
    launch_metadata=_costs,
)  # fmt: skip
def chain_kernel(
    left,
    left_batch: tl.int64,
    left_row: tl.int64,
    left_inner: tl.int64,
    right,
    right_batch: tl.int64,
    right_inner: tl.int64,
    right_column: tl.int64,
    total,
    rows: tl.int64,
    columns: tl.int64,
    start,
    stop,
    ADDS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of one matrix of the batch, over one piece of the inner dimension."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inner = tl.arange(0, STEP)
    left += batch * left_batch + row * left_row
    right += batch * right_batch + column * right_column
    place = total + batch * rows * columns + row * columns + column
    within = (row < rows) & (column < columns)
    added = tl.zeros((TILE, TILE), tl.float32)
    if ADDS:
        added = tl.load(place, mask=within, other=0.0)
    for first in range(start, stop, CHUNK):
        chain = tl.zeros((TILE, TILE), tl.float32)
        # Steps beyond the chunk's end add zeros, which change nothing.
        for step in range(0, CHUNK, STEP):
            k = first + step + inner
            a = tl.load(
                left + k[None, :] * left_inner, mask=(row < rows) & (k < stop)[None, :], other=0.0
            )
            b = tl.load(
                right + k[:, None] * right_inner,
                mask=(column < columns) & (k < stop)[:, None],
                other=0.0,
            )
            chain = tl.dot(a, b, chain, input_precision="ieee")
        # Zero plus the first chain is that chain, but for the sign of a zero.
        added += chain
    tl.store(place, added, mask=within)
