"""Exchanges between the ranks of a gloo group, in host memory.

The bytes of a pair of ranks take one of two ways, and both ends choose the same one. The first is a
message: gloo's send and receive, straight from the source into the destination. The second is
for ranks of one host (`shared_host`) and sizes at which it pays: the sender announces where
the bytes lie, the receiver reads them there and acknowledges, and then the sender may reuse its
buffer. Large messages that a sum waits for come in parts (`chunked_messages`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lamina.collectives.transport.chunked_messages import CUT_FROM, ChunkedMessage, part_items
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.lanes import Lane, lane_of
from lamina.collectives.transport.shared_host import HostPeer, RemoteMemory
from lamina.mesh.engine import host_runs

READ_FROM = 1 << 17  # bytes per pair; below, reading saves nothing

_Peer: TypeAlias = tuple[int, int, int]
"""A rank, and where its piece begins and ends."""
Chunk: TypeAlias = torch.Tensor | RemoteMemory | ChunkedMessage
"""What one rank contributes to a sum: here, in another process's memory, or on its way."""


def bounds_of(rank: int, piece: int, total: int) -> tuple[int, int]:
    """Where a rank's piece begins and ends; the last ranks' pieces may be shorter, or empty."""
    return min(rank * piece, total), min((rank + 1) * piece, total)


# Note [Sizes are in the tags]
# If the two ends of a message expect different sizes, gloo ends the process of one of them
# (`EnforceNotMet`) or delivers a part. With the size in its tag, such a message meets no receive.
# Both ranks wait, and the watchdog says in which collectives. See docs/decisions/0107.
_SIZE_SHIFT, _SIZES = 25, 61  # tags of lanes end below 2**25, and torch takes tags below 2**31


