"""Rows that travel between ranks while the caller computes, forward and backward.

The regions of `lamina.collectives` finish before they return. Here sending and receiving are two
nodes of the graph: what the caller computes between them runs while rows travel, and since
backward visits nodes in the reverse order, its backward runs while gradients travel back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import all_to_all_tokens, gather_from, reduce_scatter_to
from lamina.collectives.engine import Pending, start_all_to_all

__all__ = ["RowExchange", "gather_rows", "reduce_rows"]


class RowExchange:
    """One all-to-all of rows, in flight from construction until `wait`.

    Args:
        rows: `[sum(sends), hidden]`.
        group: the ranks.
        sends: rows for each rank.
        receives: rows from each rank.
    """

    def __init__(
        self, rows: Tensor, group: ProcessGroup, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        self.group = group
        self.sends = sends
        self.receives = receives
        self.pending: Pending | None = None
        self._ticket: Tensor | None = _Send.apply(rows, self)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Rows received: `[sum(receives), hidden]`, in the order of the sending ranks."""
        # The ticket's node holds this exchange: let go of it, or the two keep each other alive.
        ticket, self._ticket = self._ticket, None
        rows: Tensor = _Receive.apply(ticket, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, rows: Tensor, *, back: bool) -> None:
        """Send rows, or gradients back."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.pending = start_all_to_all(
            rows, self.group, output_splits=receives, input_splits=sends
        )

    def finish(self) -> Tensor:
        """Wait for what was started last."""
        if self.pending is None:
            raise RuntimeError("rows were waited for twice: wait() ends a RowExchange")
        pending, self.pending = self.pending, None
        return pending.wait()


class _Send(torch.autograd.Function):
    """Gives a ticket without elements, which ties the two nodes together."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows, back=False)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grad.contiguous(), back=True)
        return grad.new_empty(0), None


def gather_rows(x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Rows of all ranks, in rank order; gradients are summed over the ranks.

    Args:
        x: `[rows, ...]`, as many as `sizes` says of this rank.
        group: the ranks.
        sizes: rows of each rank.
    """
    if len(set(sizes)) == 1:
        return gather_from(x, group, grad="reduce_scatter")
    copies = x.repeat(len(sizes), *(1 for _ in x.shape[1:]))
    mine = [x.shape[0]] * len(sizes)
    return all_to_all_tokens(copies, group, input_splits=mine, output_splits=sizes)


def reduce_rows(x: Tensor, group: ProcessGroup, sizes: Sequence[int], rank: int) -> Tensor:
    """Sum over ranks; each keeps its rows. The inverse of `gather_rows` and its dual.

    Args:
        x: `[sum(sizes), ...]`.
        group: the ranks.
        sizes: rows of each rank.
        rank: this rank's place.
    """
    if len(set(sizes)) == 1:
        return reduce_scatter_to(x, group)
    mine = [sizes[rank]] * len(sizes)
    parts = all_to_all_tokens(x, group, input_splits=sizes, output_splits=mine)
    return parts.view(len(sizes), sizes[rank], *x.shape[1:]).sum(0)
