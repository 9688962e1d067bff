"""Messages between two ranks: rings for context parallelism, operations for pipeline schedules.

`send_recv` is one step. `ring` is the whole way round with two sets of buffers: while
the caller works on what it holds, that is already on its way to the next rank and the previous
rank's is arriving.

torch's pipeline schedules decide when messages go and batch those that meet; they want each as a
`torch.distributed.P2POp`. Made here, a message is on the ledger like every other, when it is handed
over.

Note [Steps of a ring are exchanges of all]
    torch's NCCL backend tells the allocator of each tensor that a send or a receive takes
    (`record_stream`). Such memory is free when the device has come to that point, and not when the
    host has let it go. A host is ahead, so a step of context parallelism reserved a third more (on
    the virtual GPU). Of a collective's tensors the backend keeps a reference until `wait` instead.
    So over NCCL a step of a ring is an all-to-all, in which each rank has something for one peer.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_disjoint, require_same_device
from lamina.collectives.call.collective import Handle, Pending, issue, launch
from lamina.collectives.compat import one_graph_break
from lamina.collectives.transport.groups import backend_name, served_by_gloo, where
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Completion, exchange, nothing_left

Message: TypeAlias = dist.P2POp
"""A send or a receive that has not been issued."""


@one_graph_break
def send_recv(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None,
    shift: int = 1,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> Pending[tuple[torch.Tensor, ...]]:
    """Send `tensors` to the rank `shift` places on and receive as many from `shift` places back.

    Point to point and never blocking, so rings of any size and any shift, odd or even, cannot
    deadlock, as long as all ranks of the group take their steps in the same order.

    Args:
        tensors: any shapes and dtypes on one device; unchanged until `wait`. The receiver's `out`
            has to match in sizes and dtypes, which is not checked between ranks.
        group: the ranks, or None for a group of one.
        shift: places to send by; negative sends backwards. A multiple of the group's size copies.
        out: contiguous tensors to receive into, apart from `tensors`; allocated like `tensors`
            if None, which is right where all ranks send the same shapes.

    Returns:
        A handle whose `wait` gives the tensors received.

    Raises:
        TypeError: one tensor in place of a sequence.
        ValueError: no tensors, several devices, or an `out` that doesn't fit.

    Examples:
        >>> (received,) = send_recv([torch.ones(3)], None, shift=1).wait()
    """
    size, rank = lane_of(group).size, lane_of(group).rank
    sends = _sources(tensors, group)
    received = _destinations(sends, out, group)
    device = require_same_device(
        "send_recv", group, **{f"tensors[{place}]": tensor for place, tensor in enumerate(sends)}
    )
    # Every rank would send to itself, which no backend does.
    if group is None or shift % size == 0:
        for copy, tensor in zip(received, sends, strict=True):
            copy.copy_(tensor)
        return Pending(None, lambda: received)
    target, source = (rank + shift) % size, (rank - shift) % size
    # Of several dtypes the record says bytes.
    dtypes = {tensor.dtype for tensor in sends}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    sent = sum(tensor.nbytes for tensor in sends)
    between = partial(_unless_near, target, sent)
    lane = lane_of(group)
    call = issue("send_recv", lane, dtype, sent, between=between, async_op=True)
    # Bytes travel as bytes: backends know few dtypes (gloo neither fp8 nor uint16).
    outgoing = [tensor.view(-1).view(torch.uint8) for tensor in sends]
    incoming = [tensor.detach().view(-1).view(torch.uint8) for tensor in received]

    def post() -> Completion:
        """Post both messages of each tensor; what is left is to wait for them."""
        if device.type == "meta":
            return nothing_left
        if served_by_gloo(group, device):
            ends = [
                exchange([(target, out)], [(source, into)], group, device)
                for out, into in zip(outgoing, incoming, strict=True)
            ]
            return lambda: [end() for end in ends]
        by_nccl = backend_name(group, device) == "nccl"
        start = _exchange_of_all if by_nccl else _sends_and_receives
        works = start(group, (target, outgoing), (source, incoming))
        return lambda: [work.wait() for work in works]

    handle = launch(Handle(call, (*sends, *received)), lane, device, post)
    return Pending(handle, lambda: received)


def ring(
    tensors: Sequence[torch.Tensor], group: ProcessGroup | None, shift: int = 1
) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Pass the ranks' tensors once round the ring and yield each rank's in turn.

    The next step is under way while the caller has a set in hands. Two sets of buffers take turns,
    so a set is overwritten after the second next one: use it (on CUDA: enqueue its use on the
    current stream) before asking for the next. All ranks have to go all the way round.

    `tensors` have the same shapes and dtypes on all ranks, and are sent by `shift` places, which
    has no common divisor with the number of ranks. It yields, once for each rank, this rank first,
    the rank within the group that tensors come from, and the tensors. ValueError: a `shift` that
    would not reach all ranks, and what `send_recv` refuses.
    """
    size, rank = lane_of(group).size, lane_of(group).rank
    if math.gcd(shift, size) != 1:
        raise ValueError(
            f"ring {where(group)}: shift={shift} has the divisor {math.gcd(shift, size)} in common "
            f"with the {size} ranks, so tensors would not reach all of them; use 1 or -1"
        )
    # The first set is the caller's own, and is read only. Each of the two buffers is filled while
    # the other one is in the caller's hands and on its way.
    at_hand = tuple(tensors)
    buffers: list[tuple[torch.Tensor, ...] | None] = [None, None]
    for step in range(size):
        passing = None
        if step + 1 < size:  # the last set is at its last rank
            passing = send_recv(at_hand, group, shift, out=buffers[step % 2])
        yield (rank - step * shift) % size, at_hand
        if passing is not None:
            at_hand = buffers[step % 2] = passing.wait()


