"""Reductions in one call, what the words for them stand for, and those by the backend itself.

The backend (SHARP, user buffers, thousands of ranks) chooses the order of the sum and rounds in the
wire dtype after every addition, so native reductions claim a tolerance and no bits: against the
exact sum of N ranks' elements x_i, the error is at most (N - 1) * eps * sum |x_i|, with eps the
wire dtype's (2^-24 for float32, 2^-8 for bfloat16), as each of the N - 1 additions rounds once.
Averages are the backend's as well. Scale, accumulation and statistics are applied to the result in
fp32, as in the ordered reductions.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lamina.collectives.call.collective import ReduceHandle
from lamina.collectives.compat import reduce_scatter_single
from lamina.collectives.reduction.codec import Cast, GradientCodec, Wire
from lamina.collectives.reduction.ordered import OrderedReduction, Reduction, Sum, SumOp
from lamina.collectives.reduction.summation import Epilogue, sum_chunks
from lamina.collectives.transport.groups import served_by_gloo, where
from lamina.collectives.transport.transport import Completion, end_of

_BACKEND = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
"""The backend averages by itself: in the wire dtype, where a sum of fp16 may not fit."""


class NativeReduction(Reduction):
    """The backend's own reduce-scatter or all-reduce; arguments as in `Reduction`."""

    suffix = "native"
    piecewise = False

    def _prepare(self, codec: GradientCodec | None) -> None:
        if codec is not None:
            raise ValueError(
                f"{self.op} {where(self.group)}: the backend adds what it is given, so nothing can "
                f"decode {type(codec).__name__}; use reduction='ordered'"
            )
        # An all-reduce sends at least what a reduce-scatter and a gather in the wire dtype send.
        trips = 1 if self.scatter else 2
        self._sent = trips * (self.size - 1) * self._piece * self._wire_dtype.itemsize
        self._wire = Wire(Cast(self._wire_dtype))
        by_backend = self.size > 1 and not served_by_gloo(self.group, self.device)
        self._only_posts = self.scatter and by_backend
        self._backend_op, self.sum_op = _BACKEND[self.sum_op], "sum"

    def _ready(self, task: Sum) -> Callable[[], Completion]:
        # The backend's sum goes straight to the output, if it is neither cast nor added.
        direct = task.output.dtype == task.input.dtype and not task.epilogue.accumulate
        total = task.output if direct else torch.empty_like(task.output, dtype=task.input.dtype)
        return partial(self._reduce, task, total)

    def _reduce(self, task: Sum, total: torch.Tensor) -> Completion:
        work, group, input = None, self.group, task.input
        alone = self.size == 1
        if (alone or not self.scatter) and total.data_ptr() != input.data_ptr():
            total.copy_(input)
        if group is None or alone or input.is_meta:
            pass
        elif self.scatter:
            how = {"op": self._backend_op, "group": group, "async_op": True}
            work = reduce_scatter_single(total, input, **how)
        else:
            work = dist.all_reduce(total, op=self._backend_op, group=group, async_op=True)
        return partial(self._finish, work, task, total)

    def _finish(self, work: Work | None, task: Sum, total: torch.Tensor) -> None:
        """Wait for the backend's sum; bring it, scaled and measured, to where it was asked for."""
        end_of(work, self.device)()
        if total is not task.output or task.epilogue != Epilogue():
            sum_chunks([total], task.output, task.epilogue, self._wire)


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
    return OrderedReduction(output, input, group, scatter=True, op=op, codec=codec).start(
        output,
        input,
        scale=scale,
        accumulate=accumulate,
        scratch=scratch,
        statistics=statistics,
        async_op=async_op,
        check=check,
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
    return OrderedReduction(output, input, group, scatter=False, op=op, codec=codec).start(
        output,
        input,
        scale=scale,
        accumulate=accumulate,
        statistics=statistics,
        async_op=async_op,
        check=check,
    )
