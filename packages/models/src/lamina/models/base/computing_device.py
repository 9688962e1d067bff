"""Which kind of device computes: that of a tensor, and of meta tensors the one that is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lamina.models.compat import FakeTensor

_PLANNED: ContextVar[str] = ContextVar("lamina.models.planned", default="meta")


def computes_on(where: Tensor | torch.device) -> str:
    """The device's type, `cuda` or `cpu`; of tensors without values the one they are planned as.

    Kernels are chosen by it, so that a plan has those of the run.
    """
    kind = where.device.type if isinstance(where, Tensor) else where.type
    if torch.compiler.is_compiling():
        return traced_for(kind)
    return kind if isinstance(where, Tensor) and has_values(where) else _planned_for(kind)


def traced_for(kind: str) -> str:
    """The type of device that a compiler's graph is for; a plan of compiled blocks replaces it.

    Dynamo takes what a plan consists of for tensors with values, and knows no context variable.
    """
    return kind


def _planned_for(kind: str) -> str:
    planned = _PLANNED.get()
    return kind if planned == "meta" else planned


def has_values(tensor: Tensor) -> bool:
    """False of meta tensors and of torch's fake ones, which a plan consists of."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@contextmanager
def planned_as(device_type: str) -> Iterator[None]:
    """Inside, meta and fake tensors are planned as tensors of this type of device."""
    before = _PLANNED.set(device_type)
    try:
        yield
    finally:
        _PLANNED.reset(before)
