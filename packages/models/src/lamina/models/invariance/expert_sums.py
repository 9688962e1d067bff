"""Sums over the tokens that were sent to an expert, in the order of all tokens.

A weight's gradient of a dense layer is a tree over granules of tokens, and in a granule a chain. An
expert's is the same with zeros for the tokens that were sent elsewhere. Zeros change nothing, so
only the rows that there are get multiplied. So it matters neither which other tokens an expert got
nor in what order they came.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.invariance.products import GRANULE, product
from lamina.models.invariance.token_sums import sum_by_row


def rows_weight_product(grad: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
    """`grad.T @ x` over some of a batch's tokens: float32 `[out, in]`.

    Args:
        grad: `[rows, out]`.
        x: `[rows, in]`.
        tokens: int64 `[rows]`, the number of each row's token in the batch, each at most once.
    """
    order = tokens.argsort()
    grad, x = grad[order], x[order]
    granules, counts = torch.unique_consecutive(tokens[order] // GRANULE, return_counts=True)
    leaves, start = [], 0
    for granule, count in zip(granules.tolist(), counts.tolist(), strict=True):
        leaves.append((granule, slice(start, start + count)))
        start += count
    if not leaves:
        return product(grad.t(), x)

    def leaf(rows: slice) -> Tensor:
        return product(grad[rows].t(), x[rows]).contiguous()

    return sparse_tree(leaves, leaf)


def sparse_tree(leaves: Sequence[tuple[int, slice]], make: Callable[[slice], Tensor]) -> Tensor:
    """Add leaves in the tree of law 2 over all numbers, of which only these are not zero.

    Args:
        leaves: numbers in increasing order, and what makes their tensors.
        make: makes the tensor of a leaf, when it is added.
    """
    if len(leaves) == 1:
        return make(leaves[0][1])
    # Two numbers are in the halves of the smallest subtree that has both: the highest bit in which
    # the first and the last differ.
    bit = 1 << ((leaves[0][0] ^ leaves[-1][0]).bit_length() - 1)
    split = next(at for at, (number, _) in enumerate(leaves) if number & bit)
    return sparse_tree(leaves[:split], make).add_(sparse_tree(leaves[split:], make))


def sums_by_sequence(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Add `[tokens, width]` over the tokens of each sequence, by number: `[sequences, width]`."""
    return applied(_SumsBySequence, values, sequence, sequences)


class _SumsBySequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
        ctx.save_for_backward(sequence)
        return sum_by_row(sequence, values, sequences)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sequence,) = ctx.saved_tensors
        return grad[sequence], None, None
