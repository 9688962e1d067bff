"""torch.autocast for Lamina's autograd functions, which autocast itself does not reach."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["under_autocast", "without_autocast"]


def under_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a matrix product to autocast's dtype where it is on.

    The caller casts before it calls the autograd function. So the function's backward sees one
    dtype, and autograd casts the gradients back.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, matrix products keep the dtype of their inputs."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
