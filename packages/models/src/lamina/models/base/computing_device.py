"""Which kind of device computes: that of a tensor, and of meta tensors the one that is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_PLANNED: ContextVar[str] = ContextVar("lamina.models.planned", default="meta")


def computes_on(where: Tensor | torch.device) -> str:
    """The device's type, `cuda` or `cpu`; of meta tensors the one that they are planned as.

    Kernels are chosen by it, so that a plan has those of the run.
    """
    kind = where.device.type if isinstance(where, Tensor) else where.type
    # Dynamo traces calls with real tensors, and knows no context variable.
    return kind if kind != "meta" else _PLANNED.get()


@contextmanager
def planned_as(device_type: str) -> Iterator[None]:
    """Inside, meta tensors are planned as tensors of this type of device."""
    before = _PLANNED.set(device_type)
    try:
        yield
    finally:
        _PLANNED.reset(before)
