"""Broadcast, reductions of a few small tensors at once, and what `ShardedTensor` asks of ranks."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_agreement, require_same_device
from lamina.collectives.call.collective import Handle, issue, launch
from lamina.collectives.compat import one_graph_break
from lamina.collectives.move.all_gather import AllGather
from lamina.collectives.move.shaped import start_all_gather
from lamina.collectives.reduction.summation import sum_rows
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Completion, end_of, nothing_left
from lamina.mesh.engine import group_ref, live_group

_ALIGNMENT = 16
_BACKEND = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ORDERLESS = (torch.uint8, torch.int32, torch.int64)
"""Dtypes that every backend reduces, and whose reductions know no order and no NaN."""


def broadcast(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    src: int = 0,
    async_op: bool = False,
    check: bool = False,
) -> Handle:
    """Copy `tensor` from one rank to all, in place.

    Args:
        tensor: contiguous, any shape and dtype, the same on every rank.
        group: the ranks, or None for a group of one.
        src: rank within the group that has the value.
        async_op: return at once.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Raises:
        ValueError: a tensor with strides, or a source outside the group.
    """
    lane = lane_of(group)
    size = lane.size
    if not 0 <= src < size:
        raise ValueError(
            f"broadcast {where(group)}: src={src} is not a rank of the group (0..{size - 1}); src "
            f"counts within the group"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"broadcast {where(group)}: `tensor` has strides {tensor.stride()}; it must be "
            f"contiguous"
        )
    if check:
        shape = tuple(tensor.shape)
        require_agreement(
            "broadcast", group, tensor.device, dtype=tensor.dtype, shape=shape, src=src
        )
    sent = (size - 1) * tensor.numel() * tensor.element_size() if lane.rank == src else 0
    call = issue("broadcast", lane, tensor.dtype, sent, async_op=async_op)
    # Bytes travel as bytes: backends know few dtypes (gloo neither fp8 nor uint16).
    payload = tensor.detach().view(-1).view(torch.uint8)

    def start() -> Completion:
        """Post the broadcast."""
        if group is None or size == 1 or payload.numel() == 0 or payload.is_meta:
            return nothing_left
        work = dist.broadcast(payload, group=group, group_src=src, async_op=True)
        return end_of(work)

    return launch(Handle(call, (tensor,)), lane, tensor.device, start)


class SmallReduction:
    """A reduction of a few small tensors, prepared once for tensors of their kinds.

    Integers of one dtype are the backend's to reduce: no order changes them, and a rank then sends
    and holds as much on a thousand ranks as on eight. Others are gathered and reduced here, in the
    fixed tree over ranks.

    Arguments and errors are those of `all_reduce_small`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup | None,
        op: Literal["sum", "max", "min"] = "sum",
    ) -> None:
        if op not in _BACKEND:
            raise ValueError(
                f"all_reduce_small {where(group)}: op must be one of {sorted(_BACKEND)}, not {op!r}"
            )
        self._op, self._lane = op, lane_of(group)
        self._size = self._lane.size
        self._alone = not tensors or self._size == 1
        if self._alone:
            return
        self._device = require_same_device(
            "all_reduce_small", group, **{f"tensors[{i}]": t for i, t in enumerate(tensors)}
        )
        # Backends reduce integers as they are; all else is gathered, because of its order.
        dtypes = {tensor.dtype for tensor in tensors}
        if op != "sum" and dtypes == {torch.bool}:
            dtypes = {torch.uint8}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_ORDERLESS) else None
        if self._dtype is not None:
            return
        # Every tensor begins where any dtype may begin.
        lengths = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        self._offsets = [0, *accumulate(lengths)]
        self._gather = AllGather(*self._buffers(), group)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is gathered into, and what is sent."""
        packed = torch.zeros(self._offsets[-1], dtype=torch.uint8, device=self._device)
        return packed.new_empty(self._size * packed.numel()), packed

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor with its reduction over all ranks, in one message."""
        if self._alone:
            return
        if self._dtype is not None:
            self._by_backend([tensor.detach() for tensor in tensors], self._dtype)
            return
        everyone, packed = self._buffers()
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            packed[offset : offset + tensor.nbytes].copy_(flat)
        self._gather.start(everyone, packed, async_op=False)
        rows = everyone.view(self._size, -1)
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            terms = rows[:, offset : offset + tensor.nbytes].view(tensor.dtype)
            tensor.detach().copy_(self._combined(terms).view(tensor.shape))

    def _by_backend(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        packed = torch.cat([tensor.contiguous().view(-1).view(dtype) for tensor in tensors])
        sent = 2 * (self._size - 1) * -(-packed.numel() // self._size) * dtype.itemsize
        call = issue("all_reduce_small", self._lane, dtype, sent)

        def start() -> Completion:
            """Have the backend reduce all of them in place."""
            if packed.is_meta or not packed.numel():
                return nothing_left
            op = _BACKEND[self._op]
            work = dist.all_reduce(packed, op, self._lane.group, async_op=True)
            return nothing_left if work is None else work.wait

        launch(Handle(call, (packed,)), self._lane, self._device, start)
        pieces = torch.split(packed, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def _combined(self, rows: torch.Tensor) -> torch.Tensor:
        """The reduction of the rows of [ranks, n], which it may overwrite."""
        if self._op != "sum":
            return rows.amax(0) if self._op == "max" else rows.amin(0)
        if not rows.is_floating_point():
            return rows.any(0) if rows.dtype == torch.bool else rows.sum(0, dtype=rows.dtype)
        # Narrow floats are summed in float32 and rounded once, when they are stored.
        return sum_rows(rows.float() if rows.itemsize < 4 else rows)


def all_reduce_small(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None,
    op: Literal["sum", "max", "min"] = "sum",
) -> None:
    """Reduce a few small tensors in place over all ranks, in one message.

    Integers are exact, float64 stays float64, bfloat16 and float16 are summed in float32 and
    rounded once; the order of the sum is the fixed tree over ranks.

    Args:
        tensors: any shapes and dtypes, on one device, the same on every rank. Overwritten.
        group: the ranks, or None for a group of one.
        op: "sum", "max" or "min".

    Raises:
        ValueError: an unknown op, or tensors on several devices.
    """
    reduce = _reduce if group is None else _reduce_over_ranks
    reduce(tensors, group, op)


def _reduce(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None,
    op: Literal["sum", "max", "min"],
) -> None:
    SmallReduction(tensors, group, op).reduce(tensors)


_reduce_over_ranks = one_graph_break(_reduce)
"""torch.compile can follow what one rank does, and no messages."""


def host_device(groups: Iterable[ProcessGroup | None], device: torch.device | str) -> torch.device:
    """Where numbers that hosts agree on should lie: on the CPU, if the groups serve it.

    To read them from a GPU the host would wait for all that is queued there.

    `groups` are what the numbers will travel over; None is one rank alone. Without such groups they
    lie on `device`.
    """
    served = all(
        "cpu" in {kind.type for kind in group._device_types}
        for group in groups
        if group is not None
    )
    return torch.device("cpu" if served else device)


class SpanGroups:
    """The ranks of the product of some axes: how a `ShardedTensor` reaches its other spans.

    It meets `lamina.buffers.engine.SpanCommunicator`.

    There is one process group per axis that cuts the tensor, outer axis first; None is an axis of
    one rank.
    """

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        self._refs = tuple(group_ref(group) for group in groups)

    def __eq__(self, other: object) -> bool:
        """Whether two communicators reach the same ranks over the same groups."""
        return isinstance(other, SpanGroups) and self._refs == other._refs

    def __hash__(self) -> int:
        return hash(self._refs)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(lane_of(live_group(ref)).size for ref in self._refs)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max", "min"]) -> torch.Tensor:
        """Reduce a small tensor in place, inner axis first; integers and float64 as such."""
        for ref in reversed(self._refs):
            all_reduce_small([tensor], live_group(ref), op=op)
        return tensor

    def all_gather(self, local: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' flat tensors, of `numels[rank]` elements, in rank order.

        Pieces travel padded to the longest, so that one equal-sized gather per axis serves.
        """
        width = max(numels)
        piece = torch.zeros(width, dtype=local.dtype, device=local.device)
        piece[: local.numel()].copy_(local.detach())
        # The inner axis first: the outer one concatenates what it has gathered.
        for ref in reversed(self._refs):
            piece = start_all_gather(piece, live_group(ref), async_op=False).wait()
        rows = piece.view(len(numels), width)
        return torch.cat([row[:numel] for row, numel in zip(rows, numels, strict=True)])
