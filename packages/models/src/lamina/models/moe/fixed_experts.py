"""The products of experts in the order of the model (`invariant=True`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import start_all_gather
from lamina.models.base.applied import applied
from lamina.models.invariance.expert_sums import rows_weight_product
from lamina.models.invariance.products import Block, product
from lamina.models.invariance.token_sums import TokenCut, delivered
from lamina.models.moe.expert_axes import ExpertAxes


@dataclass(frozen=True)
class CopyOrder:
    """Which tokens of the batch the rows of a rank's experts are.

    Attributes:
        tokens: int64 `[rows]`: the number of each row's token among those of the ranks that send
            rows to this one, in the order of the batch.
        sizes: rows of each of this rank's experts.
        first: the number of this rank's first expert.
        axes: of the experts.
    """

    tokens: Tensor
    sizes: tuple[int, ...]
    first: int
    axes: ExpertAxes

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Each expert's gradient over the tokens of whole sequences: float32 `[experts, out, in]`.

        Where several ranks have copies of an expert and pieces of the same sequences, each has the
        gradient of some rows, and zeros in the others.
        """
        tokens, copies = self.tokens, self._copies()
        out = grad.shape[1]
        own = slice(0, out)
        if copies is None:
            # Rows come by expert, and the host knows how many each has: it need not wait.
            ends = [0, *accumulate(self.sizes)]
            of_experts: list[slice | Tensor] = [slice(*both) for both in pairwise(ends)]
        else:
            number, of = copies
            own = slice(out * number // of, out * (number + 1) // of)
            sizes = torch.tensor(self.sizes, device=tokens.device)
            experts = torch.arange(len(sizes), device=tokens.device).repeat_interleave(sizes)
            rows = torch.cat((grad.float(), x.float()), dim=1)
            rows, experts, tokens = self._gather(rows, experts, tokens)
            grad, x = rows[:, :out], rows[:, out:]
            of_experts = [experts.eq(expert).nonzero().squeeze(1) for expert in range(len(sizes))]
        total = grad.new_zeros(len(self.sizes), out, x.shape[1], dtype=torch.float32)
        for expert, mine in enumerate(of_experts):
            if len(tokens[mine]):
                part = rows_weight_product(grad[mine][:, own], x[mine], tokens[mine])
                total[expert, own] = part
        return total

    def _copies(self) -> tuple[int, int] | None:
        """Which of the ranks that share sequences and an expert this is; None if none do."""
        axes = self.axes
        sharing, number = 1, 0
        for axis in (axes.cp, axes.tokens_tp):
            if axis is not None:
                number, sharing = number * axis.size + axis.rank, sharing * axis.size
        senders = 1 if axes.dispatch is None or axes.replicated else axes.dispatch.size
        if senders % sharing == 0:
            return None  # whole sequences are sent to the expert
        if sharing % senders:
            raise ValueError(
                f"invariant=True: {senders} ranks of ep and expert_tp beside {sharing} of cp and "
                "tp, which share a sequence: one number must divide the other"
            )
        return number // senders, sharing // senders

    def _gather(self, rows: Tensor, experts: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The rows that the ranks which share this rank's sequences have for its experts.

        Returns:
            The rows, the numbers of their experts here and of their tokens.
        """
        axes = self.axes
        piece = 0 if axes.expert_tp is None else axes.expert_tp.rank
        if axes.replicated:
            piece = 0
        labels = torch.stack((tokens, experts + self.first, torch.full_like(tokens, piece)), dim=1)
        for axis in (axes.tokens_tp, axes.cp):
            if axis is None:
                continue
            group, count = axis.group, torch.tensor([len(rows)], device=rows.device)
            counts = start_all_gather(count, group, async_op=False).wait().tolist()
            most = max(counts)
            rows, labels = (
                _without_padding(
                    start_all_gather(
                        F.pad(each, (0, 0, 0, most - len(each))), group, async_op=False
                    ).wait(),
                    counts,
                )
                for each in (rows, labels)
            )
        local = labels[:, 1] - self.first
        mine = (local >= 0) & (local < len(self.sizes)) & (labels[:, 2] == piece)
        return rows[mine], local[mine], labels[mine, 0]


def _without_padding(gathered: Tensor, counts: Sequence[int]) -> Tensor:
    parts = zip(gathered.chunk(len(counts)), counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


def fixed_expert_product(
    rows: Tensor,
    weight: Tensor,
    order: CopyOrder,
    inner: Sequence[Block],
    outer: Sequence[Block],
) -> Tensor:
    """`rows @ weight[e].T` for the rows of each expert, in float32.

    Args:
        rows: `[rows, in]`, those of the first expert first.
        weight: `[experts, out, in]`.
        order: the tokens of the rows.
        inner: blocks of this rank's input width.
        outer: blocks of this rank's output width.
    """
    return applied(_FixedProduct, rows, weight, order, inner, outer)


class _FixedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        order: CopyOrder,
        inner: Sequence[Block],
        outer: Sequence[Block],
    ) -> Tensor:
        ctx.order, ctx.outer = order, outer
        ctx.parameter = weight if weight.is_leaf else None
        ctx.save_for_backward(rows, weight)
        return _by_expert(rows, weight.transpose(1, 2), order.sizes, inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        by_rows = by_weight = None
        if ctx.needs_input_grad[0]:
            by_rows = _by_expert(grad, weight, ctx.order.sizes, ctx.outer).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = delivered(ctx.parameter, ctx.order.weight_gradient(grad, rows))
        return by_rows, by_weight, None, None, None


def _by_expert(
    rows: Tensor, stack: Tensor, sizes: Sequence[int], blocks: Sequence[Block]
) -> Tensor:
    """`[rows, in]` with each expert's matrix of `[experts, in, out]`: float32 `[rows, out]`."""
    parts = zip(torch.split(rows, list(sizes)), stack.unbind(0), strict=True)
    return torch.cat([product(part, matrix, blocks) for part, matrix in parts])


def numbers_of_tokens(cut: TokenCut, axes: ExpertAxes, count: int, device: torch.device) -> Tensor:
    """The numbers of this rank's tokens among those of all data-parallel ranks: int64 `[count]`.

    Args:
        cut: how the ranks cut a batch.
        axes: of the experts.
        count: of tokens here.
        device: of the numbers.
    """
    cp = 1 if axes.cp is None else axes.cp.size
    tp = 1 if axes.tokens_tp is None else axes.tokens_tp.size
    whole = count * cp * tp
    numbers = cut.piece(torch.arange(whole, device=device).view(cut.rows, -1))
    return numbers.flatten() + (0 if axes.dp is None else axes.dp.rank * whole)
