"""Where torch 2.11, 2.12 and 2.13 differ, and the few things torch says only in private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["all_gather_single", "backend_name", "reduce_scatter_single", "timeout_of"]


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


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves tensors on `device` in `group` ("gloo", "nccl", "fake").

    Raises:
        ValueError: the group has no backend for that device.
    """
    try:
        return str(group._get_backend(torch.device(device.type)).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"process group '{group.group_desc}' has no backend for {device.type} tensors; start "
            f"the world with init_distributed() (cpu:gloo,cuda:nccl on GPUs), or pass tensors on "
            f"a device that the group serves"
        ) from error


def timeout_of(group: ProcessGroup) -> float:
    """Seconds after which the group's CPU backend gives up; torch's default if it doesn't say."""
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())
