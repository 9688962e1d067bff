"""The loss of an output head, whose sums over the vocabulary and over tokens have one order.

Logits exist for one chunk of tokens at a time, in forward and again in backward. Sums over the
vocabulary are those of its blocks, in the tree, of which tensor-parallel ranks hold neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import (
    all_reduce_small,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.invariance.layer_products import InvariantProducts
from lamina.models.invariance.norms import WidthSum
from lamina.models.invariance.products import GRANULE, fold, granules, product, tree
from lamina.models.invariance.token_sums import delivered


@dataclass(frozen=True)
class VocabularyLoss:
    """The sum of the cross-entropies of `hidden @ weight.T`.

    Attributes:
        products: of the head, a layer whose output is cut over ranks.
        axis: the ranks; None is one process.
        rows: of the weight over all ranks.
        vocab_size: ids that exist; rows from there on get no probability.
        ignored: tokens with this label are left out.
        chunk: tokens at a time.
    """

    products: InvariantProducts
    axis: MeshAxis | None
    rows: int
    vocab_size: int
    ignored: int
    chunk: int

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The sum in nats, a float32 scalar.

        Args:
            hidden: `[tokens, hidden]`, or under sequence parallelism `[tokens / size, hidden]`.
            weight: `[vocabulary / size, hidden]`.
            labels: int64 `[tokens]`, of all tokens.
        """
        return applied(_Loss, hidden, weight, labels, self)

    @property
    def first(self) -> int:
        """The id of the first of this rank's rows."""
        return 0 if self.axis is None else self.axis.rank * (self.rows // self.axis.size)

    @property
    def sums(self) -> WidthSum:
        """Sums over the vocabulary."""
        return WidthSum.of_cut(self.rows, self.axis)

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Chunks of whole granules of tokens."""
        chunk = -(-self.chunk // GRANULE) * GRANULE
        for start in range(0, tokens, chunk):
            yield slice(start, min(start + chunk, tokens))

    def logits(self, hidden: Tensor, weight: Tensor, first: int) -> Tensor:
        """Logits of the rows of ids from `first` on; minus infinity for ids that do not exist."""
        logits = product(hidden, weight.t(), self.products.inner)
        logits[:, max(self.vocab_size - first, 0) :] = -torch.inf
        return logits

    def of_tokens(self, labels: Tensor) -> Tensor:
        """The weight of each label: 1, or 0 if it is ignored, or NaN if there is no such id."""
        exists = (labels >= 0) & (labels < self.vocab_size)
        return torch.where(labels == self.ignored, 0.0, torch.where(exists, 1.0, torch.nan))

    def by_logits(
        self, given: "_Tokens", weight: Tensor, first: int, factor: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Gradients by logits of the rows of ids from `first` on, a chunk of tokens at a time."""
        for rows in self.chunks(len(given.labels)):
            labels = given.labels[rows]
            shares = self.logits(given.hidden[rows], weight, first)
            shares = shares.sub_(given.largest[rows]).exp_().div_(given.total[rows])
            column, here = _columns(labels, first, shares.shape[1])
            shares.scatter_add_(1, column, -here.float())
            yield rows, shares.mul_(self.of_tokens(labels)[:, None] * factor)


def _columns(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which of some columns each label is, and whether it is one: both `[tokens, 1]`."""
    column = labels[:, None] - first
    here = (column >= 0) & (column < count)
    return torch.where(here, column, 0), here


@dataclass(frozen=True)
class _Tokens:
    """Tokens of which gradients are computed: `[tokens, ...]`."""

    hidden: Tensor
    labels: Tensor
    largest: Tensor
    """`[tokens, 1]`: the largest logit."""
    total: Tensor
    """`[tokens, 1]`: the sum of `exp(logit - largest)`."""


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: VocabularyLoss
    ) -> Tensor:
        whole, group = _gathered(hidden, head), None if head.axis is None else head.axis.group
        largest = hidden.new_empty(len(labels), 1, dtype=torch.float32)
        total, losses = torch.empty_like(largest), torch.empty_like(largest)
        for rows in head.chunks(len(labels)):
            logits = head.logits(whole[rows], weight, head.first)
            top = logits.amax(dim=1, keepdim=True)
            all_reduce_small([top], group, op="max")
            logits -= top
            column, here = _columns(labels[rows], head.first, logits.shape[1])
            chosen = torch.where(here, logits.gather(1, column), 0.0)
            all_reduce_small([chosen], group)  # zeros but for one rank
            largest[rows], total[rows] = top, head.sums(logits.exp_())
            losses[rows] = total[rows].log() - chosen
        ctx.save_for_backward(hidden, weight, labels, largest, total)
        ctx.head, ctx.parameter = head, weight if weight.is_leaf else None
        weights = head.of_tokens(labels)
        losses = torch.where(labels == head.ignored, 0.0, losses[:, 0] * weights)
        return fold(losses) if len(losses) else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, largest, total = ctx.saved_tensors
        head: VocabularyLoss = ctx.head
        tokens, outer = head.products.tokens, head.products.outer
        given = _Tokens(_gathered(hidden, head), labels, largest, total)
        grad_hidden = torch.empty_like(given.hidden, dtype=torch.float32)

        def leaves() -> Iterator[Tensor]:
            """Own tokens: gradients of hidden states, and granules of the weight's."""
            for rows, shares in head.by_logits(given, weight, head.first, grad):
                grad_hidden[rows] = product(shares, weight, outer)
                if tokens.context is None:
                    yield from granules(shares, given.hidden[rows])

        parts = list(leaves()) if tokens.context is not None else leaves()
        if tokens.context is None:
            by_weight = tree(parts)
        else:
            by_weight = _over_sequences(given, weight, head, grad)
        grad_hidden = _summed(grad_hidden, head).to(hidden.dtype)
        return grad_hidden, delivered(ctx.parameter, by_weight), None, None


def _over_sequences(given: _Tokens, weight: Tensor, head: VocabularyLoss, factor: Tensor) -> Tensor:
    """The weight's gradient over all tokens of the ranks of cp, of this rank's own rows."""
    tokens = head.products.tokens
    own = tokens.own_rows(len(weight))
    everyone = _Tokens(*(tokens.whole(x) for x in vars(given).values()))
    by_logits = head.by_logits(everyone, weight[own], head.first + own.start, factor)
    part = tree(
        leaf for rows, shares in by_logits for leaf in granules(shares, everyone.hidden[rows])
    )
    return tokens.among_zeros(part, len(weight))


def _gathered(hidden: Tensor, head: VocabularyLoss) -> Tensor:
    """All tokens of hidden states that may be cut over tokens."""
    if head.axis is None or not head.products.tokens.sequence_parallel:
        return hidden
    return start_all_gather(hidden, head.axis.group, async_op=False).wait()


def _summed(grad: Tensor, head: VocabularyLoss) -> Tensor:
    """Sum over ranks, and scatter over tokens if hidden states are cut over them."""
    if head.axis is None:
        return grad
    if head.products.tokens.sequence_parallel:
        return start_reduce_scatter(grad, head.axis.group, async_op=False).wait()
    return start_all_reduce(grad, head.axis.group, in_place=True, async_op=False).wait()
