"""Which storages count in a plan, and which of them are there before a step."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lamina.models.compat import FakeTensor, FakeTensorMode, TorchDispatchMode
from lamina.models.plan.record.operator_costs import tensors_in


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


class StoragesMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the storages that operators make inside, as long as something refers to them."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch may compile inside. What a compiler makes is gone once it has compiled."""
        return True

    def alive(self) -> list[torch.UntypedStorage]:
        """Those that are there now, in the order in which they were made."""
        referred = (reference() for reference in self._made.values())
        # Not `if storage`: one that was resized to nothing is false, and gets its memory back.
        return [storage for storage in referred if storage is not None]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and remember what its results are stored in."""
        if any(map(takes_operators_apart, types)):
            return NotImplemented  # the subclass goes first; its operators come back here
        result = func(*args, **kwargs or {})
        for tensor in tensors_in(result):
            if (storage := self._counted.storage(tensor)) is not None:
                self._remember(storage)
        return result

    def _remember(self, storage: torch.UntypedStorage) -> None:
        key, made = storage._cdata, self._made
        if key in made and made[key]() is not None:
            return

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if made.get(key) is reference:
                del made[key]

        made.pop(key, None)  # so that it comes last
        made[key] = weakref.ref(storage, forget)


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
