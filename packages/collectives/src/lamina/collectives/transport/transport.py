"""How bytes get from rank to rank, and the one place where that is chosen.

The choice is by the backend that serves the tensor's device:

- gloo: pair by pair, straight from the source buffer into the destination (`gloo_exchange`).
  torch's own collectives on gloo copy through staging buffers and take two to three times as long.
- gloo with CUDA tensors: messages through host memory, as gloo moves only that.
- GPUs of one host whose ranks have opened a window: they read each other's memory (`peer_windows`).
- anything else (NCCL, fake): the backend's own all-to-all and all-gather of whole tensors, so that
  the host's work does not depend on the number of ranks.
- meta tensors: nothing moves, and what would come has its memory; plans can be made and recorded
  without data.

A `Route` is chosen once for all exchanges of one kind. `exchange` and `exchange_rows` are for those
that have no kind: rings, and rows whose numbers differ from call to call.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lamina.collectives.compat import all_gather_single
from lamina.collectives.transport.gloo_exchange import Chunk, GlooExchange, GlooRoute
from lamina.collectives.transport.groups import cuts_as_gloo, served_by_gloo
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.peer_windows import PeerChunks, PeerRoute
from lamina.mesh.engine import GroupRef

Completion: TypeAlias = Callable[[], object]
"""What is left to do of an exchange once its messages are under way: to wait for them."""


def nothing_left() -> None:
    """The completion of an exchange in a group of one, or of meta tensors."""


def use_messages(group: ProcessGroup | None) -> None:
    """Make the ranks of `group` exchange messages only.

    CPU ranks of one host otherwise read each other's memory where the kernel allows it, which is
    several times as fast, and GPUs of one host read each other's windows. One rank that calls this
    is enough. For measurements of the network, and for hosts whose policy forbids reading another
    process.

    Raises:
        RuntimeError: the group has already been used otherwise.
    """
    if group is not None:
        lane_of(group).keep_to_messages()


class Chunks(Protocol):
    """Every rank's chunk for this rank, on its way."""

    def chunks(self) -> Sequence[Chunk] | torch.Tensor | PeerChunks:
        """Wait for the chunks, in rank order; they may be the rows of [ranks, items] of scratch."""

    def close(self) -> None:
        """The chunks have been read; afterwards all ranks may reuse their inputs."""


class Route(Protocol):
    """How pieces of flat tensors travel between the ranks of a group; it holds no tensors."""

    needs_scratch: bool
    """Whether `collect` needs memory of the caller's: one piece for every rank, this one too."""
    tags: int
    """How many tags that follow each other a gather takes."""
    only_posts: bool
    """Whether `gather` and `collect` queue nothing on a GPU but the backend's messages."""
    run: int
    """Ranks of a host of which one alone is sent a piece of another host, in a gather."""

    def gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: int | None = None
    ) -> Completion:
        """Send `input` to every rank; receive every rank's piece where it belongs in `output`.

        The piece of this rank, `input`, is filled into `output` too, and may be that part of it.
        The tag, or the first of `tags`, is drawn from the lane when the collective was called,
        where the gather is posted later. See Note [Tags are drawn when a collective is called].
        """

    def collect(
        self, input: torch.Tensor, scratch: torch.Tensor | None = None, tag: int | None = None
    ) -> Chunks:
        """Send every rank its piece of `input`, and bring every rank's piece for this one here.

        `input` is unchanged until `Chunks.close`, and the own piece of it is used in place.
        `scratch` is flat, for the pieces of N ranks where it is needed, else of N - 1. The tag is
        as in `gather`.
        """


