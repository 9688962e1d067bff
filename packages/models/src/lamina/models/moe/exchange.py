"""An all-to-all of rows that runs while the caller computes, in forward and in backward.

The autograd regions of `lamina.collectives` are complete when they return. Here sending and
receiving are two nodes of the autograd graph. What the caller computes between them runs during the
exchange. Backward visits nodes in reverse order, so the backward of that computation runs during
the exchange of the gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import all_to_all_tokens, gather_from, reduce_scatter_to
from lamina.collectives.engine import Pending, start_all_to_all
from lamina.mesh.engine import GroupRef
from lamina.models.base.applied import applied


class RowExchange:
    """An all-to-all of rows that starts with the object's construction and ends with `wait`.

    `sends` and `receives` are the rows for and from each rank of the group.
    """

    def __init__(
        self, rows: Tensor, group: ProcessGroup, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        self._ref = GroupRef(group)
        self.sends = sends
        self.receives = receives
        self.pending: Pending[Tensor] | None = None
        self._ticket: Tensor | None = applied(_Send, rows, self)

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self._ref.group

    def wait(self) -> Tensor:
        """Return the received rows `[sum(receives), hidden]`, in the order of the sending ranks."""
        # The ticket's node refers to this exchange. Dropping the ticket avoids a reference cycle.
        ticket, self._ticket = self._ticket, None
        return applied(_Receive, ticket, self)

    def start(self, rows: Tensor, *, back: bool) -> None:
        """Start sending rows, or gradients in the opposite direction."""
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.pending = start_all_to_all(
            rows, self.group, output_splits=receives, input_splits=sends
        )

    def finish(self) -> Tensor:
        """Wait for the exchange that was started last."""
        if self.pending is None:
            raise RuntimeError("rows were waited for twice: wait() ends a RowExchange")
        pending, self.pending = self.pending, None
        return pending.wait()


class _Send(torch.autograd.Function):
    # Note [Two nodes of one exchange]
    # Autograd must visit `_Receive` before `_Send` in backward, although no data flows between
    # them. `_Send` returns a ticket, a tensor without elements, that `_Receive` takes as its input,
    # and the gradient of the ticket is an empty tensor as well.

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
    """Gather the rows `[rows, ...]` of all ranks, in rank order; gradients are summed over ranks.

    `sizes` are the rows of each rank.
    """
    if len(set(sizes)) == 1:
        return gather_from(x, group, grad="reduce_scatter")
    copies = x.repeat(len(sizes), *(1 for _ in x.shape[1:]))
    mine = [x.shape[0]] * len(sizes)
    return all_to_all_tokens(copies, group, input_splits=mine, output_splits=sizes)


def reduce_rows(x: Tensor, group: ProcessGroup, sizes: Sequence[int], rank: int) -> Tensor:
    """Sum `[sum(sizes), ...]` over ranks, and keep this rank's rows: `gather_rows` transposed."""
    if len(set(sizes)) == 1:
        return reduce_scatter_to(x, group)
    mine = [sizes[rank]] * len(sizes)
    parts = all_to_all_tokens(x, group, input_splits=sizes, output_splits=mine)
    return parts.view(len(sizes), sizes[rank], *x.shape[1:]).sum(0)
