"""How bytes get from rank to rank, and the one place where that is chosen.

The choice is by the backend that serves the tensor's device:

- gloo: pair by pair, straight from the source buffer into the destination (`gloo_exchange`).
  torch's own collectives on gloo copy through staging buffers and take two to three times as long.
- gloo with CUDA tensors: messages through host memory, as gloo moves only that.
- anything else (NCCL, fake): the backend's all-to-all over lists of tensors.
- meta tensors: nothing moves; plans can be made and recorded without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lamina.collectives.transport.compat import all_gather_single
from lamina.collectives.transport.gloo_exchange import GlooExchange
from lamina.collectives.transport.groups import served_by_gloo
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.shared_host import RemoteMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["exchange", "gather_pieces", "nothing_left", "use_messages", "wait_all"]

Rest = Callable[[], None]
"""What is left to do of an exchange once its messages are under way."""


def nothing_left() -> None:
    """The rest of an exchange in a group of one, or of meta tensors."""


def use_messages(group: ProcessGroup | None) -> None:
    """Make the CPU ranks of `group` exchange messages only.

    Ranks of one host otherwise read each other's memory where the kernel allows it, which is
    several times as fast. One rank that calls this is enough. For measurements of the network, and
    for hosts whose policy forbids reading another process.

    Raises:
        RuntimeError: the group has already been used otherwise.
    """
    if group is not None:
        lane_of(group).keep_to_messages()


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
    this rank itself is ignored. Sizes must match between the two ends; between ranks that read
    each other's memory a mismatch raises, elsewhere nobody checks.

    Args:
        receives: per rank of the group, a contiguous tensor to fill.
        sends: per rank of the group, a contiguous tensor to send; unchanged until completion.
        group: at least two ranks.
        device: where the tensors lie.
        tag: drawn from the group's lane when the collective was called. An exchange that is posted
            later, from the lane's thread, must bring it: drawn there, ranks would number their
            messages in the order in which their threads happened to run.
    """
    lane = lane_of(group)
    if tag is None:
        tag = lane.next_tag()
    if not served_by_gloo(group, device):
        return _all_to_all_lists(receives, sends, group, device)
    if device.type != "cpu":
        return _staged(receives, sends, group, tag)
    gloo = _gloo_exchange(receives, sends, group, tag, direct=True)
    posted = lane.knows_host_peers
    if posted:
        gloo.post()

    def rest() -> None:
        if not posted:  # the first exchange of a group blocks, to find host peers
            gloo.post()
        _fill(gloo, receives)

    return rest


def _gloo_exchange(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    tag: int,
    *,
    direct: bool,
) -> GlooExchange:
    def memory(rank: int, _: bool) -> torch.Tensor | None:
        return receives[rank]

    expects = [0 if tensor is None else tensor.numel() for tensor in receives]
    dtype = next((tensor.dtype for tensor in receives if tensor is not None), torch.uint8)
    return GlooExchange(sends, expects, dtype, memory, group, tag, direct=direct)


def _fill(gloo: GlooExchange, receives: Sequence[torch.Tensor | None]) -> None:
    for source in gloo.sources():
        chunk, target = gloo.fetch(source), receives[source]
        if isinstance(chunk, RemoteMemory) and target is not None:
            chunk.read(0, target)
            gloo.acknowledge(source)
    gloo.close()


def gather_pieces(
    pieces: Sequence[torch.Tensor],
    own: torch.Tensor,
    group: ProcessGroup,
    device: torch.device,
    tag: int | None = None,
) -> Rest:
    """Send `own` to every rank and receive `pieces[r]` from rank r, as in `exchange`.

    Args:
        pieces: per rank a run of one flat tensor, one after the other; this rank's too is filled.
        own: this rank's piece: contiguous, of its entry's size; it may be that entry.
        group: at least two ranks.
        device: where the tensors lie.
        tag: see `exchange`.
    """
    even = all(piece.numel() == own.numel() for piece in pieces)
    if served_by_gloo(group, device) or device.type == "meta" or not even:
        rest = exchange(pieces, [own] * len(pieces), group, device, tag)
        kept = pieces[group.rank()]
        if kept.data_ptr() != own.data_ptr():
            kept.copy_(own)
        return rest
    whole = pieces[0].as_strided((len(pieces) * own.numel(),), (1,))
    work = all_gather_single(whole, own, group, async_op=True)
    return lambda: wait_all(work)


def wait_all(*works: Work | None) -> None:
    """Wait for each of `works`; None (a call that had nothing to do) is done."""
    for work in works:
        if work is not None:
            work.wait()


def _staged(
    receives: Sequence[torch.Tensor | None],
    sends: Sequence[torch.Tensor | None],
    group: ProcessGroup,
    tag: int,
) -> Rest:
    """CUDA tensors over gloo: copy to the host, exchange there, copy back."""
    rank = group.rank()
    host_sends = [
        None if tensor is None or place == rank else tensor.to("cpu", non_blocking=True)
        for place, tensor in enumerate(sends)
    ]
    host_receives = [
        None if tensor is None or place == rank else torch.empty_like(tensor, device="cpu")
        for place, tensor in enumerate(receives)
    ]
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    gloo = _gloo_exchange(host_receives, host_sends, group, tag, direct=False)

    def rest() -> None:
        copied.synchronize()
        gloo.post()
        _fill(gloo, host_receives)
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
    if device.type == "meta":
        return nothing_left
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
