"""All-to-all with even or uneven splits."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import (
    require_agreement,
    require_disjoint,
    require_divisible,
    require_matching_splits,
    require_same_device,
)
from lamina.collectives.call.collective import Handle, issue, launch
from lamina.collectives.transport.groups import served_by_gloo, size_of, where
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import exchange_rows


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
    check: bool = False,
) -> Handle:
    """Send run i of the rows of `input` to rank i; what rank i sends becomes run i of `output`.

    Args:
        output: contiguous [R, ...], any dtype.
        input: contiguous [S, ...], same trailing shape and dtype as `output`; unchanged until the
            handle's `wait`.
        group: the ranks, or None for a group of one.
        output_splits: rows that each rank sends here, N numbers adding up to R; equal if None.
        input_splits: rows for each rank, N numbers adding up to S; equal if None.
        async_op: return at once.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Raises:
        ValueError: splits, shapes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> rows, received = torch.ones(4, 2), torch.empty(4, 2)
        >>> all_to_all(received, rows, None).wait()
    """
    name = "all_to_all"
    lane = lane_of(group)
    rank = lane.rank
    device = require_same_device(name, group, output=output, input=input)
    _check_tensors(output, input, group)
    output, input = output.detach(), input.detach()
    receives = row_splits("output_splits", output_splits, output, group)
    sends = row_splits("input_splits", input_splits, input, group)
    # The own run does not travel, so no transport would notice.
    if receives[rank] != sends[rank]:
        raise ValueError(
            f"{name} {where(group)}: this rank sends itself {sends[rank]} rows but expects "
            f"{receives[rank]} from itself; the splits of the two ends must agree"
        )
    if check:
        row = tuple(input.shape[1:])
        require_agreement(name, group, device, dtype=input.dtype, row=row)
        require_matching_splits(name, group, device, sends, receives)
    row_bytes = input[:1].nbytes if len(input) else 0
    sent = (len(input) - sends[rank]) * row_bytes

    def between(near: Sequence[int]) -> int:
        """Bytes for other ranks than `near`, those of this host."""
        return (len(input) - sum(sends[each] for each in near)) * row_bytes

    call = issue(name, lane, input.dtype, sent, between=between, async_op=async_op)
    # Only given splits can be uneven on another rank, which a backend then has to know.
    even = output_splits is None and input_splits is None
    start = partial(exchange_rows, output, input, receives, sends, group, even=even)
    by_backend = lane.size > 1 and not served_by_gloo(group, device)
    return launch(Handle(call, (output, input)), lane, device, start, only_posts=by_backend)


def _check_tensors(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None) -> None:
    place = f"all_to_all {where(group)}"
    for label, tensor in (("output", output), ("input", input)):
        if tensor.dim() == 0 or not tensor.is_contiguous():
            raise ValueError(
                f"{place}: `{label}` must be contiguous with at least one dimension, but has shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}"
            )
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:]:
        raise ValueError(
            f"{place}: `output` {output.dtype} {tuple(output.shape)} and `input` {input.dtype} "
            f"{tuple(input.shape)} must agree in dtype and in all dimensions but the first"
        )
    require_disjoint("all_to_all", group, ("output", output), ("input", input))


def row_splits(
    name: str,
    splits: Sequence[int] | None,
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    add_up: bool = True,
) -> list[int]:
    """Rows per rank: `splits` after checks, or equal ones; `name` is the argument's, for messages.

    ValueError: not one count >= 0 per rank, rows that do not divide equally, or (with `add_up`)
    counts that do not add up to the rows of `tensor`.
    """
    size, rows = size_of(group), tensor.shape[0]
    if splits is None:
        require_divisible("all-to-all", tensor, 0, group)
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0:
        raise ValueError(
            f"all-to-all {where(group)}: {name}={counts} must be {size} row counts >= 0, one per "
            f"rank of the group"
        )
    if add_up and sum(counts) != rows:
        raise ValueError(
            f"all-to-all {where(group)}: {name}={counts} sum to {sum(counts)}, but the tensor has "
            f"{rows} rows; every row goes to exactly one rank"
        )
    return counts
