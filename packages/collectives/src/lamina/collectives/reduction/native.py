"""Reductions by the backend itself: SHARP, user buffers, thousands of ranks.

The backend chooses the order of the sum and rounds in the wire dtype after every addition, so
these functions claim a tolerance and no bits: against the exact sum of N ranks' elements x_i, the
error is at most (N - 1) * eps * sum |x_i|, with eps the wire dtype's (2^-24 for float32, 2^-8 for
bfloat16), as each of the N - 1 additions rounds once. Averages are the backend's as well. Scale,
accumulation and statistics are applied to the result in fp32, as in the ordered reductions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lamina.collectives.call.handles import ReduceHandle, Statistics, launch_reduction
from lamina.collectives.call.record import issue
from lamina.collectives.reduction.reduce_checks import (
    SumOp,
    check_all_reduce,
    check_reduce_scatter,
    factor_of,
)
from lamina.collectives.reduction.summation import sum_chunks
from lamina.collectives.transport.compat import reduce_scatter_single
from lamina.collectives.transport.groups import group_rank, group_size
from lamina.collectives.transport.transport import Rest, wait_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["all_reduce_native", "reduce_scatter_native"]

_BACKEND = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
"""The backend averages by itself: in the wire dtype, where a sum of fp16 may not fit."""


def reduce_scatter_native(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    statistics: bool = True,
) -> ReduceHandle:
    """Sum `input` over the ranks by the backend's reduce-scatter; keep this rank's piece.

    Arguments, handle and errors are those of `reduce_scatter_fp32`; bits depend on the backend,
    its algorithm and the sizes. Over N ranks the sum of x_i is within (N - 1) * eps * sum |x_i| of
    the exact one, with eps the wire dtype's (2^-24 for float32, 2^-8 for bfloat16).
    """
    name = "reduce_scatter_native"
    size, rank = group_size(group), group_rank(group)
    output, input = output.detach(), input.detach()
    device = check_reduce_scatter(name, output, input, group, op, accumulate=accumulate)
    own = input[rank * output.numel() : (rank + 1) * output.numel()]
    factor = factor_of("sum", scale, size, input.dtype)
    sent = (input.numel() - output.numel()) * input.element_size()
    call = issue(name, group, input.dtype, sent, async_op=async_op)
    kept = Statistics(device) if statistics else None
    # Straight into the output where nothing is left to do to it but to look at it.
    direct = output.dtype == input.dtype and not accumulate
    total = output if direct else torch.empty_like(own)

    def start() -> Rest:
        work = None
        if group is None or size == 1:
            total.copy_(own)
        elif device.type != "meta":
            work = reduce_scatter_single(total, input, group, op=_BACKEND[op], async_op=True)

        return partial(_finish, work, total, output, factor, accumulate, kept)

    return launch_reduction(
        call,
        group,
        device,
        start,
        kept,
        async_op=async_op,
        keep=(output, input, total),
    )


def all_reduce_native(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    statistics: bool = True,
) -> ReduceHandle:
    """Sum `input` over the ranks by the backend's all-reduce; every rank gets the whole sum.

    Arguments and errors are those of `all_reduce_fp32`; bits depend on the backend, its
    algorithm and the sizes, within the tolerance of `reduce_scatter_native`. Unlike there, the
    handle's statistics are of the whole output.
    """
    name = "all_reduce_native"
    size = group_size(group)
    output, input = output.detach(), input.detach()
    device = check_all_reduce(name, output, input, group, op, accumulate=accumulate)
    factor = factor_of("sum", scale, size, input.dtype)
    # The least that any algorithm sends: a reduce-scatter and a gather in the wire dtype.
    piece = -(-input.numel() // size)
    sent = 2 * (size - 1) * piece * input.element_size()
    call = issue(name, group, input.dtype, sent, async_op=async_op)
    kept = Statistics(device) if statistics else None
    direct = output.dtype == input.dtype and not accumulate
    total = output if direct else torch.empty_like(input)

    def start() -> Rest:
        if total.data_ptr() != input.data_ptr():
            total.copy_(input)
        work = None
        if group is not None and size > 1 and device.type != "meta":
            work = dist.all_reduce(total, op=_BACKEND[op], group=group, async_op=True)

        return partial(_finish, work, total, output, factor, accumulate, kept)

    return launch_reduction(
        call,
        group,
        device,
        start,
        kept,
        async_op=async_op,
        keep=(output, input, total),
    )


def _finish(
    work: Work | None,
    total: torch.Tensor,
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    kept: Statistics | None,
) -> None:
    """Wait for the backend's sum; bring it, scaled and measured, to where it was asked for."""
    wait_all(work)
    untouched = factor is None and kept is None and not accumulate
    if total is output and untouched:
        return
    sum_chunks([total], output, factor, accumulate, kept)
