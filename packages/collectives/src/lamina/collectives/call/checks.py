"""Refusals: a wrong call is named before any byte is sent.

gloo kills the process on mismatched dtypes and lets mismatched sizes pass in silence, so what one
rank can see is checked at every call, and what only the ranks together can see on request.
"""

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.transport.groups import group_size, where

__all__ = [
    "WIRE_DTYPES",
    "require_disjoint",
    "require_divisible",
    "require_flat",
    "require_same_device",
]

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    if first.device.type == "meta":
        return False
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes and other_start < start + first.nbytes


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
    if _overlap(first[1], second[1]):
        hint = f"; {unless}" if unless else ""
        raise ValueError(
            f"{op} {where(group)}: `{first[0]}` and `{second[0]}` share memory{hint}; pass "
            f"distinct buffers"
        )


def require_divisible(
    what: str, tensor: torch.Tensor, dim: int, group: ProcessGroup | None
) -> None:
    """Refuse a dimension that can't be cut into equal pieces.

    Raises:
        ValueError: names the shape, the dimension and the size of the group.
    """
    size = group_size(group)
    if tensor.shape[dim] % size:
        raise ValueError(
            f"{what} {where(group)}: dimension {dim} of shape {tuple(tensor.shape)} has size "
            f"{tensor.shape[dim]}, which is not divisible by the group's {size} ranks; pad it to "
            f"{-(-tensor.shape[dim] // size) * size} or choose another dimension"
        )
