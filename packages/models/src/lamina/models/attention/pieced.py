"""Attention put together from blocks of queries and keys, without a mask.

The blocks are those of `lamina.models.attention.partial_softmax`. Keys and values may all be here,
or they may pass round a ring of ranks, whose gradients then follow them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import send_recv
from lamina.collectives.engine import ring
from lamina.models.attention.kernels import refuse_dropout
from lamina.models.attention.partial_softmax import Block, merge
from lamina.models.base.applied import applied

__all__ = ["InPieces", "Piece", "attend_in_pieces"]


@dataclass(frozen=True)
class Piece:
    """A block of queries and a block of keys that they attend to."""

    queries: slice
    keys: slice
    block: Block

    def add_values(self, out: Tensor, logs: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Merge this piece into the result `out` and the `logs` of sums, both heads first.

        Logs are of sums of exponentials. Of the inputs the queries are heads first, keys and values
        not.
        """
        rows, columns = self.queries, self.keys
        query, keys, values = inputs[0], *(x.transpose(1, 2) for x in inputs[1:])
        more = self.block.forward(query[:, :, rows], keys[:, :, columns], values[:, :, columns])
        merge(out[:, :, rows], logs[:, :, rows], *more)

    def add_gradients(
        self,
        grad_query: Tensor,
        sums: Sequence[Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        whole: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add this piece's part of the gradients, and free what the kernel returned.

        `grad_query` and the `sums` of keys and values are `[batch, tokens, heads, width]`. Inputs
        are as of `add_values`. `whole` is the result's gradient, the result, and logs of sums,
        heads first.
        """
        rows, columns = self.queries, self.keys
        query, keys, values = inputs[0], *(x.transpose(1, 2) for x in inputs[1:])
        grad, out, logs = (x[:, :, rows] for x in whole)
        parts = self.block.backward(
            grad, query[:, :, rows], keys[:, :, columns], values[:, :, columns], out, logs
        )
        grad_query[:, rows] += parts[0].transpose(1, 2)
        for total, part in zip(sums, parts[1:], strict=True):
            total[:, columns] += part.transpose(1, 2)


def _add_each(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add in place. As a function, so that no variable of the caller keeps the others alive."""
    for total, other in zip(sums, others, strict=True):
        total += other


def _to_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Append zeros, as kernels need heads of one width, which is a multiple of 8 on a GPU.

    The zeros change neither scores nor values.
    """
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


@dataclass(frozen=True)
class InPieces:
    """Attention over keys that this rank has: each allowed pair is in one of the pieces."""

    pieces: tuple[Piece, ...]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        refuse_dropout("InPieces", dropout)
        pieces = tuple(replace(p, block=replace(p.block, scale=scale)) for p in self.pieces)
        return attend_in_pieces(query, key, value, lambda _: pieces)


def attend_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Callable[[int], Sequence[Piece]],
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend to this rank's keys and values, or over a group to those of all ranks in turn.

    Queries are `[batch, tokens, heads, width]`. Keys and values may have fewer heads, and values,
    as the result, another width. `pieces` gives what the queries attend to of the keys of a rank.
    Without a group all keys are here.
    """
    padded = _to_one_width(query, key, value)
    return applied(_PiecedAttention, *padded, pieces, group)[..., : value.shape[-1]]


class _PiecedAttention(torch.autograd.Function):
    """Tensors are `[batch, tokens, heads, width]`, as they travel; kernels see heads first."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Callable[[int], Sequence[Piece]],
        group: ProcessGroup | None,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.transpose(1, 2)
        total = torch.zeros_like(query, dtype=wide)
        out = total.transpose(1, 2)
        logs = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for source, (k, v) in ring((key, value), group):
            for piece in pieces(source):
                piece.add_values(out, logs, (q, k, v))
        mixed = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, logs)
        ctx.pieces, ctx.group = pieces, group
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, logs = ctx.saved_tensors
        q, out, g = (x.transpose(1, 2) for x in (query, mixed, grad))
        grad_query = torch.zeros_like(query, dtype=logs.dtype)
        travelling: Any = None
        sums: list[Tensor] = []
        for source, (k, v) in ring((key, value), ctx.group):
            sums = [torch.zeros_like(x, dtype=logs.dtype) for x in (k, v)]
            for piece in ctx.pieces(source):
                piece.add_gradients(grad_query, sums, (q, k, v), (g, out, logs))
            if ctx.group is not None:
                # A block's gradients follow it one step behind, and end on its own rank (0606).
                if travelling is not None:
                    _add_each(sums, travelling.wait())
                travelling = send_recv(sums, ctx.group)
        home = sums if travelling is None else travelling.wait()
        grads = zip((grad_query, *home), (query, key, value), strict=True)
        return *(wide.to(x.dtype) for wide, x in grads), None, None
