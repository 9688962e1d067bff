"""Refusals: a wrong call is named before any byte is sent.

gloo kills the process on mismatched dtypes and lets mismatched sizes pass in silence, so what one
rank can see is checked at every call, and what only the ranks together can see on request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "WIRE_DTYPES",
    "group_rank",
    "group_size",
    "require_disjoint",
    "require_flat",
    "require_same_device",
    "where",
]

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; None is a group of one.

    Raises:
        TypeError: it is no process group.
    """
    try:
        return 1 if group is None else group.size()
    except (AttributeError, TypeError):
        raise _no_group(group) from None


def group_rank(group: ProcessGroup | None) -> int:
    """Place of this rank in `group`.

    Raises:
        TypeError: it is no process group.
    """
    try:
        return 0 if group is None else group.rank()
    except (AttributeError, TypeError):
        raise _no_group(group) from None


def _no_group(given: object) -> TypeError:
    return TypeError(
        f"{given!r} is no process group: pass axis.group or axis.sibling(purpose) of a MeshAxis, "
        "mesh.group(name) of a ParallelMesh, or None for a group of one"
    )


def where(group: ProcessGroup | None) -> str:
    """Name this rank's place for an error message."""
    if group is None:
        return "(group of one)"
    return f"(rank {group.rank()} of {group.size()} in group '{group.group_desc}')"


def require_flat(op: str, name: str, tensor: torch.Tensor, group: ProcessGroup | None) -> None:
    """Refuse a tensor that is not one contiguous run of elements.

    Raises:
        ValueError: more than one dimension, or strides.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{op} {where(group)}: `{name}` must be flat and contiguous, but has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; pass a flat buffer, or "
            f"`.contiguous().view(-1)` of a temporary"
        )


def require_same_device(
    op: str, group: ProcessGroup | None, **tensors: torch.Tensor | None
) -> torch.device:
    """Return the one device of `tensors`.

    Raises:
        ValueError: they lie on several.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    devices = {name: tensor.device for name, tensor in present.items()}
    if len(set(devices.values())) != 1:
        listing = ", ".join(f"`{name}` on {device}" for name, device in devices.items())
        raise ValueError(f"{op} {where(group)}: tensors must share one device, got {listing}")
    return next(iter(devices.values()))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    if first.device.type == "meta":
        return False
    (start, stop), (other_start, other_stop) = _extent(first), _extent(second)
    return start < other_stop and other_start < stop


def require_disjoint(
    op: str,
    group: ProcessGroup | None,
    first: tuple[str, torch.Tensor],
    second: tuple[str, torch.Tensor],
    *,
    unless: str = "",
) -> None:
    """Refuse two contiguous tensors that share memory.

    Raises:
        ValueError: they overlap. `unless` tells what overlap would have been allowed.
    """
    if overlap(first[1], second[1]):
        hint = f"; {unless}" if unless else ""
        raise ValueError(
            f"{op} {where(group)}: `{first[0]}` and `{second[0]}` share memory{hint}; pass "
            f"distinct buffers"
        )
