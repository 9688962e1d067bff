"""How bytes get from rank to rank, and the one place where that is chosen.

The choice is by the backend that serves the tensor's device:

- gloo: a message per pair of ranks, straight from the source buffer into the destination.
  torch's collectives on gloo copy through staging buffers and take two to three times as long.
- gloo with CUDA tensors: the same through pinned host memory (gloo moves only host memory).
- anything else (NCCL, fake): the backend's all-to-all over lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .compat import backend_name
from .lanes import lane_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["exchange", "host_bound", "wait_all"]

Rest = Callable[[], None]


def host_bound(group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether the host itself has to wait for messages on `device` (gloo)."""
    return group is not None and backend_name(group, device) == "gloo"


def exchange(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    device: torch.device,
    tag: int | None = None,
) -> Rest:
    """Send `sends[r]` to every rank r of `group` and receive `receives[r]` from it.

    Nothing blocks: the messages are posted, and the returned function completes them (on NCCL it
    makes the current stream wait). Entries that are None or empty send nothing, and an entry for
    this rank itself is ignored. Sizes must match between the two ends; nobody checks that here.

    Args:
        receives: per rank of the group, a contiguous tensor to fill.
        sends: per rank of the group, a contiguous tensor to send; unchanged until completion.
        group: at least two ranks.
        device: where the tensors lie.
        tag: drawn from the group's lane when the collective was called. An exchange that is posted
            later, from the lane's thread, must bring it: drawn there, ranks would number their
            messages in the order in which their threads happened to run.

    """
    if tag is None:
        tag = lane_of(group).next_tag()
    if backend_name(group, device) != "gloo":
        return _all_to_all_lists(receives, sends, group, device)
    if device.type == "cpu":
        works = _post(receives, sends, group, tag)
        return lambda: wait_all(*works)
    return _staged(receives, sends, group, tag)


def wait_all(*works: Work | None) -> None:
    """Wait for each of `works`; None (a call that had nothing to do) is done."""
    for work in works:
        if work is not None:
            work.wait()


def _post(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    tag: int,
) -> list[Work]:
    """Post all receives, then all sends, each rank starting at its own neighbour.

    Posting never blocks, so no order can deadlock; starting at the neighbour spreads the load, as
    in round i every rank sends to the one i places further.
    """
    rank, size = group.rank(), group.size()
    works: list[Work] = []
    for step in range(1, size):
        source = (rank - step) % size
        tensor = receives[source]
        if tensor is not None and tensor.numel():
            works.append(_posted(dist.irecv(tensor, group=group, group_src=source, tag=tag)))
    for step in range(1, size):
        target = (rank + step) % size
        tensor = sends[target]
        if tensor is not None and tensor.numel():
            works.append(_posted(dist.isend(tensor, group=group, group_dst=target, tag=tag)))
    return works


def _posted(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this rank is not in the process group it was asked to communicate in")
    return work


def _staged(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    tag: int,
) -> Rest:
    """CUDA tensors over gloo: copy to the host, exchange there, copy back."""
    rank = group.rank()
    stream = torch.cuda.current_stream()
    host_sends = [
        None if tensor is None or place == rank else tensor.to("cpu", non_blocking=True)
        for place, tensor in enumerate(sends)
    ]
    host_receives = [
        None if tensor is None or place == rank else torch.empty_like(tensor, device="cpu")
        for place, tensor in enumerate(receives)
    ]
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(stream)

    def rest() -> None:
        copied.synchronize()
        wait_all(*_post(host_receives, host_sends, group, tag))
        for target, source in zip(receives, host_receives, strict=True):
            if target is not None and source is not None:
                target.copy_(source)

    return rest


def _all_to_all_lists(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    device: torch.device,
) -> Rest:
    rank = group.rank()
    filled = next(tensor for tensor in (*receives, *sends) if tensor is not None)
    nothing = torch.empty(0, dtype=filled.dtype, device=device)

    def others(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return [
            nothing if tensor is None or place == rank else tensor
            for place, tensor in enumerate(tensors)
        ]

    work = dist.all_to_all(others(receives), others(sends), group=group, async_op=True)
    return lambda: wait_all(work)
