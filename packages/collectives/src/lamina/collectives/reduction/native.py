"""Reductions by the backend itself: SHARP, user buffers, thousands of ranks.

The backend chooses the order of the sum and rounds in the wire dtype after every addition, so
these reductions claim a tolerance and no bits: against the exact sum of N ranks' elements x_i, the
error is at most (N - 1) * eps * sum |x_i|, with eps the wire dtype's (2^-24 for float32, 2^-8 for
bfloat16), as each of the N - 1 additions rounds once. Averages are the backend's as well. Scale,
accumulation and statistics are applied to the result in fp32, as in the ordered reductions.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import Work

from lamina.collectives.compat import reduce_scatter_single
from lamina.collectives.reduction.codec import Cast, GradientCodec, Wire
from lamina.collectives.reduction.ordered import Reduction
from lamina.collectives.reduction.summation import Epilogue, sum_chunks
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.transport import Completion, end_of

__all__ = ["NativeReduction"]

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
        self._backend_op, self.sum_op = _BACKEND[self.sum_op], "sum"

    def _begin(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        epilogue: Epilogue,
        scratch: torch.Tensor | None,
    ) -> tuple[object, Callable[[], Completion]]:
        # The backend's sum goes straight to the output, if it is neither cast nor added.
        direct = output.dtype == input.dtype and not epilogue.accumulate
        total = output if direct else torch.empty_like(output, dtype=input.dtype)
        return total, partial(self._reduce, output, input, total, epilogue)

    def _reduce(
        self, output: torch.Tensor, input: torch.Tensor, total: torch.Tensor, epilogue: Epilogue
    ) -> Completion:
        work, group = None, self.group
        alone = self.size == 1
        if (alone or not self.scatter) and total.data_ptr() != input.data_ptr():
            total.copy_(input)
        if group is None or alone or input.is_meta:
            pass
        elif self.scatter:
            work = reduce_scatter_single(total, input, group, op=self._backend_op, async_op=True)
        else:
            work = dist.all_reduce(total, op=self._backend_op, group=group, async_op=True)
        return partial(self._finish, work, total, output, epilogue)

    def _finish(
        self, work: Work | None, total: torch.Tensor, output: torch.Tensor, epilogue: Epilogue
    ) -> None:
        """Wait for the backend's sum; bring it, scaled and measured, to where it was asked for."""
        end_of(work)()
        if total is not output or epilogue != Epilogue():
            sum_chunks([total], output, epilogue, self._wire)