class GlooExchange:
    """Messages, announcements and acknowledgements of one exchange.

    When it is made, its messages are posted: all receives, then all sends. None of them blocks, so
    no order can deadlock. Then either `fill`, or `chunks` and `close`.

    Note [The first exchange of a group blocks]
    Before anything is posted, the ranks of a group find out who can read whose memory, and that
    waits for all of them. An asynchronous collective must not wait, so the first exchange of a
    group posts its messages when it is completed, on the lane's thread.

    `sends` are pairs of a rank and a contiguous CPU tensor, unchanged until the end. `receives` are
    a rank, the number of items of `dtype` that it sends, and the tensor that takes them, or None
    where `unit` is given: the exchange then finds memory itself. `direct` says whether ranks of
    this host may be read. For a sum, large messages come in parts that do not cut `unit` items, and
    `own` is this rank and its own chunk.
    """

    def __init__(
        self,
        lane: Lane,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor | None]],
        dtype: torch.dtype,
        tag: int,
        *,
        direct: bool = True,
        unit: int | None = None,
        own: tuple[int, torch.Tensor] | None = None,
    ) -> None:
        assert lane.ref is not None  # noqa: S101 - one rank alone exchanges nothing
        self._lane, self._group, self._tag = lane, lane.ref.weak() or lane.group, tag
        self._sends, self._receives, self._dtype = sends, receives, dtype
        self._direct, self._unit, self._own = direct, unit, own
        self._posted = False
        self._arriving: list[tuple[torch.Tensor | ChunkedMessage | HostPeer, Work | None]] = []
        """For each receive what comes, and what to wait for."""
        self._outbound: list[Work | None] = []
        self._lent: list[tuple[HostPeer, torch.Tensor]] = []
        self._borrowed: list[torch.Tensor] = []
        if not direct or lane.host_peers is not None:
            self._post()

    def _post(self) -> None:
        """Post all receives, then all sends."""
        self._posted, group, pool, unit = True, self._group, self._lane.scratch_pool, self._unit
        peers: tuple[HostPeer | None, ...] | None = None
        if self._direct:
            peers = self._lane.host_peers or self._lane.find_host_peers(group)
        # Receives first: a message that finds its receive goes straight to its place.
        for source, numel, target in self._receives:
            nbytes, work = numel * self._dtype.itemsize, None
            tag = self._tag + (nbytes % _SIZES << _SIZE_SHIFT)
            arriving: torch.Tensor | ChunkedMessage | HostPeer
            if peers is not None and nbytes >= READ_FROM and (peer := peers[source]) is not None:
                arriving = peer  # it announces where its bytes lie
            elif unit is not None and nbytes > CUT_FROM:
                how = tag, unit, pool, target
                # In parts, of which a few are received ahead of the sum.
                arriving = ChunkedMessage(source, numel, self._dtype, group, *how)
            else:
                if target is None:
                    self._borrowed.append(pool.borrow(nbytes))
                    target = self._borrowed[-1][:nbytes].view(self._dtype)
                arriving = target
                work = dist.irecv(target, group=group, group_src=source, tag=tag)
            self._arriving.append((arriving, work))
        for rank, tensor in self._sends:
            nbytes = tensor.nbytes
            if peers is not None and nbytes >= READ_FROM and (peer := peers[rank]) is not None:
                self._lend(peer, tensor)
                continue
            parts: Sequence[torch.Tensor] = (tensor,)
            if unit is not None and nbytes > CUT_FROM:  # as the receiver does
                parts = torch.split(tensor, part_items(tensor.dtype, unit))
            tag = self._tag + (nbytes % _SIZES << _SIZE_SHIFT)
            for part in parts:
                self._outbound.append(dist.isend(part, group=group, group_dst=rank, tag=tag))

    def _lend(self, peer: HostPeer, tensor: torch.Tensor) -> None:
        """Tell a rank of this host where its data lie; it acknowledges when it has read them."""
        pinned = torch.cuda.is_initialized() and tensor.is_pinned()  # type: ignore[no-untyped-call]
        if pinned:  # such pages may be closed to other processes
            tensor = torch.empty_like(tensor, pin_memory=False).copy_(tensor)
        self._lent.append((peer, tensor))
        peer.connection.send(2 * self._tag, tensor.data_ptr(), tensor.nbytes)

    def _announced(self, source: int, peer: HostPeer, numel: int) -> RemoteMemory:
        """Wait until a rank of this host has said where its bytes lie."""
        address, nbytes = peer.connection.take(2 * self._tag)
        expected = numel * self._dtype.itemsize
        if nbytes != expected:
            self._acknowledge(peer, expected)  # or it would wait for ever
            raise self._mismatch(f"rank {source} sends {nbytes} bytes to this rank", expected)
        return RemoteMemory(peer, address, numel, self._dtype)

    def _acknowledge(self, peer: HostPeer, nbytes: int) -> None:
        """Tell a rank of this host how many of its bytes were read, or expected."""
        peer.connection.send(2 * self._tag + 1, nbytes, 0)

    def fill(self) -> None:
        """Wait until everything is where it was asked for, and nobody needs this rank's buffers.

        ValueError says that two ranks of this host expect different sizes, RuntimeError that
        something does not come in time, or that a rank is gone.
        """
        if not self._posted:  # see Note [The first exchange of a group blocks]
            self._post()
        for (arriving, work), (source, numel, target) in zip(
            self._arriving, self._receives, strict=True
        ):
            if work is not None:
                work.wait()
            elif isinstance(arriving, HostPeer) and target is not None:
                self._announced(source, arriving, numel).read(0, target)
                self._acknowledge(arriving, target.nbytes)
        self._finish_sends()

    def chunks(self) -> list[Chunk]:
        """Wait for every rank's chunk, in rank order, for a sum that reads it; raises as `fill`.

        Of what comes in parts, each block's reader waits.
        """
        if not self._posted:
            self._post()
        by_rank: dict[int, Chunk] = {} if self._own is None else {self._own[0]: self._own[1]}
        for (arriving, work), (source, numel, _) in zip(
            self._arriving, self._receives, strict=True
        ):
            if isinstance(arriving, HostPeer):  # the sum reads it block by block, where it lies
                by_rank[source] = self._announced(source, arriving, numel)
            else:
                if work is not None:
                    work.wait()
                by_rank[source] = arriving
        return list(map(by_rank.__getitem__, sorted(by_rank)))

    def close(self) -> None:
        """Wait, with the chunks read, until nobody needs this rank's buffers; raises as `fill`."""
        for (arriving, _), (_, numel, _) in zip(self._arriving, self._receives, strict=True):
            if isinstance(arriving, HostPeer):
                self._acknowledge(arriving, numel * self._dtype.itemsize)
            elif isinstance(arriving, ChunkedMessage):
                arriving.close()
        self._finish_sends()
        for scratch in self._borrowed:
            self._lane.scratch_pool.give_back(scratch)
        self._borrowed.clear()

    def _finish_sends(self) -> None:
        for work in self._outbound:
            if work is not None:
                work.wait()
        # A rank that reads this one's memory says when it is done; until then nothing may change.
        for peer, tensor in self._lent:
            read, _ = peer.connection.take(2 * self._tag + 1)
            if read != tensor.nbytes:
                what = f"this rank sends {tensor.nbytes} bytes to rank {peer.rank}"
                raise self._mismatch(what, read)
        self._outbound.clear()
        self._lent.clear()

    def _mismatch(self, what: str, expected: int) -> ValueError:
        return ValueError(
            f"collective {where(self._group)}: {what}, which expects {expected}; all ranks must "
            f"pass buffers of the same size and dtype (or matching splits) and make the same calls "
            f"in the same order"
        )


