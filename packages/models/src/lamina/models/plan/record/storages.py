"""Which storages count in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamina.models.compat import FakeTensor, FakeTensorMode


@dataclass(frozen=True)
class Counted:
    """Says which storages count: those of a type of device, or of fake tensors in their place."""

    device: str
    fake: FakeTensorMode | None = None

    def storage(self, tensor: Tensor | None) -> torch.UntypedStorage | None:
        """The storage of a tensor; None if it does not count, or has none."""
        if tensor is None or not self.has(tensor) or tensor.layout != torch.strided:
            return None
        try:
            return tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
            return None

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        if isinstance(tensor, FakeTensor):  # compilers leave some of their own
            return tensor.fake_mode is self.fake
        return self.fake is None and tensor.device.type == self.device


@cache
def takes_operators_apart(kind: type) -> bool:
    """Whether a subclass of tensors runs operators on the tensors that it wraps."""
    # Fake tensors do too, but have no memory: what they run is of no interest here.
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def local_memory(tensor: Tensor) -> Tensor:
    """The memory of a tensor that wraps another one, such as a DTensor."""
    inner: Tensor = getattr(tensor, "_local_tensor", getattr(tensor, "_local", tensor))
    return inner
