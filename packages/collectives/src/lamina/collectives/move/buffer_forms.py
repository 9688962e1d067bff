"""Gather and reduce for flat buffers: the placements say which collective it is."""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.buffers import FlatBuffer, Partial
from lamina.collectives.call.collective import Handle, ReduceHandle
from lamina.collectives.move.all_gather import all_gather_into
from lamina.collectives.reduction.ordered import SumOp
from lamina.collectives.reduction.reduce import ReductionName, reduction_class
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.lanes import lane_of


def gather(
    buffer: FlatBuffer,
    destination: FlatBuffer | torch.Tensor,
    group: ProcessGroup | Sequence[ProcessGroup | None] | None,
    *,
    async_op: bool = False,
) -> Handle:
    """Gather a sharded buffer straight into `destination`.

    Args:
        buffer: placed with Shard along one or more axes.
        destination: the whole: a buffer of the same layout that holds all of it, or a flat tensor
            of `buffer.layout.size` elements; of `buffer`'s dtype. `buffer` may be a view of this
            rank's piece of it, which is then not copied.
        group: the ranks of the Shard axis; with several such axes a sequence of groups, outer axis
            first (gathered in this order, and only the last one is asynchronous).
        async_op: return at once.

    Raises:
        ValueError: the buffer is not sharded along that many axes, a group has another size than
            its axis, or the destination doesn't fit.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (8, 4))], num_shards=1)
        >>> mesh = ParallelLayout().build("cpu")
        >>> shard = FlatBuffer(layout, Shard(), mesh=mesh["dp_shard"])
        >>> handle = gather(shard, torch.empty(layout.size), mesh.group("dp_shard"))
    """
    groups = [group] if group is None or not isinstance(group, Sequence) else list(group)
    axes = [axis for axis, cut in zip(buffer.axes, buffer.cuts, strict=True) if cut]
    if len(axes) != len(groups):
        raise ValueError(
            f"gather: the buffer is sharded along {len(axes)} axes {[axis.name for axis in axes]}, "
            f"but {len(groups)} groups are given; give one group per such axis, outer first"
        )
    if not groups:
        raise ValueError(
            f"gather: this rank holds all {buffer.numel} elements already, as no placement of "
            f"{buffer.placement} is Shard; use `buffer.data`"
        )
    for axis, ranks in zip(axes, groups, strict=True):
        if (axis.size, axis.rank) != (lane_of(ranks).size, lane_of(ranks).rank):
            raise ValueError(
                f"gather {where(ranks)}: axis {axis.name} has {axis.size} ranks, of which this is "
                f"number {axis.rank}; pass that axis' group"
            )
    whole = _flat(destination)
    if whole.numel() != buffer.layout.size:
        raise ValueError(
            f"gather: the destination has {whole.numel()} elements, but the layout has "
            f"{buffer.layout.size}; give a buffer that is replicated along the gathered axes"
        )
    # Rank (o, i) holds piece i * O + o, so the outer axis fills a contiguous run of the inner one,
    # which begins at a multiple of its length.
    piece, start = buffer.data, buffer.range[0]
    for position, ranks in enumerate(groups, 1):
        length = piece.numel() * lane_of(ranks).size
        start -= start % max(length, 1)
        run, last = whole[start : start + length], position == len(groups)
        handle = all_gather_into(run, piece, ranks, async_op=async_op and last)
        piece = run
    return handle


def reduce(
    buffer: FlatBuffer,
    destination: FlatBuffer | torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    reduction: ReductionName = "ordered",
    async_op: bool = False,
) -> ReduceHandle:
    """Sum a buffer that is Partial along one axis: keep this rank's piece, or all of it.

    Args:
        buffer: placed with Partial along `group`'s axis.
        destination: takes the sum: of as many elements as `buffer` (an all-reduce) or of a
            `group.size()`-th of them (a reduce-scatter); float32 or `buffer`'s dtype.
        group: the ranks of the Partial axis. For two axes call twice, inner axis first.
        op: "sum" or "avg".
        scale: a factor of the sum.
        accumulate: add to the destination.
        reduction: "ordered" (fp32, one order of summation) or "native" (the backend's).
        async_op: return at once.

    Raises:
        ValueError: no Partial axis of the group's size and rank, an unknown reduction, or a
            destination that doesn't fit.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (8, 4))], num_shards=1)
        >>> mesh = ParallelLayout().build("cpu")
        >>> gradients = FlatBuffer(layout, Partial(), mesh=mesh["dp_shard"])
        >>> handle = reduce(gradients, torch.empty(layout.size), mesh.group("dp_shard"))
    """
    _require_partial(buffer, group)
    kind = reduction_class(reduction)
    source, target = buffer.data, _flat(destination)
    scatter = lane_of(group).size > 1 and source.numel() == lane_of(group).size * target.numel()
    return kind(target, source, group, scatter=scatter, op=op).start(
        target, source, scale=scale, accumulate=accumulate, async_op=async_op
    )


def _flat(destination: FlatBuffer | torch.Tensor) -> torch.Tensor:
    return destination.data if isinstance(destination, FlatBuffer) else destination


def _require_partial(buffer: FlatBuffer, group: ProcessGroup | None) -> None:
    pairs = zip(buffer.axes, buffer.placement, strict=True)
    partial = {axis.name: axis for axis, placement in pairs if isinstance(placement, Partial)}
    place = (lane_of(group).size, lane_of(group).rank)
    if not any((axis.size, axis.rank) == place for axis in partial.values()):
        raise ValueError(
            f"reduce {where(group)}: the buffer is Partial along "
            f"{[f'{name} (rank {axis.rank} of {axis.size})' for name, axis in partial.items()]}, "
            f"and this group is none of these; what is not Partial must not be summed again"
        )
