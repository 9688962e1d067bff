"""Sending copies of tokens to their experts, and the results back.

Every forward makes a `Dispatch`, whose construction starts to send the rows. `Dispatch.arrive`
returns the rows that this rank's experts have received, sorted by expert. `Dispatch.give_back`
starts to send the results back, and `Dispatch.combine` adds them up per token. The caller may
compute something else before `arrive` and before `combine`, while rows are sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import copy_to, reduce_from
from lamina.collectives.engine import (
    all_reduce_small,
    host_device,
    start_all_gather,
    start_all_to_all,
)
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.configs.moe import Dispatcher
from lamina.models.base.mesh_axes import require_divisible
from lamina.models.compat import one_graph_break
from lamina.models.invariance.products import fold
from lamina.models.moe.exchange import RowExchange, gather_rows, reduce_rows
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.routing import (
    Routing,
    RowOrder,
    copies_to_rows,
    rows_by_expert,
    rows_to_capacity,
    rows_to_tokens,
)


@dataclass(frozen=True)
class ExpertRows:
    """The rows that the experts of this rank receive.

    Attributes:
        rows: `[rows, hidden]`, those of the first expert first.
        counts: int64 `[experts]`: the number of rows of each, on the rows' device.
        on_host: the same numbers on the host, if the host knows them anyway.
        tokens: int64 `[rows]`: the number of each row's token in the batch, if the dispatcher was
            given the numbers.
    """

    rows: Tensor
    counts: Tensor
    on_host: tuple[int, ...] | None = None
    tokens: Tensor | None = None


class Dispatch(ABC):
    """The transport of one forward, to the experts and back."""

    arrived: ExpertRows
    results: Tensor

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def arrive(self) -> ExpertRows:
        """Wait for the rows that this rank's experts get."""
        return self.arrived

    def give_back(self, rows: Tensor) -> None:
        """Send results back to the ranks of their tokens; in the order of the rows that arrived."""
        self.results = rows

    @abstractmethod
    def combine(self) -> Tensor:
        """Wait for the results and add up those of each token: `[tokens, hidden]`."""


