"""Where torch 2.11, 2.12 and 2.13 differ."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

__all__ = ["all_gather_single", "reduce_scatter_single"]


def _first(*names: str) -> Any:
    """Return the first of `names` that this torch.distributed has."""
    for name in names:
        if hasattr(dist, name):
            return getattr(dist, name)
    raise RuntimeError(f"torch {torch.__version__} has none of torch.distributed.{names}")


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, *, async_op: bool = False
) -> Work | None:
    """Torch's own all-gather into one tensor, under the name this version does not warn about."""
    function = _first("all_gather_single", "all_gather_into_tensor")
    return cast("Work | None", function(output, input, group=group, async_op=async_op))


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Work | None:
    """Torch's own reduce-scatter of one tensor, under the name this version does not warn about."""
    function = _first("reduce_scatter_single", "reduce_scatter_tensor")
    return cast("Work | None", function(output, input, op=op, group=group, async_op=async_op))
