"""All-gather straight into the destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.collectives.call.agreement import require_agreement
from lamina.collectives.call.checks import require_disjoint, require_flat, require_same_device
from lamina.collectives.call.handles import Handle, launch
from lamina.collectives.call.record import issue
from lamina.collectives.transport.groups import group_rank, group_size, where
from lamina.collectives.transport.transport import Rest, gather_pieces, nothing_left

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["all_gather_into"]


def all_gather_into(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    async_op: bool = False,
    check: bool = False,
) -> Handle:
    """Gather equal pieces from all ranks into `output`, in rank order, with no copy in between.

    Args:
        output: flat [N*n] for N ranks.
        input: flat [n], of the same dtype (any); it may be exactly this rank's own piece of
            `output` (in place: then nothing is copied locally).
        group: the ranks, or None for a group of one.
        async_op: return at once.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.
    """
    size, rank = group_size(group), group_rank(group)
    output, input = output.detach(), input.detach()
    _check(output, input, group)
    device = output.device
    pieces = list(output.view(size, input.numel()).unbind())
    if check:
        require_agreement("all_gather_into", group, device, dtype=input.dtype, input=input.numel())
    sent = (size - 1) * input.numel() * input.element_size()
    call = issue("all_gather_into", group, input.dtype, sent, async_op=async_op)

    def start() -> Rest:
        if group is not None and size > 1:
            return gather_pieces(pieces, input, group, device)
        if pieces[rank].data_ptr() != input.data_ptr():
            pieces[rank].copy_(input)
        return nothing_left

    return launch(
        call,
        group,
        device,
        start,
        async_op=async_op,
        keep=(output, input),
    )


def _check(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None) -> None:
    name, size = "all_gather_into", group_size(group)
    require_flat(name, "output", output, group)
    require_flat(name, "input", input, group)
    require_same_device(name, group, output=output, input=input)
    if output.dtype != input.dtype:
        raise ValueError(
            f"{name} {where(group)}: `output` is {output.dtype} and `input` {input.dtype}; they "
            f"must be equal (cast the input first)"
        )
    if output.numel() != size * input.numel():
        raise ValueError(
            f"{name} {where(group)}: `output` has {output.numel()} elements, but {size} pieces of "
            f"{input.numel()} need {size * input.numel()}"
        )
    own = output.view(size, input.numel())[group_rank(group)]
    if own.data_ptr() != input.data_ptr():
        require_disjoint(
            name,
            group,
            ("output", output),
            ("input", input),
            unless="only an input that is exactly this rank's own piece of the output may",
        )