_Pieces: TypeAlias = tuple[int, list[torch.Tensor]]
"""A peer's rank, and the tensors that go there or come from there."""


def _exchange_of_all(group: ProcessGroup, there: _Pieces, here: _Pieces) -> list[dist.Work]:
    """See Note [Steps of a ring are exchanges of all]."""

    def for_each_rank(piece: torch.Tensor, peer: int) -> list[torch.Tensor]:
        nothing = piece[:0]
        return [piece if rank == peer else nothing for rank in range(group.size())]

    return [
        dist.all_to_all(
            for_each_rank(into, here[0]), for_each_rank(out, there[0]), group=group, async_op=True
        )
        for out, into in zip(there[1], here[1], strict=True)
    ]


def _sends_and_receives(group: ProcessGroup, there: _Pieces, here: _Pieces) -> list[dist.Work]:
    """Messages between the neighbours, in one batch."""
    messages = [
        dist.P2POp(moves, tensor, group=group, group_peer=peer)
        for moves, (peer, pieces) in ((dist.isend, there), (dist.irecv, here))
        for tensor in pieces
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(messages) if messages else []


def _sources(
    tensors: Sequence[torch.Tensor], group: ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(
            f"send_recv {where(group)}: `tensors` must be a sequence of tensors, not one tensor of "
            f"shape {tuple(tensors.shape)}; write [tensor]"
        )
    if not tensors:
        raise ValueError(f"send_recv {where(group)}: `tensors` is empty; there is nothing to send")
    return tuple(tensor.detach().contiguous() for tensor in tensors)


def _destinations(
    sends: tuple[torch.Tensor, ...], out: Sequence[torch.Tensor] | None, group: ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    if out is None:
        return tuple(torch.empty_like(tensor) for tensor in sends)
    if len(out) != len(sends):
        raise ValueError(
            f"send_recv {where(group)}: `out` has {len(out)} tensors, but {len(sends)} are sent"
        )
    for place, (target, source) in enumerate(zip(out, sends, strict=True)):
        if target.dtype != source.dtype or not target.is_contiguous():
            raise ValueError(
                f"send_recv {where(group)}: out[{place}] must be contiguous and {source.dtype}, as "
                f"what is sent, but is {target.dtype} with shape {tuple(target.shape)} and strides "
                f"{target.stride()}"
            )
        # All tensors are on their way at once, so no destination may lie in any of those sent.
        for other, sent in enumerate(sends):
            require_disjoint(
                "send_recv", group, (f"out[{place}]", target), (f"tensors[{other}]", sent)
            )
    return tuple(out)


def send_operation(
    tensor: torch.Tensor, group: ProcessGroup, peer: int, *, tag: int = 0
) -> Message:
    """An operation that sends a tensor to another rank.

    The tensor is contiguous and must stay as it is until the operation has finished. `peer` is the
    rank of the receiver within the group. On gloo a message meets a receive of the same tag; NCCL
    matches by order alone. ValueError: a tensor with strides, or a peer outside the group.
    """
    _check_message("send_operation", tensor, group, peer)
    # Recorded where bytes leave: a receive would count them twice.
    between = partial(_unless_near, peer, tensor.nbytes)
    kind = "send_operation", lane_of(group), tensor.dtype, tensor.nbytes
    issue(*kind, between=between, async_op=True)
    return dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer)


def receive_operation(
    tensor: torch.Tensor, group: ProcessGroup, peer: int, *, tag: int = 0
) -> Message:
    """An operation that fills a tensor with what another rank sends; see `send_operation`.

    Errors are the same.
    """
    _check_message("receive_operation", tensor, group, peer)
    return dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=peer)


def _unless_near(peer: int, nbytes: int, near: Sequence[int]) -> int:
    return 0 if peer in near else nbytes


def _check_message(name: str, tensor: torch.Tensor, group: ProcessGroup, peer: int) -> None:
    if not 0 <= peer < lane_of(group).size:
        raise ValueError(
            f"{name} {where(group)}: peer={peer} is not a rank of the group "
            f"(0..{lane_of(group).size - 1}); it counts within the group"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} {where(group)}: `tensor` has strides {tensor.stride()}; it must be contiguous"
        )