class TokenDispatcher:
    """Makes the `Dispatch` for a mesh and a kind of transport.

    Args:
        num_experts: over all ranks.
        mesh: what the mesh says of experts.
        kind: `all_to_all` or `all_gather`; see `MoEConfig`.

    Raises:
        ValueError: if the experts are not divisible by the ranks of `ep`.
    """

    def __init__(self, num_experts: int, mesh: ExpertAxes, kind: Dispatcher = "all_to_all") -> None:
        self.num_experts = num_experts
        self.axes = mesh
        self.kind = kind
        require_divisible("num_experts", num_experts, mesh.ep)

    def dispatch(
        self,
        x: Tensor,
        routing: Routing,
        capacities: dict[tuple[int, ...], int] | None = None,
        numbers: Tensor | None = None,
    ) -> Dispatch:
        """Start to send tokens to their experts.

        Args:
            x: `[tokens, hidden]`: any number of tokens of this rank.
            routing: the experts of each token.
            capacities: see `RoutingContext`; by default the ranks exchange their capacities if
                the routing has one.
            numbers: int64 `[tokens]`, of the tokens in the batch. With them sums have one order
                for every layout (`invariant=True`), and `x` and the results are in float32.
        """
        axes = self.axes
        if axes.replicated and axes.tp is not None:
            if numbers is not None:
                return _FixedReplicated(x, routing, self.num_experts, numbers, axes.tp)
            return _Replicated(x, routing, self.num_experts, axes.tp)
        if axes.dispatch is None or axes.dispatch.group is None:
            return _Local(x, routing, self.num_experts, numbers)
        axis = axes.dispatch
        pieces = 1 if axes.expert_tp is None else axes.expert_tp.size
        homes = axis.size // pieces
        local_experts = self.num_experts // homes
        way = _Way(axis, pieces, homes, local_experts, axis.rank // pieces * local_experts)
        if self.kind == "all_gather":
            return _AllGather(x, routing, way)
        if routing.capacity is not None:
            known = {} if capacities is None else capacities
            if axis.ranks not in known:
                known[axis.ranks] = _largest(routing.capacity, way.group, x.device)
            return _to_capacity(x, routing, way, known[axis.ranks])
        return _by_counts(x, routing, way, numbers)


@one_graph_break
def _largest(capacity: int, group: ProcessGroup, device: torch.device) -> int:
    """The largest capacity of all ranks, which all of them send, so that messages have one size.

    A rank with fewer tokens has a smaller capacity. The exchange is between hosts if the group
    supports that, so that no host waits for its device.
    """
    largest = torch.full((1,), capacity, device=host_device([group], device))
    all_reduce_small([largest], group, op="max")
    return int(largest)


@dataclass(frozen=True)
class _Way:
    """The ranks of the experts; `axis` is (ep, expert_tp), with expert_tp innermost.

    `pieces` is the size of expert_tp and `homes` that of ep. A rank has `local_experts`, from its
    `first` on.
    """

    axis: MeshAxis
    pieces: int
    homes: int
    local_experts: int
    first: int

    @property
    def group(self) -> ProcessGroup:
        """The group that tokens travel over, which is not that of sums and gathers."""
        group = self.axis.sibling("tokens")
        if group is None:
            raise RuntimeError(f"axis {self.axis.name} of one rank has no process group")
        return group


class _Local(Dispatch):
    """All experts are on this rank."""

    def __init__(
        self, x: Tensor, routing: Routing, num_experts: int, numbers: Tensor | None = None
    ) -> None:
        super().__init__(routing)
        self.fixed = numbers is not None
        counts, on_host = routing.counts, None
        if routing.capacity is not None:
            self.order = rows_to_capacity(routing.experts, num_experts, routing.capacity)
            counts = torch.full_like(counts, routing.capacity)
            on_host = (routing.capacity,) * num_experts
        else:
            self.order = rows_by_expert(routing.experts)
            if routing.holes:
                on_host = tuple(counts.tolist())
                self.order = self.order.first(sum(on_host))
        rows = copies_to_rows(x, self.order)
        self.arrived = ExpertRows(rows, counts, on_host, _of_rows(numbers, self.order))

    def combine(self) -> Tensor:
        """Weigh and add up each token's results; nothing travels."""
        return rows_to_tokens(self.results, self.routing.weights, self.order, fixed=self.fixed)


class _Replicated(_Local):
    """Every tensor-parallel rank has all tokens and a piece of every expert."""

    def __init__(self, x: Tensor, routing: Routing, num_experts: int, tp: MeshAxis) -> None:
        self.tp = tp
        # Each rank's results are partial, and so are the gradients of its inputs.
        weights = copy_to(routing.weights, tp.group)
        super().__init__(copy_to(x, tp.group), replace(routing, weights=weights), num_experts)

    def combine(self) -> Tensor:
        """Sum the tensor-parallel ranks' pieces of each token's results."""
        return reduce_from(super().combine(), self.tp.group)


class _FixedReplicated(_Local):
    """As `_Replicated`, but sums over ranks are those of each row.

    A row's pieces are added before the rows of a token, as they are where rows are sent.
    """

    def __init__(
        self, x: Tensor, routing: Routing, num_experts: int, numbers: Tensor, tp: MeshAxis
    ) -> None:
        super().__init__(x, routing, num_experts, numbers)
        self.tp = tp
        self.arrived = replace(self.arrived, rows=copy_to(self.arrived.rows, tp.group))

    def give_back(self, rows: Tensor) -> None:
        """Sum the tensor-parallel ranks' pieces of each row."""
        super().give_back(reduce_from(rows, self.tp.group))


class _Sent(Dispatch):
    """Rows are sent to the ranks of their experts by one all-to-all, and back by another.

    `sends` rows go to each rank of ep, `chunks[i][j]` come from rank i for this rank's expert j,
    and `counts`, a tensor, come for each of its experts.
    """

    def __init__(
        self,
        x: Tensor,
        routing: Routing,
        way: _Way,
        order: RowOrder,
        sends: list[int],
        chunks: list[list[int]],
        counts: Tensor,
        numbers: Tensor | None = None,
    ) -> None:
        super().__init__(routing)
        self.way, self.order, self.sends = way, order, sends
        self.chunks, self.counts = chunks, counts
        self.fixed, self.tokens = numbers is not None, None
        splits = [count for count in sends for _ in range(way.pieces)]
        receives = [sum(chunk) for chunk in chunks]
        rows = copies_to_rows(x, order)
        own = _of_rows(numbers, order)
        if own is None:
            repeated = repeat_runs(rows, sends, way.pieces)
        else:
            repeated = applied(_Repeat, rows, tuple(sends), way.pieces)
            column = repeat_runs(own.unsqueeze(1), sends, way.pieces)
            arrived = start_all_to_all(
                column, way.group, output_splits=receives, input_splits=splits
            ).wait()
            self.tokens = regroup(arrived, chunks).squeeze(1)
        self.going = RowExchange(repeated, way.group, splits, receives)

    def arrive(self) -> ExpertRows:
        """Wait for the first all-to-all, and order its rows by expert."""
        rows = regroup(self.going.wait(), self.chunks)
        on_host = tuple(map(sum, zip(*self.chunks, strict=True)))
        return ExpertRows(rows, self.counts, on_host, self.tokens)

    def give_back(self, rows: Tensor) -> None:
        """Start the second all-to-all, with rows ordered by rank once more."""
        by_expert = [list(column) for column in zip(*self.chunks, strict=True)]
        self.coming = RowExchange(
            regroup(rows, by_expert), self.way.group, self.going.receives, self.going.sends
        )

    def combine(self) -> Tensor:
        """Wait for the second all-to-all; add up experts' pieces, then each token's results."""
        pieces = self.coming.wait()
        if self.fixed:
            rows = applied(_SumPieces, pieces, tuple(self.sends), self.way.pieces)
        else:
            rows = sum_runs(pieces, self.sends, self.way.pieces)
        return rows_to_tokens(rows, self.routing.weights, self.order, fixed=self.fixed)


class _Repeat(torch.autograd.Function):
    """`repeat_runs`, whose backward adds the pieces' gradients in the tree."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: tuple[int, ...], times: int) -> Tensor:
        ctx.runs, ctx.times = runs, times
        return repeat_runs(rows, runs, times) if times > 1 else rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_in_tree(grad, ctx.runs, ctx.times), None, None


class _SumPieces(torch.autograd.Function):
    """`sum_runs` in the tree."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: tuple[int, ...], times: int) -> Tensor:
        ctx.runs, ctx.times = runs, times
        return _sum_in_tree(rows, runs, times)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return repeat_runs(grad, ctx.runs, ctx.times), None, None


def _sum_in_tree(rows: Tensor, runs: Sequence[int], times: int) -> Tensor:
    """Sum repeated runs in the tree of law 2."""
    if times == 1:
        return rows.view_as(rows)
    parts = torch.split(rows, [size * times for size in runs])
    return torch.cat([fold(torch.unflatten(part, 0, (times, -1))) for part in parts])


def _of_rows(numbers: Tensor | None, order: RowOrder) -> Tensor | None:
    """The number of the token in each row; no row is empty."""
    if numbers is None:
        return None
    return numbers[order.copy_of_row.div(order.row_of_copy.shape[1], rounding_mode="floor")]


def _by_counts(x: Tensor, routing: Routing, way: _Way, numbers: Tensor | None) -> _Sent:
    """Send each copy to its expert, after ranks have exchanged how many rows they send."""
    counts = routing.counts.view(way.homes, 1, way.local_experts)
    counts = counts.expand(-1, way.pieces, -1).reshape(way.axis.size, way.local_experts)
    asked = start_all_to_all(counts, way.group)
    order = rows_by_expert(routing.experts)  # while the counts travel
    received = asked.wait()
    # This is the only time in a layer that the host waits for the device.
    known = torch.cat((routing.counts, received.flatten())).tolist()
    runs = [
        known[start : start + way.local_experts]
        for start in range(0, len(known), way.local_experts)
    ]
    sends = [sum(run) for run in runs[: way.homes]]
    order = order.first(sum(sends)) if routing.holes else order
    return _Sent(x, routing, way, order, sends, runs[way.homes :], received.sum(0), numbers)


def _to_capacity(x: Tensor, routing: Routing, way: _Way, capacity: int) -> _Sent:
    """Send every expert the same number of rows, so that ranks exchange no counts."""
    order = rows_to_capacity(routing.experts, way.homes * way.local_experts, capacity)
    counts = routing.counts.new_full((way.local_experts,), way.axis.size * capacity)
    sends = [way.local_experts * capacity] * way.homes
    chunks = [[capacity] * way.local_experts] * way.axis.size
    return _Sent(x, routing, way, order, sends, chunks, counts)


class _AllGather(Dispatch):
    """All ranks gather all tokens, use those of their experts, and the results are summed."""

    def __init__(self, x: Tensor, routing: Routing, way: _Way) -> None:
        super().__init__(routing)
        self.way = way
        # torch.tensor would copy from the host, which waits on CUDA.
        tokens = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
        mine = torch.cat((tokens, routing.counts)).unsqueeze(0)
        gathered_counts = start_all_gather(mine, way.group, async_op=False).wait()
        here = slice(1 + way.first, 1 + way.first + way.local_experts)
        # This is the only time in a layer that the host waits for the device.
        every = gathered_counts.tolist()
        self.sizes = [row[0] for row in every]
        on_host = tuple(map(sum, zip(*(row[here] for row in every), strict=True)))
        experts = gather_rows(routing.experts, way.group, self.sizes) - way.first
        self.weights = gather_rows(routing.weights, way.group, self.sizes)
        elsewhere = (experts < 0) | (experts >= way.local_experts)
        order = rows_by_expert(experts.masked_fill(elsewhere, way.local_experts))
        self.order = order.first(sum(on_host))
        rows = copies_to_rows(gather_rows(x, way.group, self.sizes), self.order)
        self.arrived = ExpertRows(rows, gathered_counts[:, here].sum(0), on_host)

    def combine(self) -> Tensor:
        """Sum what all ranks' experts have made of this rank's tokens."""
        partial = rows_to_tokens(self.results, self.weights, self.order)
        way = self.way
        return reduce_rows(partial, way.group, self.sizes, way.axis.rank)


def regroup(rows: Tensor, chunks: Sequence[Sequence[int]]) -> Tensor:
    """Reorder chunks of rows, of the sizes `chunks[i][j]`, from the order (i, j) to (j, i)."""
    if len(chunks) == 1 or len(chunks[0]) == 1:
        return rows
    sizes = {size for row in chunks for size in row}
    if len(sizes) == 1:
        cut = rows.view(len(chunks), len(chunks[0]), sizes.pop(), rows.shape[-1])
        return cut.transpose(0, 1).flatten(0, 2)
    parts = torch.split(rows, [size for row in chunks for size in row])
    width = len(chunks[0])
    return torch.cat([parts[i * width + j] for j in range(width) for i in range(len(chunks))])


def repeat_runs(rows: Tensor, runs: Sequence[int], times: int) -> Tensor:
    """Repeat each run of rows."""
    if times == 1:
        return rows
    return torch.cat([run for run in torch.split(rows, list(runs)) for _ in range(times)])


def sum_runs(rows: Tensor, runs: Sequence[int], times: int) -> Tensor:
    """Sum the repeated runs that `repeat_runs` makes."""
    if times == 1:
        return rows
    parts = torch.split(rows, [size * times for size in runs])
    summed = [p.view(times, size, *p.shape[1:]).sum(0) for p, size in zip(parts, runs, strict=True)]
    return torch.cat(summed)
