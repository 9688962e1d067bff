"""Reductions in one call, and what the words for them stand for."""

from typing import Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.collective import ReduceHandle
from lamina.collectives.reduction.codec import GradientCodec
from lamina.collectives.reduction.native import NativeReduction
from lamina.collectives.reduction.ordered import OrderedReduction, Reduction, SumOp

__all__ = ["ReductionName", "all_reduce_fp32", "reduce_scatter_fp32", "reduction_class"]

ReductionName: TypeAlias = Literal["ordered", "native"]
"""Who adds: Lamina in one order, or the backend."""

_CLASSES: dict[str, type[Reduction]] = {"ordered": OrderedReduction, "native": NativeReduction}


def reduction_class(name: str) -> type[Reduction]:
    """The class of the reductions called `name`; ValueError: neither "ordered" nor "native"."""
    if name not in _CLASSES:
        raise ValueError(f"reduction must be 'ordered' or 'native', not {name!r}")
    return _CLASSES[name]


def reduce_scatter_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    scratch: torch.Tensor | None = None,
    statistics: bool = True,
    check: bool = False,
    codec: GradientCodec | None = None,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32 and keep this rank's piece.

    Args:
        output: flat [n]; float32 or `input`'s dtype. Rank r gets elements r*n .. (r+1)*n of the
            sum. It may be exactly this rank's own piece of `input` (in place), unless
            `accumulate` is set.
        input: flat [N*n] for N ranks; float32, bfloat16, float16 or float64: the wire dtype.
            It must not change until the handle's `wait`.
        group: the ranks, or None for a group of one.
        op: "sum", or "avg" to multiply the sum by 1/N.
        scale: a further factor; both are applied as one factor, rounded once to the dtype of the
            sum, to the sum and never to the input.
        accumulate: add to `output` (in the dtype of the sum) instead of overwriting it.
        async_op: return at once; the sum runs beside the caller, not in `wait`.
        scratch: flat, of the wire dtype, for what other ranks send: at least (N-1)*n elements, and
            N*n where a backend other than gloo fills it; Lamina's own if None.
        statistics: False leaves out squared norm and non-finite flag, which cost a little time.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).
        codec: how `input` becomes what travels, the same on all ranks; None sends it as it is.

    Returns:
        A handle with `wait()`, `squared_norm` and `nonfinite` of the stored output.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> gradients, shard = torch.ones(4, dtype=torch.bfloat16), torch.empty(4)
        >>> reduce_scatter_fp32(shard, gradients, None, op="avg").squared_norm.item()
        4.0
    """
    reduction = OrderedReduction(output, input, group, scatter=True, op=op, codec=codec)
    if check:
        reduction.agree()
    return reduction.start(
        output,
        input,
        scale=scale,
        accumulate=accumulate,
        scratch=scratch,
        statistics=statistics,
        async_op=async_op,
    )


def all_reduce_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    statistics: bool = True,
    check: bool = False,
    codec: GradientCodec | None = None,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32; every rank gets the whole sum.

    A reduce-scatter and a gather, so the bits are those of `reduce_scatter_fp32`. Any
    number of elements: the last ranks' pieces may be shorter, or empty.

    Args:
        output: flat [n]; float32 or `input`'s dtype; it may be `input` itself, unless
            `accumulate` is set.
        input: flat [n] in the wire dtype.
        group: the ranks, or None for a group of one.
        op: as in `reduce_scatter_fp32`.
        scale: as in `reduce_scatter_fp32`.
        accumulate: add the sum to what this rank's `output` holds.
        async_op: return at once.
        statistics: as in `reduce_scatter_fp32`.
        check: as in `reduce_scatter_fp32`.
        codec: as in `reduce_scatter_fp32`. The sums are gathered as they are.

    Returns:
        A handle; its statistics are of this rank's piece of the output, so that their sum over
        the ranks is that of the whole.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> norms = torch.ones(4)
        >>> all_reduce_fp32(norms, norms, None).wait()
    """
    reduction = OrderedReduction(output, input, group, scatter=False, op=op, codec=codec)
    if check:
        reduction.agree()
    return reduction.start(
        output, input, scale=scale, accumulate=accumulate, statistics=statistics, async_op=async_op
    )
