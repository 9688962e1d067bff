"""Reductions: what all of them check and how they start, and those with one order of summation.

`Reduction` knows all that ordered and native reductions have in common, and a subclass says how the
ranks' inputs become a sum. `OrderedReduction` sends chunk r of every rank's input to rank r in the
wire dtype; rank r sums the chunks it then holds in fp32, in a fixed pairwise tree over the ranks.
So the sum's bits depend neither on the transport nor on the size of the buffer, and a bf16 wire
costs rounding once per input, not at every hop.
"""

import ctypes
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat
from typing import ClassVar, Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import (
    WIRE_DTYPES,
    require_agreement,
    require_disjoint,
    require_flat,
    require_same_device,
)
from lamina.collectives.call.collective import (
    Collective,
    ReduceHandle,
    Statistics,
    issue,
    launch,
)
from lamina.collectives.reduction.codec import Cast, GradientCodec, Wire
from lamina.collectives.reduction.summation import Epilogue, sum_chunks
from lamina.collectives.transport.gloo_exchange import bounds_of
from lamina.collectives.transport.groups import cuts_as_gloo, served_by_gloo, where
from lamina.collectives.transport.lanes import SumBuffers, lane_of
from lamina.collectives.transport.transport import Chunks, Completion, route_for
from lamina.mesh.engine import host_groups, host_runs

_SLICES_AT_ONCE = 3
_PART_OF_A_GPU = 32 * _SLICES_AT_ONCE
_OFF_GPUS = 32 << 20  # bytes, where a backend without a GPU is simulated


def message_bytes_on(device: torch.device) -> int:
    """Bytes of a slice by default: three take a 32nd of a GPU. See Note [Sums in slices].

    Meta tensors are planned without slices, because nobody here knows the GPU's memory.
    """
    if device.type == "meta":
        return sys.maxsize
    if device.type != "cuda":
        return _OFF_GPUS
    return int(torch.cuda.get_device_properties(device).total_memory) // _PART_OF_A_GPU


SumOp: TypeAlias = Literal["sum", "avg"]
"""What a reduction makes of the terms; who adds them is the class of the reduction."""


@dataclass
class Sum:
    """One sum under way.

    Attributes:
        output: takes the sum.
        input: what this rank adds, as it was given.
        epilogue: what becomes of the sum before it is stored.
        scratch: takes the terms of other ranks, where the route needs memory for them.
    """

    output: torch.Tensor
    input: torch.Tensor
    epilogue: Epilogue
    scratch: torch.Tensor | None


