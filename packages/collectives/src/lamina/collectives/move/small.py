"""Broadcast, and reductions of a few small tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from lamina.collectives.call.agreement import require_agreement
from lamina.collectives.call.checks import require_same_device
from lamina.collectives.call.collective import Handle, launch
from lamina.collectives.call.record import issue
from lamina.collectives.move.all_gather import AllGather
from lamina.collectives.transport.groups import group_rank, group_size, where
from lamina.collectives.transport.transport import Completion, nothing_left, wait_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SmallReduction", "all_reduce_small", "broadcast", "host_device"]

_ALIGNMENT = 16
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


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
    size = group_size(group)
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
    sent = (size - 1) * tensor.numel() * tensor.element_size() if group_rank(group) == src else 0
    call = issue("broadcast", group, tensor.dtype, sent, async_op=async_op)
    # Bytes travel as bytes: backends know few dtypes (gloo neither fp8 nor uint16).
    payload = tensor.detach().view(-1).view(torch.uint8)

    def start() -> Completion:
        if group is None or size == 1 or payload.numel() == 0 or payload.is_meta:
            return nothing_left
        work = dist.broadcast(payload, group=group, group_src=src, async_op=True)
        return lambda: wait_all(work)

    return launch(Handle(call, (tensor,)), group, tensor.device, start, async_op=async_op)


class SmallReduction:
    """A reduction of a few small tensors, prepared once for tensors of their kinds.

    Args:
        tensors: any shapes and dtypes, on one device, the same on every rank.
        group: the ranks, or None for a group of one.
        op: "sum", "max" or "min".

    Raises:
        ValueError: an unknown op, or tensors on several devices.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup | None,
        op: Literal["sum", "max", "min"] = "sum",
    ) -> None:
        if op not in _COMBINE:
            raise ValueError(
                f"all_reduce_small {where(group)}: op must be one of {sorted(_COMBINE)}, not {op!r}"
            )
        self._combine, self._size = _COMBINE[op], group_size(group)
        self._alone = not tensors or self._size == 1
        if self._alone:
            return
        self._device = require_same_device(
            "all_reduce_small", group, **{f"tensors[{i}]": t for i, t in enumerate(tensors)}
        )
        self._offsets = [0]
        for tensor in tensors:
            self._offsets.append(self._offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._gather = AllGather(*self._buffers(), group)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is gathered into, and what is sent."""
        packed = torch.zeros(self._offsets[-1], dtype=torch.uint8, device=self._device)
        return packed.new_empty(self._size * packed.numel()), packed

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor with its reduction over all ranks, in one message."""
        if self._alone:
            return
        everyone, packed = self._buffers()
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            packed[offset : offset + tensor.nbytes].copy_(flat)
        self._gather.start(everyone, packed, async_op=False)
        rows = everyone.view(self._size, -1).unbind()
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            terms = [row[offset : offset + tensor.nbytes].view(tensor.dtype) for row in rows]
            tensor.detach().copy_(_tree(terms, self._combine).view(tensor.shape))


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
    SmallReduction(tensors, group, op).reduce(tensors)


def host_device(groups: Iterable[ProcessGroup | None], device: torch.device | str) -> torch.device:
    """Where numbers that hosts agree on should lie: on the CPU, if the groups serve it.

    To read them from a GPU the host would wait for all that is queued there.

    Args:
        groups: that the numbers will travel over; None is one rank alone.
        device: where else, if one of the groups serves accelerators only.
    """
    served = all(
        "cpu" in {kind.type for kind in group._device_types}
        for group in groups
        if group is not None
    )
    return torch.device("cpu" if served else device)


def _tree(
    parts: list[torch.Tensor], combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if len(parts) == 1:
        narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
        return parts[0].float() if narrow else parts[0]
    split = 1 << (len(parts) - 1).bit_length() - 1
    return combine(_tree(parts[:split], combine), _tree(parts[split:], combine))
