"""Messages between two ranks, as operations that somebody else issues in batches.

torch's pipeline schedules decide when messages go and batch those that meet; they want each as a
`torch.distributed.P2POp`. Made here, a message is on the ledger like every other, when it is handed
over.
"""

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.record import issue
from lamina.collectives.transport.groups import group_size, where

__all__ = ["Message", "receive_operation", "send_operation"]

Message: TypeAlias = dist.P2POp
"""A send or a receive that has not been issued."""


def send_operation(
    tensor: torch.Tensor, group: ProcessGroup, peer: int, *, tag: int = 0
) -> Message:
    """An operation that sends a tensor to another rank.

    Args:
        tensor: contiguous; it must stay as it is until the operation has finished.
        group: the ranks.
        peer: the receiver's rank within the group.
        tag: on gloo a message meets a receive of the same tag; NCCL matches by order alone.

    Raises:
        ValueError: a tensor with strides, or a peer outside the group.
    """
    _check("send_operation", tensor, group, peer)
    nbytes = tensor.numel() * tensor.element_size()
    issue("send_operation", group, tensor.dtype, nbytes, async_op=True)
    return dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer)


def receive_operation(
    tensor: torch.Tensor, group: ProcessGroup, peer: int, *, tag: int = 0
) -> Message:
    """An operation that fills a tensor with what another rank sends; see `send_operation`.

    Raises:
        ValueError: a tensor with strides, or a peer outside the group.
    """
    _check("receive_operation", tensor, group, peer)
    return dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=peer)


def _check(name: str, tensor: torch.Tensor, group: ProcessGroup, peer: int) -> None:
    if not 0 <= peer < group_size(group):
        raise ValueError(
            f"{name} {where(group)}: peer={peer} is not a rank of the group "
            f"(0..{group_size(group) - 1}); it counts within the group"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} {where(group)}: `tensor` has strides {tensor.stride()}; it must be contiguous"
        )