class Reduction(Collective):
    """A sum over ranks, prepared once and started often.

    Args:
        output: a buffer of the kind that takes the sum: flat, float32 or the dtype of `input`.
        input: a buffer of the kind that is summed: flat, in float32, bfloat16, float16 or float64.
        group: the ranks, or None for a group of one.
        scatter: keep this rank's piece of the sum, an N-th of `input`; else the whole.
        op: "sum", or "avg" to divide by the number of ranks.
        codec: how gradients become what travels; a cast to the dtype of `input` (none) if None.
        message_bytes: of a slice, see Note [Sums in slices]; None for `message_bytes_on`.

    Raises:
        ValueError: op, codec, dtypes, sizes, strides or devices that don't fit.
    """

    suffix: ClassVar[str]
    """Of the public functions' names."""
    _wire: Wire
    """How terms travel, and what they are summed in."""
    piecewise: ClassVar[bool]
    """Whether the statistics of an all-reduce are of this rank's piece, not of the whole."""
    overlap_hint = (
        "only an output of the same dtype that is exactly this rank's own piece of the input may, "
        "and only without accumulate"
    )

    def __init__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        group: ProcessGroup | None,
        *,
        scatter: bool,
        op: SumOp = "sum",
        codec: GradientCodec | None = None,
        message_bytes: int | None = None,
    ) -> None:
        name = f"{'reduce_scatter' if scatter else 'all_reduce'}_{self.suffix}"
        if op not in ("sum", "avg"):
            raise ValueError(f"{name} {where(group)}: op must be 'sum' or 'avg', not {op!r}")
        super().__init__(name, output, input, group)
        self.scatter, self.sum_op = scatter, op
        self._message_bytes = message_bytes or message_bytes_on(self.device)
        if input.dtype not in WIRE_DTYPES:
            raise ValueError(
                f"{name} {where(group)}: `input` is {input.dtype}; the wire dtype must be one of "
                f"{', '.join(map(str, WIRE_DTYPES))}"
            )
        if output.dtype not in (torch.float32, input.dtype):
            raise ValueError(
                f"{name} {where(group)}: `output` is {output.dtype}; it must be torch.float32 or "
                f"the wire dtype {input.dtype}"
            )
        self._require_sizes(output.numel(), input.numel())
        if output.dtype == input.dtype:
            self._in_place = -self.rank * output.nbytes if scatter else 0
        self._numel = input.numel()
        self._piece = output.numel() if scatter else -(-self._numel // self.size)
        self._gathered = 0  # sums that this rank sends to others, in the dtype of the output
        self._prepare(codec)

    @abstractmethod
    def _prepare(self, codec: GradientCodec | None) -> None:
        """Find out what is the same for all starts: the wire, the bytes, the way."""

    def _require_sizes(self, output: int, input: int) -> None:
        if self.scatter and input != self.size * output:
            raise ValueError(
                f"{self.op} {where(self.group)}: `input` has {input} elements, which is not the "
                f"{self.size} x {output} that {self.size} ranks with an output of {output} need; "
                f"pad the buffer to a multiple of the number of ranks"
            )
        if not self.scatter and input != output:
            raise ValueError(
                f"{self.op} {where(self.group)}: `output` has {output} elements and `input` "
                f"{input}; they must be equal"
            )

    @abstractmethod
    def _ready(self, task: Sum) -> Callable[[], Completion]:
        """What begins a sum. The handle keeps it, and so the memory that it needs until the end.

        The memory is found now, on the caller's stream: it goes back there.
        """

    def start(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        scale: float | None = None,
        accumulate: bool = False,
        scratch: torch.Tensor | None = None,
        statistics: bool = True,
        async_op: bool = True,
        check: bool = False,
    ) -> ReduceHandle:
        """Sum `input` over the ranks into `output`; arguments as in `reduce_scatter_fp32`.

        ValueError: buffers of another kind than was prepared for, or that share memory.
        """
        if check:
            (_, whole), (wire, terms) = self._kinds
            kind = {"wire": wire, "output": whole, "input": terms}
            require_agreement(self.op, self.group, self.device, **kind)
        output, input = output.detach(), input.detach()
        self._require_buffers(output, input, in_place=not accumulate)
        factor = None if scale is None and self.sum_op == "sum" else self._factor(scale)
        kept = Statistics(self.device) if statistics else None
        begin = self._ready(Sum(output, input, Epilogue(factor, accumulate, kept), scratch))
        # What is added to `output` is gathered as it was summed, and else as it is stored.
        width = self._wire.sum_dtype.itemsize if accumulate else output.itemsize
        sent = self._sent + width * self._gathered
        far = partial(self._between_hosts, width)
        call = issue(self.op, self._lane, self._wire_dtype, sent, between=far, async_op=async_op)
        handle = ReduceHandle(call, (output, input, begin), kept)
        return launch(handle, self._lane, self.device, begin, only_posts=self._only_posts)

    def _between_hosts(self, width: int, near: Sequence[int]) -> int:
        """Bytes for other ranks than `near`, those of this host; sums take `width` bytes each."""
        return self._leaving(near)

    def _factor(self, scale: float | None) -> float | None:
        """The one factor of the sum, or None where it is one."""
        factor = 1.0 if scale is None else float(scale)
        if self.sum_op == "avg":
            factor /= self.size
        if self._kinds[1][0] != torch.float64:
            factor = ctypes.c_float(factor).value  # to the nearest, as C converts
        return None if factor == 1.0 else factor


class _Exchange:
    """One exchange that an ordered sum is made of: the ranks of a group add up a run of pieces.

    The run has `numel` elements, of which each rank's piece has `piece` (whole blocks, but for a
    run of one piece per rank); the last ranks' may be shorter, or empty. `items` are the same on
    the wire.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        wire: Wire,
        piece: int,
        numel: int,
        items: int,
        device: torch.device,
    ) -> None:
        lane = lane_of(group)
        self.wire, self.ref, self.size, rank = wire, lane.ref, lane.size, lane.rank
        self._piece, self._whole, self._items = piece, numel, items
        self.own = slice(*bounds_of(rank, piece, numel))
        self.numel = self.own.stop - self.own.start
        readable = wire.plain and wire.dtype != torch.float64
        self.route = route_for(group, wire.items(piece), items, device, wire.unit, readable)
        whole = route_for(group, piece, numel, device)
        self.gather, self._run = whole.gather, whole.run
        self.sent, _ = self.beyond(range(rank, rank + 1))
        self.gathered = (self.size - 1) * self.numel
        # See Note [Tags are drawn when a collective is called]. Only gloo's messages need them, and
        # tensors without data none: one rank may plan alone, and its tags stay the others'.
        self.next_tag: Callable[[], int | None] = repeat(None).__next__
        if lane.size > 1 and served_by_gloo(group, device):
            self.next_tag = partial(lane.next_tag, whole.tags)
        rows = self.size if self.route.needs_scratch else self.size - 1
        self.scratch = rows * wire.items(self.numel)

    def beyond(self, near: Sequence[int]) -> tuple[int, int]:
        """Bytes of terms for other ranks than `near`, and elements of sums that go to them."""
        items = self._items
        for start, stop in (bounds_of(rank, self._piece, self._whole) for rank in near):
            items -= self.wire.items(stop - start)
        gathered = (self.size - len(near)) * self.numel // self._run
        return items * self.wire.dtype.itemsize, gathered

    def room(self, device: torch.device) -> torch.Tensor | None:
        """Memory for what the other ranks send, where the route does not find it."""
        needed = self.route.needs_scratch
        return torch.empty(self.scratch, dtype=self.wire.dtype, device=device) if needed else None


_Hosts: TypeAlias = tuple[ProcessGroup, ProcessGroup] | None
"""The groups inside and between hosts that a sum goes over; None for one exchange."""


@dataclass(frozen=True)
class _Slice:
    """A run of each rank's piece, and the exchanges that sum it."""

    bounds: slice
    exchanges: list[_Exchange]


@dataclass
class _OrderedSum(Sum):
    """An ordered sum under way.

    Attributes:
        terms: what this rank adds, in the order in which pieces are sent.
        sent: what is sent of them: themselves, their codes, or messages that slices are packed in.
        gathered: what an all-reduce gathers sums into.
        rooms: for each exchange after the first the sums that it sends, and memory for what it
            brings.
        tags: of the exchanges after the first. See Note [Tags are drawn when a collective is
            called].
    """

    terms: torch.Tensor
    sent: torch.Tensor
    gathered: torch.Tensor
    rooms: list[tuple[torch.Tensor, torch.Tensor | None]]
    tags: Iterator[int | None] = field(default_factory=lambda: repeat(None))


def _slice_width(ranks: int, wire: torch.dtype, message_bytes: int) -> int:
    """Elements of each piece in a message of so many bytes: the largest multiple of 128, or 128."""
    return max(message_bytes // (ranks * wire.itemsize * 128), 1) * 128


def bytes_received(
    group: ProcessGroup | None,
    numel: int,
    wire: torch.dtype,
    device: torch.device,
    message_bytes: int | None = None,
    *,
    scatter: bool = True,
    codec: GradientCodec | None = None,
) -> int:
    """Bytes that an ordered reduction of `numel` elements holds besides its buffers, at most.

    Codes and copies that it sends from count as well, so do partial sums, and on a GPU the numbers
    that codes stand for; what a codec needs while it encodes does not. Ranks that read each other's
    memory hold the window that all sums share. `wire` is the dtype of the input, of equally many
    elements for each rank; `message_bytes` and `scatter` are those of `Reduction`.
    """
    size, how = lane_of(group).size, Wire(codec or Cast(wire))
    if group is None or size == 1:
        return 0
    coded = not how.plain or how.dtype != wire
    window, hosts = lane_of(group).windows.get(device), host_groups(group)
    # Ranks that read each other's memory receive nothing: all their sums share one window.
    if window is not None and not coded:
        return int(window.nbytes)
    # Pieces that end within a block of the codec cannot be summed in two exchanges.
    hosts = None if numel // size % how.block else hosts
    # gloo sends uneven pieces straight from the buffer; a backend needs whole ones, packed.
    even = not served_by_gloo(group, device)
    width = _slice_width(size, wire, message_bytes or message_bytes_on(device))
    terms, wide = how.items(numel // size) * size * how.dtype.itemsize, how.sum_dtype.itemsize
    # Codes lie beside the gradients; on a GPU so do the numbers that arriving codes stand for.
    total = terms + even * numel * wide if coded else 0
    if even and scatter and not coded and _SLICES_AT_ONCE * width < numel // size:
        # In slices: one message is what arrives (counted below), the others are packed or summed.
        numel, terms = size * width, size * width * wire.itemsize
        total = (_SLICES_AT_ONCE - 1) * terms
    elif hosts is not None and scatter:
        # Pieces are put in the order of hosts first, in a copy of the gradients.
        total += numel * wire.itemsize
    inside, between = (size, 1) if hosts is None else (hosts[0].size(), hosts[1].size())
    # What arrives of the first exchange: gloo leaves out this rank's own terms.
    total += terms if even else terms - terms // inside
    if between == 1:
        return total
    # The second exchange: partial sums, what is sent of them (apart, if they are checked), and what
    # arrives.
    sums = how.of_sums()
    sent = between * sums.items(numel // size) * sums.dtype.itemsize
    return total + numel // inside * wide + sent * (2 - sums.plain) - (not even) * (sent // between)


class OrderedReduction(Reduction):
    """Chunks travel to the rank that sums them in fp32, in a fixed pairwise tree over the ranks.

    Note [The tree is also a tree over hosts]
    An aligned run of 2^k ranks is a subtree of the tree of law 2, and the sums of such runs are
    added in the tree of their number. So the ranks of a run on one host exchange terms first, in
    the wire dtype, and then the ranks at one place of all runs exchange partial sums, in the dtype
    of the sum. Nothing is rounded in between, so the bits are those of one exchange over all
    ranks. See docs/decisions/0314-sums-know-hosts.md.

    Note [Sums in slices]
    A backend's all-to-all fills memory for the pieces of all ranks: as much as the gradients take.
    Where three messages of `message_bytes` are less, each rank's piece is cut into slices, and the
    same slice of all pieces is packed into a message. It is summed while the next one flies. Three
    messages serve any number of slices: the memory that was sent from receives the next slice,
    because a communicator runs its all-to-alls in order, and what was summed is packed into next.
    A sum is element by element, so slices do not change its bits. Packing is one pass over memory,
    and each slice is a message, launches and waits. So by default only a unit that takes more than
    a 32nd of its GPU is cut. See docs/decisions/0316-sums-in-slices.md and 0321.
    """

    suffix = "fp32"
    piecewise = True

    def _prepare(self, codec: GradientCodec | None) -> None:
        group, device = self.group, self.device
        wire = self._wire = Wire(codec or Cast(self._wire_dtype))
        self._sends_input = wire.plain and wire.dtype == self._wire_dtype
        self._wire_dtype = wire.dtype
        # A partial sum holds whole pieces, so that no piece may end within a block of the codec.
        hosts = None
        if group is not None and self._piece and not self._piece % wire.block:
            hosts = host_groups(group)
        # Backends know only equal pieces, and so do sums in two exchanges.
        even = self.size > 1 and not cuts_as_gloo(group, device)
        self._padded = self._piece * self.size if even or hosts else self._numel
        full, rest = divmod(self._padded, max(self._piece, 1))
        self._wire_total = full * wire.items(self._piece) + wire.items(rest)
        if hosts is not None and not self._lane.willing:
            for each in hosts:
                lane_of(each).keep_to_messages()
        self._exchanges = self._exchanges_of(self._piece, self._padded, self._wire_total, hosts)
        self._slices = [_Slice(slice(0, self._piece), self._exchanges)]  # of the whole pieces
        exchanged = self.size > 1 and self._exchanges[0].route.needs_scratch
        if even and exchanged and self.scatter and self._sends_input:
            self._slices = self._cut(hosts) or self._slices
        # What is encoded or packed before it is sent takes a stream beside the caller's.
        posts = exchanged and self._exchanges[0].route.only_posts and self._sends_input
        self._only_posts = posts and len(self._slices) == 1
        start = sum(exchange.own.start for exchange in self._exchanges)
        self._own = slice(start, start + self._exchanges[-1].numel)  # of what all ranks gather
        self._sent = sum(exchange.sent for exchange in self._exchanges)
        if not self.scatter:
            self._gathered = sum(exchange.gathered for exchange in self._exchanges)

    def _exchanges_of(self, piece: int, numel: int, items: int, hosts: _Hosts) -> list[_Exchange]:
        """The exchange of terms; over hosts, that inside a host and that of partial sums."""
        wire, device = self._wire, self.device
        if hosts is None:
            return [_Exchange(self.group, wire, piece, numel, items, device)]
        inside, between = hosts
        run, sums = between.size() * piece, wire.of_sums()
        return [
            _Exchange(inside, wire, run, numel, items, device),
            _Exchange(between, sums, piece, run, between.size() * sums.items(piece), device),
        ]

    def _cut(self, hosts: _Hosts) -> list[_Slice]:
        """The pieces in slices: none where those would take as much memory as the pieces."""
        width = _slice_width(self.size, self._wire_dtype, self._message_bytes)
        if _SLICES_AT_ONCE * width >= self._piece:
            return []

        def exchanges(width: int) -> list[_Exchange]:
            """Those of a slice of so many elements of each piece."""
            return self._exchanges_of(width, self.size * width, self.size * width, hosts)

        # All full slices share one set of exchanges. The last one is shorter, and has its own.
        whole, rest = divmod(self._piece, width)
        usual, end = exchanges(width), whole * width
        cut = [_Slice(slice(at, at + width), usual) for at in range(0, end, width)]
        return [*cut, _Slice(slice(end, self._piece), exchanges(rest))] if rest else cut

    def _between_hosts(self, width: int, near: Sequence[int]) -> int:
        total = 0
        for exchange in self._exchanges:
            if exchange.ref is not None:
                sent, gathered = exchange.beyond(host_runs(exchange.ref.group).near)
                total += sent if self.scatter else sent + width * gathered
        return total

    def _ready(self, task: Sum) -> Callable[[], Completion]:
        """Find the memory of a sum: what is sent, what arrives, and what is gathered."""
        output, input, scratch, device = task.output, task.input, task.scratch, self.device
        if scratch is not None:
            self._require_scratch(scratch, output, input)
        wire, exchanges = self._wire, self._slices[0].exchanges  # of the widest slice
        rooms = []
        for before, exchange in pairwise(exchanges):
            sums = torch.empty(before.numel, dtype=exchange.wire.sum_dtype, device=device)
            rooms.append((sums, exchange.room(device)))
        terms, gathered, accumulates = input, output, task.epilogue.accumulate
        if len(self._slices) > 1:
            bounds = self._slices[0].bounds
            numel = _SLICES_AT_ONCE * self.size * (bounds.stop - bounds.start)
            if scratch is None:
                scratch = torch.empty(numel, dtype=wire.dtype, device=device)
            sent, scratch = scratch[:numel].view(_SLICES_AT_ONCE, -1), None
        else:
            if self._padded != self._numel:
                terms = input.new_zeros(self._padded)
                terms[: self._numel].copy_(input)
            elif rooms and self.scatter:
                # A rank of this host gets the pieces of all ranks at its place of their hosts.
                runs = terms.view(exchanges[1].size, exchanges[0].size, self._piece)
                terms = runs.transpose(0, 1).reshape(-1)
            sent = terms
            if not self._sends_input:
                sent = torch.empty(self._wire_total, dtype=wire.dtype, device=device)
            if scratch is None:
                scratch = exchanges[0].room(device)
            gathers = not self.scatter and self.size > 1
            if gathers and (accumulates or self._padded != self._numel):
                # To accumulate, the sums are gathered apart, as ranks may hold different outputs.
                dtype = wire.sum_dtype if accumulates else output.dtype
                gathered = torch.empty(self._padded, dtype=dtype, device=device)
        kind = output, input, task.epilogue, scratch, terms, sent, gathered, rooms
        return partial(self._reduce, _OrderedSum(*kind))

    def _require_scratch(
        self, scratch: torch.Tensor, output: torch.Tensor, input: torch.Tensor
    ) -> None:
        name, group, numel = self.op, self.group, self._exchanges[0].scratch
        require_flat(name, "scratch", scratch, group)
        require_same_device(name, group, input=input, scratch=scratch)
        if scratch.dtype != self._wire.dtype or scratch.numel() < numel:
            raise ValueError(
                f"{name} {where(group)}: `scratch` has {scratch.numel()} elements of "
                f"{scratch.dtype}; it needs at least {numel} of the wire dtype {self._wire.dtype}"
            )
        require_disjoint(name, group, ("scratch", scratch), ("input", input))
        require_disjoint(name, group, ("scratch", scratch), ("output", output))

    def _reduce(self, task: _OrderedSum) -> Completion:
        """Post the first messages; what is left to do is to sum what comes, and to gather."""
        chunks = self._post(task, 0)
        # Gathers take the way back: what is complete between hosts is spread inside them.
        gathers = [] if self.scatter or self.size == 1 else self._exchanges[::-1]
        if len(self._slices) == 1:  # slices are a backend's, which needs no tags
            # See Note [Tags are drawn when a collective is called].
            task.tags = iter([each.next_tag() for each in (*self._exchanges[1:], *gathers)])
        ends: Completion = partial(self._complete, task, chunks)
        for exchange in self._exchanges:
            if exchange.wire.checked:
                ends = exchange.wire.guarded(ends, exchange.ref)
        return ends

    def _post(self, task: _OrderedSum, at: int) -> Chunks:
        """Send one slice of all pieces."""
        part, terms, sent = self._slices[at], task.terms, task.sent
        first, *later = part.exchanges
        if len(self._slices) == 1:
            if sent is not terms and not terms.is_meta:
                self._wire.encode(terms, sent, self._piece)
            return first.route.collect(sent, task.scratch)
        # See Note [Sums in slices]: what the message before was sent from takes what now comes.
        width, hosts = part.bounds.stop - part.bounds.start, later[0].size if later else 1
        message, received = sent[-at % len(sent)], sent[(1 - at) % len(sent)]
        message = message[: self.size * width]
        # A rank of this host gets the slices of all ranks at its place of their hosts.
        runs = terms.view(hosts, -1, self._piece)[..., part.bounds].transpose(0, 1)
        message.view(runs.shape).copy_(runs)
        return first.route.collect(message, received)

    def _complete(self, task: _OrderedSum, chunks: Chunks) -> None:
        """Sum each slice while the next one flies; gather the sums, if all ranks want them."""
        epilogue, gathered = task.epilogue, task.gathered
        if self.scatter or self.size == 1:
            self._sum_slices(task, chunks, task.output, epilogue)
            return
        # What is added to an output is measured as it is stored, by `_store`.
        statistics = None if epilogue.accumulate else epilogue.statistics
        own_epilogue = Epilogue(epilogue.factor, False, statistics)
        self._sum_slices(task, chunks, gathered[self._own], own_epilogue)
        # Each exchange's run of pieces lies in the own piece of the one before.
        runs = [gathered]
        for exchange in self._exchanges:
            runs.append(runs[-1][exchange.own])
        for at in range(len(self._exchanges) - 1, -1, -1):
            self._exchanges[at].gather(runs[at], runs[at + 1], next(task.tags))()
        self._store(gathered, task.output, epilogue)

    def _sum_slices(
        self, task: _OrderedSum, chunks: Chunks, output: torch.Tensor, epilogue: Epilogue
    ) -> None:
        """Bring the sum of every slice to its place in `output`."""
        wanted, several = epilogue.statistics, len(self._slices) > 1
        of_slices: list[Statistics] = []
        for at, part in enumerate(self._slices):
            following = self._post(task, at + 1) if at + 1 < len(self._slices) else None
            # See Note [The tree is also a tree over hosts]: what each exchange but the last
            # brings is summed, and sent on.
            for (done, exchange), (sums, room) in zip(
                pairwise(part.exchanges), task.rooms, strict=True
            ):
                whole = sums[: done.numel]  # a last slice is narrower than its memory
                self._sum(chunks, whole, Epilogue(), done.wire)
                sent = exchange.wire.encoded(whole, self._piece)
                chunks = exchange.route.collect(sent, room, next(task.tags))
            target, slice_epilogue = output, epilogue
            if several:
                target = output[part.bounds]
                if wanted is not None:
                    of_slices.append(Statistics(self.device))
                    slice_epilogue = Epilogue(epilogue.factor, epilogue.accumulate, of_slices[-1])
            self._sum(chunks, target, slice_epilogue, part.exchanges[-1].wire)
            chunks = chunks if following is None else following
        if wanted is not None and several:
            wanted.squared_norm.copy_(torch.stack([each.squared_norm for each in of_slices]).sum())
            wanted.nonfinite.copy_(torch.stack([each.nonfinite for each in of_slices]).any())

    def _sum(self, chunks: Chunks, output: torch.Tensor, epilogue: Epilogue, wire: Wire) -> None:
        """Wait for all chunks and sum them; afterwards all ranks may reuse what they sent."""
        kept = [] if self.size == 1 else self._lane.scratch_pool.sum_buffers
        try:
            buffers = kept.pop()
        except IndexError:  # as many sums run at once as never before
            buffers = SumBuffers()
        sum_chunks(chunks.chunks(), output, epilogue, wire, buffers)
        kept.append(buffers)
        chunks.close()

    def _store(self, target: torch.Tensor, output: torch.Tensor, epilogue: Epilogue) -> None:
        """Bring gathered sums to the output, where they were gathered apart."""
        if epilogue.accumulate:
            start, stop = self._own.start, self._own.stop
            cast = Wire(Cast(self._wire.sum_dtype))
            for begin, end in ((0, start), (start, stop), (stop, self._numel)):
                place = slice(begin, min(end, self._numel))
                kept = epilogue.statistics if begin == start else None
                sum_chunks([target[place]], output[place], Epilogue(None, True, kept), cast)
        elif target is not output:  # padded
            output.copy_(target[: self._numel])