def route_for(
    group: ProcessGroup | None,
    piece: int,
    total: int,
    device: torch.device,
    unit: int = 1,
    readable: bool = True,
) -> Route:
    """Choose how a rank's pieces, of `piece` items of a whole of `total`, travel.

    The last ranks' pieces may be shorter, or empty. No part of a large message holds a fraction of
    `unit` items. Chunks that are `readable` are numbers, which a sum can read where they lie.
    """
    if group is None or group.size() == 1:
        return _LocalRoute()
    if device.type == "meta":
        return _LocalRoute(needs_scratch=not cuts_as_gloo(group, device))
    if device.type == "cpu" and served_by_gloo(group, device):
        return GlooRoute(group, piece, total, unit)
    # A sum reads numbers in a window where they lie; codes have to be decoded here.
    window = lane_of(group).windows.get(device)
    if window is not None and readable and total == piece * group.size():
        return PeerRoute(window)
    return _BackendRoute(group, piece, total, device)


class _LocalRoute:
    """A group of one, or meta tensors: nothing travels."""

    only_posts = False
    tags = run = 1

    def __init__(self, needs_scratch: bool = False) -> None:
        self.needs_scratch = needs_scratch

    def gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: int | None = None
    ) -> Completion:
        """Copy the piece, unless it lies in place."""
        if not input.is_meta and output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return nothing_left

    def collect(
        self, input: torch.Tensor, scratch: torch.Tensor | None = None, tag: int | None = None
    ) -> Chunks:
        """The own piece is the only one."""
        return _Rows([input], nothing_left)


class _Rows:
    """Chunks that are tensors of this rank once `complete` has run."""

    def __init__(self, rows: list[torch.Tensor] | torch.Tensor, complete: Completion) -> None:
        self._rows, self._complete = rows, complete

    def chunks(self) -> list[torch.Tensor] | torch.Tensor:
        """Complete the exchange, and give its rows."""
        self._complete()
        return self._rows

    def close(self) -> None:
        """Nothing is lent."""


