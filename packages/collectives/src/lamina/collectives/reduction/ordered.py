"""FP32-accumulating reduce-scatter and all-reduce with one order of summation.

Every rank sends chunk r of its input to rank r in the wire dtype; rank r sums the chunks it then
holds in fp32, in a fixed pairwise tree over the ranks. So the sum's bits depend neither on the
transport nor on the size of the buffer, and a bf16 wire costs rounding once per input, not at
every hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lamina.collectives.call.agreement import require_agreement
from lamina.collectives.call.handles import ReduceHandle, Statistics, launch_reduction
from lamina.collectives.call.record import issue
from lamina.collectives.reduction.arriving_chunks import ArrivingChunks
from lamina.collectives.reduction.reduce_checks import (
    SumOp,
    check_all_reduce,
    check_reduce_scatter,
    factor_of,
    scratch_for,
)
from lamina.collectives.reduction.reference import sum_dtype
from lamina.collectives.reduction.summation import sum_chunks
from lamina.collectives.transport.groups import group_rank, group_size, served_by_gloo
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Rest, gather_pieces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_reduce_fp32", "reduce_scatter_fp32"]


def reduce_scatter_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    scratch: torch.Tensor | None = None,
    statistics: bool = True,
    check: bool = False,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32 and keep this rank's piece.

    Args:
        output: flat [n]; float32 or `input`'s dtype. Rank r gets elements r*n .. (r+1)*n of the
            sum. It may be exactly this rank's own piece of `input` (in place), unless
            `accumulate` is set.
        input: flat [N*n] for N ranks; float32, bfloat16, float16 or float64: the wire dtype.
            It must not change until the handle's `wait`.
        group: the ranks, or None for a group of one.
        op: "sum", or "avg" to multiply the sum by 1/N.
        scale: a further factor; both are applied as one factor, rounded once to the dtype of the
            sum, to the sum and never to the input.
        accumulate: add to `output` (in the dtype of the sum) instead of overwriting it.
        async_op: return at once; the sum runs beside the caller, not in `wait`.
        scratch: flat, at least (N-1)*n elements of the wire dtype, for what other ranks send;
            Lamina's own if None.
        statistics: False leaves out squared norm and non-finite flag, which cost a little time.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Returns:
        A handle with `wait()`, `squared_norm` and `nonfinite` of the stored output.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.
    """
    name, size = "reduce_scatter_fp32", group_size(group)
    output, input = output.detach(), input.detach()
    device = check_reduce_scatter(name, output, input, group, op, accumulate=accumulate)
    pieces = _cut(input, output.numel(), size)
    if check:
        _agree(name, output, input, group)
    factor = factor_of(op, scale, size, input.dtype)
    received = input.numel() - output.numel()
    call = issue(name, group, input.dtype, received * input.element_size(), async_op=async_op)
    kept = Statistics(device) if statistics else None
    scratch = scratch_for(name, scratch, received, input, output, group)

    def start() -> Rest:
        if group is None or size == 1:
            return lambda: sum_chunks([input], output, factor, accumulate, kept)
        collection = ArrivingChunks(pieces, group, device, scratch)

        return lambda: collection.sum_into(output, factor, accumulate, kept)

    return launch_reduction(
        call,
        group,
        device,
        start,
        kept,
        async_op=async_op,
        keep=(output, input, scratch),
    )


def all_reduce_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    statistics: bool = True,
    check: bool = False,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32; every rank gets the whole sum.

    A reduce-scatter and a gather, so the bits are those of `reduce_scatter_fp32`. Any
    number of elements: the last ranks' pieces may be shorter, or empty.

    Args:
        output: flat [n]; float32 or `input`'s dtype; it may be `input` itself, unless
            `accumulate` is set.
        input: flat [n] in the wire dtype.
        group: the ranks, or None for a group of one.
        op: as in `reduce_scatter_fp32`.
        scale: as in `reduce_scatter_fp32`.
        accumulate: add the sum to what this rank's `output` holds.
        async_op: return at once.
        statistics: as in `reduce_scatter_fp32`.
        check: as in `reduce_scatter_fp32`.

    Returns:
        A handle; its statistics are of this rank's piece of the output, so that their sum over
        the ranks is that of the whole.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.
    """
    name = "all_reduce_fp32"
    size, rank = group_size(group), group_rank(group)
    output, input = output.detach(), input.detach()
    device = check_all_reduce(name, output, input, group, op, accumulate=accumulate)
    if check:
        _agree(name, output, input, group)
    factor = factor_of(op, scale, size, input.dtype)
    piece = -(-input.numel() // size)
    source, target = _room(output, input, group, piece * size, accumulate=accumulate)
    sends, results = _cut(source, piece, size), _cut(target, piece, size)
    mine = sends[rank].numel()
    scratch = scratch_for(name, None, (size - 1) * mine, input, output, group)
    sent = (source.numel() - mine) * input.itemsize + (size - 1) * mine * target.itemsize
    call = issue(name, group, input.dtype, sent, async_op=async_op)
    kept = Statistics(device) if statistics else None

    def start() -> Rest:
        if group is None or size == 1:
            return lambda: sum_chunks([input], output, factor, accumulate, kept)
        collection = ArrivingChunks(sends, group, device, scratch)
        second = lane_of(group).next_tag()  # now, not in `finish`: see `transport.exchange`

        def finish() -> None:
            collection.sum_into(results[rank], factor, False, kept)
            gather_pieces(results, results[rank], group, device, second)()
            if accumulate:
                _add(results, _cut(output, piece, size), rank, kept)
            elif target is not output:  # padded
                output.copy_(target[: output.numel()])

        return finish

    return launch_reduction(
        call,
        group,
        device,
        start,
        kept,
        async_op=async_op,
        keep=(output, source, scratch, target),
    )


def _room(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    padded: int,
    *,
    accumulate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an all-reduce sends from and gathers to: input and output, or copies of them.

    Backends that know only equal pieces get a padded copy of an input that does not divide. To
    accumulate, the sums are gathered apart, as ranks may hold different outputs.
    """
    if group is None or group.size() == 1:
        return input, output
    if served_by_gloo(group, input.device):
        padded = input.numel()
    source, target = input, output
    if input.numel() != padded:
        source = input.new_zeros(padded)
        source[: input.numel()].copy_(input)
    if accumulate:
        target = torch.empty(padded, dtype=sum_dtype(input.dtype), device=output.device)
    elif output.numel() != padded:
        target = output.new_empty(padded)
    return source, target


def _add(
    sums: list[torch.Tensor], outputs: list[torch.Tensor], rank: int, kept: Statistics | None
) -> None:
    """Add each piece of the sum to its piece of the output; statistics are of this rank's."""
    for place, (total, output) in enumerate(zip(sums, outputs, strict=True)):
        own = kept if place == rank else None
        sum_chunks([total[: output.numel()]], output, None, True, own)


def _agree(
    name: str, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None
) -> None:
    require_agreement(
        name, group, input.device, wire=input.dtype, output=output.numel(), input=input.numel()
    )


def _cut(tensor: torch.Tensor, piece: int, count: int) -> list[torch.Tensor]:
    """Cut into `count` runs of `piece` elements; the last ones may be shorter, or empty."""
    limit = tensor.numel()
    return [
        tensor[min(place * piece, limit) : min((place + 1) * piece, limit)]
        for place in range(count)
    ]
