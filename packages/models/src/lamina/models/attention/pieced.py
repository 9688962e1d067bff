"""Attention put together from blocks of queries and keys, without a mask.

The blocks are those of `lamina.models.attention.partial_softmax`; which of them a rank computes,
and when their keys arrive, is the business of context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.attention.kernels import refuse_dropout
from lamina.models.attention.partial_softmax import Block, merge

__all__ = ["InPieces", "Piece", "add_each", "to_one_width"]


@dataclass(frozen=True)
class Piece:
    """Some queries and some keys that they attend to."""

    queries: slice
    keys: slice
    block: Block

    def add_values(self, out: Tensor, logs: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Merge this piece into the result.

        Args:
            out: `[batch, heads, tokens, width]` in float32 or wider.
            logs: of sums of exponentials, `[batch, heads, tokens]`.
            inputs: queries, heads first; keys and values `[batch, tokens, heads, width]`.
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
        """Add this piece's part; what the kernel returns is let go before the next piece.

        Args:
            grad_query: of the queries, `[batch, tokens, heads, width]`.
            sums: of the keys and values, in the same order of dimensions.
            inputs: as of `add_values`.
            whole: the result's gradient, the result, and logs of sums, heads first.
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


def add_each(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add in place; a function, so that no name of a caller keeps the last of the others alive."""
    for total, other in zip(sums, others, strict=True):
        total += other


def to_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Append zeros, for kernels want heads of one width, on a GPU a multiple of 8.

    No score or value changes.
    """
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


@dataclass(frozen=True)
class InPieces:
    """Attention whose pieces are known, over keys and values that are all here.

    Attributes:
        pieces: every allowed pair of a query and a key is in one of them.
    """

    pieces: tuple[Piece, ...]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `lamina.models.attention.kernels.AttentionPattern`; `scale` is every piece's."""
        refuse_dropout("InPieces", dropout)
        padded = to_one_width(query, key, value)
        pieces = tuple(replace(p, block=replace(p.block, scale=scale)) for p in self.pieces)
        mixed: Tensor = _InPieces.apply(*padded, pieces)  # type: ignore[no-untyped-call]
        return mixed[..., : value.shape[-1]]


class _InPieces(torch.autograd.Function):
    """Tensors are `[batch, tokens, heads, width]`; kernels see heads first."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Piece, ...]
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.transpose(1, 2)
        total = torch.zeros_like(query, dtype=wide)
        logs = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for piece in pieces:
            piece.add_values(total.transpose(1, 2), logs, (q, key, value))
        mixed = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, logs)
        ctx.pieces = pieces
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, logs = ctx.saved_tensors
        q, out, g = (x.transpose(1, 2) for x in (query, mixed, grad))
        grads = [torch.zeros_like(x, dtype=logs.dtype) for x in (query, key, value)]
        for piece in ctx.pieces:
            piece.add_gradients(grads[0], grads[1:], (q, key, value), (g, out, logs))
        pairs = zip(grads, (query, key, value), strict=True)
        return *(wide.to(x.dtype) for wide, x in pairs), None