class _BackendRoute:
    """Whole buffers by the backend's collectives (NCCL), or CUDA tensors over gloo."""

    needs_scratch = True
    tags = run = 1

    def __init__(self, group: ProcessGroup, piece: int, total: int, device: torch.device) -> None:
        self._ref, self._size, self._rank = GroupRef(group), group.size(), group.rank()
        self._device, self.only_posts = device, not served_by_gloo(group, device)
        # Without a call for each rank: there may be thousands. The last piece may be shorter.
        full, rest = divmod(total, max(piece, 1))
        self._lengths = ([piece] * full + [rest] + [0] * self._size)[: self._size]
        self._room = [self._lengths[self._rank]] * self._size

    def gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: int | None = None
    ) -> Completion:
        """By the backend's all-gather, or by messages through the host."""
        if self.only_posts:
            work = all_gather_single(output, input, group=self._ref.group, async_op=True)
            return end_of(work, self._device)
        pieces = list(enumerate(torch.split(output, self._lengths)))
        sends = [(peer, input) for peer, _ in pieces]
        complete = exchange(sends, pieces, self._ref.group, self._device, tag)
        _, own = pieces[self._rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        return complete

    def collect(
        self, input: torch.Tensor, scratch: torch.Tensor | None = None, tag: int | None = None
    ) -> Chunks:
        """By the backend's all-to-all, or by messages through the host; into `scratch`."""
        assert scratch is not None  # noqa: S101 - the caller asks `needs_scratch`
        group, rows = self._ref.group, scratch[: self._size * self._room[0]]
        if self.only_posts:  # asked once, as a sum in slices comes here for each of them
            work = dist.all_to_all_single(rows, input, group=group, async_op=True)
            return _Rows(rows.view(self._size, -1), end_of(work, self._device))
        ends = exchange_rows(rows, input, self._room, self._lengths, group, even=True, tag=tag)
        return _Rows(rows.view(self._size, -1), ends)


Pairs: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Ranks of a group, and a contiguous tensor for or from each; nothing for those left out."""


def exchange(
    sends: Pairs, receives: Pairs, group: ProcessGroup, device: torch.device, tag: int | None = None
) -> Completion:
    """Send tensors to some ranks of `group` and receive others from some.

    Nothing blocks: the messages are posted, and the returned function completes them. Empty
    tensors, and those for this rank itself, do not travel. Sizes must match between the two ends;
    between ranks that read each other's memory a mismatch raises, elsewhere nobody checks. What is
    sent must not change until completion. The group is gloo's, of at least two ranks. For the tag
    see `Route.gather`.
    """
    rank, size = group.rank(), group.size()
    if device.type == "meta":
        return nothing_left
    sends = [(peer, tensor) for peer, tensor in sends if peer != rank and tensor.numel()]
    receives = [(peer, tensor) for peer, tensor in receives if peer != rank and tensor.numel()]
    if tag is None:
        tag = lane_of(group).next_tag()
    # Each rank begins with its neighbour. If all began with rank 0, it would be the bottleneck.
    sends.sort(key=lambda pair: (pair[0] - rank) % size)  # so that ranks start apart
    receives.sort(key=lambda pair: (rank - pair[0]) % size)
    if device.type != "cpu":
        return _staged(sends, receives, group, tag)
    return _gloo_exchange(sends, receives, group, tag).fill


def exchange_rows(
    output: torch.Tensor,
    input: torch.Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    group: ProcessGroup | None,
    *,
    even: bool,
    tag: int | None = None,
) -> Completion:
    """Send run i of the rows of `input` to rank i; what rank i sends becomes run i of `output`.

    Runs have `sends[i]` and `receives[i]` rows. Both tensors are contiguous. If all these counts
    are equal (`even`), a backend need not be told. For the tag see `Route.gather`.
    """
    if group is None or group.size() == 1:
        output.copy_(input)
        return nothing_left
    if input.is_meta:
        return nothing_left
    if not served_by_gloo(group, input.device):
        splits = (None, None) if even else (list(receives), list(sends))
        tensors = output, input, splits[0], splits[1]
        work = dist.all_to_all_single(*tensors, group=group, async_op=True)
        return end_of(work, input.device)
    # The own run is copied beside the messages, which do not bring it.
    runs, room = torch.split(input, list(sends)), torch.split(output, list(receives))
    pairs = list(enumerate(runs)), list(enumerate(room))
    complete = exchange(*pairs, group, input.device, tag)
    room[group.rank()].copy_(runs[group.rank()])
    return complete


def _gloo_exchange(
    sends: Pairs, receives: Pairs, group: ProcessGroup, tag: int, *, direct: bool = True
) -> GlooExchange:
    incoming = [(peer, tensor.numel(), tensor) for peer, tensor in receives]
    dtype = receives[0][1].dtype if receives else torch.uint8
    return GlooExchange(lane_of(group), sends, incoming, dtype, tag, direct=direct)


class BackendEnd:
    """The end of a collective of the backend: called, waited for and asked as an event is."""

    __slots__ = ("_work", "device")

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self.device = work, device

    def __call__(self) -> None:
        """Wait for it, on a GPU with the current stream."""
        self._work.wait()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for it."""
        with torch.cuda.stream(stream):
            self._work.wait()

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self._work.is_completed()


def end_of(work: Work | None, device: torch.device) -> Completion:
    """What waits for a collective of the backend; None is a call that had nothing to do."""
    return nothing_left if work is None else BackendEnd(work, device)


def _staged(sends: Pairs, receives: Pairs, group: ProcessGroup, tag: int) -> Completion:
    """CUDA tensors over gloo: copy to the host, exchange there, copy back."""
    host_sends = [(peer, tensor.to("cpu", non_blocking=True)) for peer, tensor in sends]
    host_receives = [(peer, torch.empty_like(each, device="cpu")) for peer, each in receives]
    # The host may send only what has been copied, and must not wait for that here.
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def complete() -> None:
        """Exchange on the host, and copy what came to its place."""
        copied.synchronize()
        _gloo_exchange(host_sends, host_receives, group, tag, direct=False).fill()
        for (_, target), (_, source) in zip(receives, host_receives, strict=True):
            target.copy_(source)

    return complete
