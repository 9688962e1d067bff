"""Sums over a batch's tokens, which ranks may hold parts of, in one order.

The tokens of a batch are leaves in row-major order, and the sum is the tree of law 2 over them. If
a sequence has `GRANULE` times a power of two tokens, each sequence is a subtree. Then the sum over
a batch of a power of two of sequences is a subtree of the sum over all microbatches and
data-parallel ranks, which `reproducible=True` adds in the same tree.

See Note [Gradients over a cut sequence].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import start_all_gather, start_all_reduce
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.invariance.products import fold

# Note [Gradients over a cut sequence]
# Ranks of cp are data-parallel ranks to a wrapper, which adds their gradients after those of the
# sequences in a microbatch. The tree wants the opposite: a sequence's tokens first. So each rank of
# cp computes the sum over whole sequences, but for its own rows of the parameter alone, and zeros
# elsewhere. The wrapper's sum then adds zeros, which is exact in any order.


@dataclass
class TokenCut:
    """How the ranks cut a batch's tokens; all layers of a model share one.

    Attributes:
        sequence: the axis of sequence parallelism, whose ranks have runs of the batch's tokens;
            None if each has all.
        context: the axis of context parallelism, in zigzag order; None if sequences are whole.
        rows: sequences in the batch, which a forward sets before its layers run.
    """

    sequence: MeshAxis | None = None
    context: MeshAxis | None = None
    rows: int = 1

    def whole(self, x: Tensor, *, cut: bool = False) -> Tensor:
        """Gather `[tokens, ...]`, or sums of equally many tokens, in the batch's order.

        Args:
            x: this rank's tokens in the order of the batch.
            cut: whether the ranks of sequence parallelism hold other tokens each.
        """
        if cut and self.sequence is not None:
            x = start_all_gather(x, self.sequence.group, async_op=False).wait()
        if self.context is None:
            return x
        size = self.context.size
        x = start_all_gather(x, self.context.group, async_op=False).wait()
        # [cp, rows, 2 chunks, tokens of a chunk] to [rows, 2 cp chunks, tokens of a chunk]
        x = torch.unflatten(x, 0, (size, self.rows, 2, -1))
        early, late = x[:, :, 0], x[:, :, 1].flip(0)
        return torch.cat((early, late)).movedim(0, 1).flatten(0, 2)

    def own_rows(self, length: int) -> slice:
        """The rows of a parameter of this length whose gradient this rank of cp computes."""
        if self.context is None:
            return slice(0, length)
        rank, size = self.context.rank, self.context.size
        return slice(length * rank // size, length * (rank + 1) // size)

    def among_zeros(self, part: Tensor, length: int) -> Tensor:
        """Place the gradient of the own rows into one of zeros."""
        if self.context is None:
            return part
        total = part.new_zeros(length, *part.shape[1:])
        total[self.own_rows(length)] = part
        return total


@dataclass(frozen=True)
class TokenSum:
    """Adds `[..., width]` over all tokens of the batch: the gradient of a vector parameter.

    Attributes:
        tokens: how they are cut.
        cut: whether sequence parallelism cuts the values.
        heads: the axis whose ranks hold other heads; the values are `[..., heads, width]`.
        per_head: whether the values have heads, which are added within each token.
    """

    tokens: TokenCut
    cut: bool = False
    per_head: bool = False
    heads: MeshAxis | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Sum in float32 over the tokens of all ranks: `[width]`."""
        values = values.float()
        if self.per_head:
            values = self._over_heads(values)
        values = values.flatten(0, -2)
        runs = self._runs(values.shape[0])
        whole = self.tokens.whole(fold(values, leaves=runs), cut=self.cut)
        total = fold(whole)
        return self.tokens.among_zeros(total[self.tokens.own_rows(len(total))], len(total))

    def _over_heads(self, values: Tensor) -> Tensor:
        """Add the heads of each token; those of a rank are a subtree."""
        heads = values.shape[-2]
        apart = heads & -heads  # the largest power of two: ranks divide this many groups of heads
        values = fold(fold(torch.unflatten(values, -2, (apart, -1)), dim=-2), dim=-2)
        if self.heads is None:
            return values
        how: Any = {"reduction": "ordered", "async_op": False}
        return start_all_reduce(values.contiguous(), self.heads.group, **how).wait()

    def _runs(self, tokens: int) -> int:
        """The most neighbours that are a subtree wherever the ranks' tokens begin."""
        if self.tokens.context is None:
            return tokens & -tokens
        # With sequence parallelism beside it, a rank's run may begin within a chunk.
        size = self.tokens.sequence.size if self.cut and self.tokens.sequence is not None else 1
        chunk = tokens * size // (2 * self.tokens.rows)
        return min(tokens & -tokens, chunk & -chunk)


def add_vector(x: Tensor, vector: Tensor, total: TokenSum) -> Tensor:
    """`x + vector` whose gradient of the vector `[width]` is summed by `total`."""
    return applied(_AddVector, x, vector, total)


class _AddVector(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, total: TokenSum) -> Tensor:
        ctx.total = total
        return x + vector

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.total(grad), None


def sum_by_row(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """Add the values of the tokens that chose each row of a table, in the tree over all tokens.

    A row's tokens are leaves among zeros, which change nothing, so only sums that have a token
    exist. In each level of the tree the two halves of a sum are added, and two numbers have one sum
    in either order.

    Args:
        ids: int64 `[tokens]`, in the order of the batch.
        values: `[tokens, width]`.
        rows: of the table.

    Returns:
        float32 `[rows, width]`.
    """
    total = values.new_zeros(rows, values.shape[1], dtype=torch.float32)
    if not ids.numel():
        return total
    values = values.float()
    place = torch.arange(ids.numel(), device=ids.device)
    for _ in range((ids.numel() - 1).bit_length()):
        place = place >> 1
        key = place * rows + ids
        keys, where = torch.unique(key, return_inverse=True)
        if len(keys) < len(key):
            values = values.new_zeros(len(keys), values.shape[1]).index_add_(0, where, values)
            place, ids = keys // rows, keys % rows
    return total.index_add_(0, ids, values)


Activation = Callable[[Tensor], Tensor]


def _sigmoid(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.tanh(0.5 * x)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


# Note [Functions of elements]
# torch computes `silu`, `gelu`, `sigmoid` and `softplus` with vector instructions in most of a
# tensor and with the C library at its ends and where it has gaps, so an element's bits depend on
# its place. `exp`, `log`, `tanh` and `erf` are the same everywhere. tests/test_invariant_sums.py
# compares pieces with the whole.
ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": lambda x: torch.relu(x).square(),
}
"""Activation functions whose bits do not depend on an element's place, by name."""


def in_float32(function: Activation, x: Tensor) -> Tensor:
    """Apply a function in float32 and round the result to the dtype of `x`."""
    return function(x.float()).to(x.dtype)
