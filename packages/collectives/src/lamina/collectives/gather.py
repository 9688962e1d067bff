"""All-gather straight into the destination."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .checks import (
    group_rank,
    group_size,
    overlap,
    require_disjoint,
    require_flat,
    require_same_device,
    where,
)
from .compat import all_gather_single
from .handles import Handle, launch
from .record import issue
from .transport import Rest, exchange, host_bound, wait_all

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
) -> Handle:
    """Gather equal pieces from all ranks into `output`, in rank order, with no copy in between.

    Args:
        output: flat [N*n] for N ranks.
        input: flat [n], of the same dtype (any); it may be exactly this rank's own piece of
            `output` (in place: then nothing is copied locally).
        group: the ranks, or None for a group of one.
        async_op: return at once.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    """
    name = "all_gather_into"
    size, rank = group_size(group), group_rank(group)
    require_flat(name, "output", output, group)
    require_flat(name, "input", input, group)
    device = require_same_device(name, group, output=output, input=input)
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
    pieces = list(output.view(size, input.numel()).unbind())
    own = pieces[rank]
    in_place = overlap(own, input) and own.data_ptr() == input.data_ptr()
    if not in_place:
        require_disjoint(
            name,
            group,
            ("output", output),
            ("input", input),
            unless="only an input that is exactly this rank's own piece of the output may",
        )
    sent = (size - 1) * input.numel() * input.element_size()
    call = issue(name, group, input.dtype, sent, async_op=async_op)
    on_host = host_bound(group, device)

    def start() -> Rest:
        if group is not None and size > 1 and not on_host:
            work = all_gather_single(output, input, group, async_op=True)
            return lambda: wait_all(work)
        rest = (
            None if group is None or size == 1 else exchange(pieces, [input] * size, group, device)
        )
        if not in_place:
            own.copy_(input)
        return rest if rest is not None else lambda: None

    return cast(
        "Handle",
        launch(
            call,
            group,
            device,
            start,
            async_op=async_op,
            host_bound=on_host,
            keep=(output, input),
        ),
    )
