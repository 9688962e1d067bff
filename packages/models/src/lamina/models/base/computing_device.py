"""Which kind of device computes: that of a tensor, and of meta tensors the one that is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.models.compat import FakeTensor

_PLANNED: ContextVar[str] = ContextVar("lamina.models.planned", default="meta")

HostCopy = Literal["copy_to_host", "copy_from_host"]
_COPIES: ContextVar[Callable[[HostCopy, int], Any] | None] = ContextVar(
    "lamina.models.copies", default=None
)


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


def planned_copy(direction: HostCopy, nbytes: int) -> Any:
    """Tell a plan of a copy without values; an event of it, or None if nobody plans."""
    note = _COPIES.get()
    return None if note is None else note(direction, nbytes)


@contextmanager
def copies_planned_by(note: Callable[[HostCopy, int], Any]) -> Iterator[None]:
    """Inside, `note` is told of copies without values, and returns an event of each."""
    before = _COPIES.set(note)
    try:
        yield
    finally:
        _COPIES.reset(before)


@contextmanager
def planned_as(device_type: str) -> Iterator[None]:
    """Inside, meta and fake tensors are planned as tensors of this type of device."""
    before = _PLANNED.set(device_type)
    try:
        yield
    finally:
        _PLANNED.reset(before)
