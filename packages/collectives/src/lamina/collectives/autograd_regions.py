"""Autograd regions: what tensor, sequence, context and expert parallelism do at their borders.

A region is a collective (or nothing) in the forward and its dual in the backward. Each backward is
itself a region, so derivatives of any order are right. docs/collectives.md has the table of regions
and duals, and what is the same for all of them: Megatron-LM's convention for gradients of
replicated tensors, the order of sums, and why a rank must not leave out a backward.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_divisible
from lamina.collectives.move.all_to_all import row_splits
from lamina.collectives.move.operators import exchanged, gathered, summed, summed_piece
from lamina.collectives.move.shaped import dimension
from lamina.collectives.reduction.reduce import ReductionName, reduction_class
from lamina.collectives.transport.groups import size_of
from lamina.mesh.engine import GroupRef


def copy_to(
    tensor: torch.Tensor, group: ProcessGroup | None, *, reduction: ReductionName = "ordered"
) -> torch.Tensor:
    """Enter a parallel region with a replicated tensor: its gradients are summed over the ranks.

    Args:
        tensor: any shape, equal on all ranks; its gradient's dtype is the wire dtype (float32,
            bfloat16, float16 or float64).
        group: the ranks, or None for a group of one.
        reduction: who sums, "ordered" or "native".

    Returns:
        The same values.

    Raises:
        ValueError: an unknown `reduction`.

    Source: "f" of Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.

    Examples:
        >>> hidden = copy_to(torch.ones(2, 8, requires_grad=True), None)
    """
    reduction_class(reduction)
    return _over(tensor, group, _same, partial(_sum, reduction=reduction))


def reduce_from(
    tensor: torch.Tensor, group: ProcessGroup | None, *, reduction: ReductionName = "ordered"
) -> torch.Tensor:
    """Leave a parallel region: sum the ranks' partial results; gradients pass unchanged.

    Args:
        tensor: any shape, the same on all ranks; float32, bfloat16, float16 or float64.
        group: the ranks, or None for a group of one.
        reduction: who sums, "ordered" or "native".

    Returns:
        The sum, of the same shape and dtype; if ordered, bit-identical on all ranks.

    Raises:
        ValueError: a dtype that can't be summed, or an unknown `reduction`.

    Source: "g" of Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.

    Examples:
        >>> whole = reduce_from(torch.ones(2, 8), None)
    """
    reduction_class(reduction)
    return _over(tensor, group, partial(_sum, reduction=reduction), _same)


def scatter_to(tensor: torch.Tensor, group: ProcessGroup | None, dim: int = 0) -> torch.Tensor:
    """Keep this rank's piece of a replicated tensor; gradients are gathered.

    Args:
        tensor: [..., N*n, ...], equal on all ranks.
        group: the N ranks, or None for a group of one.
        dim: dimension to cut; counts from the end if negative.

    Returns:
        [..., n, ...], contiguous.

    Raises:
        IndexError: no such dimension.
        ValueError: its size is not divisible by N.

    Examples:
        >>> piece = scatter_to(torch.ones(2, 8), None, dim=1)
    """
    dim = dimension("scatter_to", tensor, dim)
    require_divisible("scatter_to", tensor, dim, group)
    return _over(tensor, group, partial(_keep_piece, dim=dim), partial(_gather, dim=dim))


def gather_from(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    dim: int = 0,
    *,
    grad: Literal["split", "reduce_scatter"] = "split",
    reduction: ReductionName = "ordered",
) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`.

    Args:
        tensor: [..., n, ...], the same shape and dtype on all ranks.
        group: the N ranks, or None for a group of one.
        dim: dimension to concatenate along; counts from the end if negative.
        grad: what the ranks do with the result. "split": all of them the same (the result is
            replicated, so each has the whole gradient, of which it keeps its piece).
            "reduce_scatter": each something else (the gradients are partial; they are summed).
            The wrong one gives gradients that are N times too large, or incomplete.
        reduction: who sums in a "reduce_scatter", "ordered" or "native".

    Returns:
        [..., N*n, ...].

    Raises:
        IndexError: no such dimension.
        ValueError: an unknown `grad` or `reduction`.

    Source: "g-bar" of Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198,
    section 4.2 ("reduce_scatter").

    Examples:
        >>> logits = gather_from(torch.ones(2, 8), None, dim=-1)
    """
    if grad not in ("split", "reduce_scatter"):
        raise ValueError(f"gather_from: grad must be 'split' or 'reduce_scatter', not {grad!r}")
    reduction_class(reduction)
    dim = dimension("gather_from", tensor, dim)
    dual: Step = partial(_keep_piece, dim=dim)
    if grad == "reduce_scatter":
        dual = partial(_sum_and_keep_piece, dim=dim, reduction=reduction)
    return _over(tensor, group, partial(_gather, dim=dim), dual)