class GlooRoute:
    """How pieces of flat CPU tensors travel between the ranks of a gloo group, two or more.

    Each rank begins with its neighbours in rank order, so that ranks start apart. Arguments are
    those of `route_for`.

    Note [A host gets a piece once]
    Ranks of a host are runs of `run` ranks (see `HostRuns`). A gather sends a rank's piece to its
    own run, and to the ranks at the same place of other runs. Then the ranks of a run pass on to
    each other what came from other runs. So a piece goes to another host once, not once for each
    rank there. All of it is messages of the one group.
    """

    needs_scratch = only_posts = False

    def __init__(self, group: ProcessGroup, piece: int, total: int, unit: int = 1) -> None:
        rank, size = group.rank(), group.size()
        self._lane = lane_of(group)
        self._unit, self._piece, self._total = unit, piece, total
        self._rank, self._own = rank, bounds_of(rank, piece, total)
        ahead = [(rank + step) % size for step in range(1, size)]
        self._ahead = [(peer, *bounds_of(peer, piece, total)) for peer in ahead]
        self._behind = self._ahead[::-1]
        self.run = run = host_runs(group).run if total == piece * size else 1
        self._near = [at for at in self._ahead if at[0] // run == rank // run]
        self._first = [
            at for at in self._ahead if at[0] // run == rank // run or (at[0] - rank) % run == 0
        ]
        here, last = rank - rank % run, size if self._near else 0
        self._shifts = [start - here for start in range(0, last, run) if start != here]
        self.tags = 1 + len(self._shifts)

    def gather(
        self, output: torch.Tensor, input: torch.Tensor, tag: int | None = None
    ) -> Callable[[], None]:
        """Send `input` to every rank; receive every rank's piece where it belongs in `output`.

        See Note [A host gets a piece once].
        """
        tag = self._lane.next_tag(self.tags) if tag is None else tag
        first = self._exchange(output, input, self._first, 0, tag)
        own = output[self._own[0] : self._own[1]]
        if own.data_ptr() != input.data_ptr():  # not in place
            own.copy_(input)
        return partial(self._pass_on, first, output, tag) if self._shifts else first.fill

    def _exchange(
        self, output: torch.Tensor, sent: torch.Tensor, peers: list[_Peer], shift: int, tag: int
    ) -> GlooExchange:
        """Send a piece to some ranks; receive from each the piece `shift` places after its own."""
        offset, sends, receives = shift * self._piece, [], []
        for peer, start, stop in peers:
            if sent.numel():
                sends.append((peer, sent))
            if start < stop:
                receives.append((peer, stop - start, output[start + offset : stop + offset]))
        receives.reverse()  # who comes next in rank order is sent to first and received from last
        return GlooExchange(self._lane, sends, receives, output.dtype, tag)

    def _pass_on(self, first: GlooExchange, output: torch.Tensor, tag: int) -> None:
        """Complete the first exchange, and pass on within this run what came from others."""
        first.fill()
        # All rounds are posted before any is waited for: they move different pieces.
        rounds = []
        for step, shift in enumerate(self._shifts, 1):
            start, stop = bounds_of(self._rank + shift, self._piece, self._total)
            came = output[start:stop]
            rounds.append(self._exchange(output, came, self._near, shift, tag + step))
        for each in rounds:
            each.fill()

    def collect(
        self, input: torch.Tensor, scratch: torch.Tensor | None = None, tag: int | None = None
    ) -> GlooExchange:
        """Send every rank its piece of `input`, and bring every rank's piece for this one here."""
        start, stop = self._own
        numel, sends = stop - start, []
        receives: list[tuple[int, int, torch.Tensor | None]] = []
        for peer, first, last in self._ahead:
            if first < last:
                sends.append((peer, input[first:last]))
        # Received from the other side round, so that each message meets a receive soon.
        for row, (peer, _, _) in enumerate(self._behind if numel else ()):
            target = None if scratch is None else scratch[row * numel : (row + 1) * numel]
            receives.append((peer, numel, target))
        own, tag = (self._rank, input[start:stop]), self._lane.next_tag() if tag is None else tag
        return GlooExchange(self._lane, sends, receives, input.dtype, tag, unit=self._unit, own=own)