def reduce_scatter_to(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    dim: int = 0,
    *,
    reduction: ReductionName = "ordered",
) -> torch.Tensor:
    """Sum the ranks' partial results and keep this rank's piece; gradients are gathered.

    Args:
        tensor: [..., N*n, ...], the same shape on all ranks; float32, bfloat16, float16 or float64.
        group: the N ranks, or None for a group of one.
        dim: dimension to cut; counts from the end if negative.
        reduction: who sums, "ordered" or "native".

    Returns:
        [..., n, ...], contiguous.

    Raises:
        IndexError: no such dimension.
        ValueError: its size is not divisible by N, the dtype can't be summed, or an unknown
            `reduction`.

    Source: Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.

    Examples:
        >>> piece = reduce_scatter_to(torch.ones(2, 8), None)
    """
    reduction_class(reduction)
    dim = dimension("reduce_scatter_to", tensor, dim)
    require_divisible("reduce_scatter_to", tensor, dim, group)
    total = partial(_sum_and_keep_piece, dim=dim, reduction=reduction)
    return _over(tensor, group, total, partial(_gather, dim=dim))


def all_to_all_tokens(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows to the ranks that want them; their gradients come back the same way.

    Args:
        tensor: [rows, ...], any number of rows, 0 included; equal in all else on all ranks.
        group: the N ranks, or None for a group of one.
        output_splits: N row counts, what comes from each rank. None: rows/N from each.
        input_splits: N row counts, what goes to each rank; they sum to `rows`. None: rows/N.

    Returns:
        [sum(output_splits), ...]: the rows received, in the order of the sending ranks.

    Raises:
        ValueError: splits that don't fit (see `start_all_to_all`).

    Source: Lepikhin et al., GShard, arXiv:2006.16668, section 3.

    Examples:
        >>> tokens = all_to_all_tokens(torch.ones(4, 8), None)
    """
    alone = size_of(group) == 1
    receives = row_splits("output_splits", output_splits, tensor, group, add_up=alone)
    sends = row_splits("input_splits", input_splits, tensor, group)
    exchange = partial(_exchange_rows, receives=receives, sends=sends)
    return _over(tensor, group, exchange, partial(_exchange_rows, receives=sends, sends=receives))


Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Step: TypeAlias = Callable[..., torch.Tensor]
"""Takes the tensor, and the group as `ref`."""


class DualFunction(torch.autograd.Function):
    """One function forward and its dual backward.

    The dual of the dual is the function itself, so the backward is a region as well, and can be
    differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, function: Function, dual: Function) -> torch.Tensor:
        """Apply the function."""
        ctx.function, ctx.dual = function, dual
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Apply the dual, as a region."""
        return _apply(gradient, ctx.dual, ctx.function), None, None


def _apply(tensor: torch.Tensor, function: Function, dual: Function) -> torch.Tensor:
    return cast("torch.Tensor", DualFunction.apply(tensor, function, dual))  # type: ignore[no-untyped-call]


def _over(tensor: torch.Tensor, group: ProcessGroup | None, step: Step, dual: Step) -> torch.Tensor:
    """Apply a step and its dual over a group; in a group of one there is nothing to do."""
    if group is None or size_of(group) == 1:
        return tensor
    ref = GroupRef(group)
    return _apply(tensor, partial(step, ref=ref), partial(dual, ref=ref))


def _same(tensor: torch.Tensor, ref: GroupRef) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: torch.Tensor, ref: GroupRef, reduction: ReductionName) -> torch.Tensor:
    return summed(tensor, ref.group, reduction)


def _keep_piece(tensor: torch.Tensor, ref: GroupRef, dim: int) -> torch.Tensor:
    # A copy, not a view: a view would keep the whole tensor alive for as long as the piece.
    group = ref.group
    length = tensor.shape[dim] // group.size()
    piece = tensor.narrow(dim, group.rank() * length, length)
    return piece.clone(memory_format=torch.contiguous_format)


def _gather(tensor: torch.Tensor, ref: GroupRef, dim: int) -> torch.Tensor:
    return gathered(tensor, ref.group, dim)


def _sum_and_keep_piece(
    tensor: torch.Tensor, ref: GroupRef, dim: int, reduction: ReductionName
) -> torch.Tensor:
    return summed_piece(tensor, ref.group, dim, reduction)


def _exchange_rows(
    tensor: torch.Tensor, ref: GroupRef, receives: list[int], sends: list[int]
) -> torch.Tensor:
    return exchanged(tensor, ref.group, receives, sends)


REGION_STEPS: Mapping[Callable[..., torch.Tensor], str] = {
    _same: "EE VV PP",
    _sum: "PE",
    _keep_piece: "EV",
    _gather: "VE",
    _sum_and_keep_piece: "PV",
    _exchange_rows: "VV",
}
"""What each step of a region makes of values over its ranks: equal, varying or partial ones."""
