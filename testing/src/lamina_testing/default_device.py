"""The device of tensors for which a body names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._device import DeviceContext, _device_constructors


class DefaultDevice(DeviceContext):
    """The device of tensors that a body makes, also of those drawn from a generator of the CPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        drawn_from = named.get("generator")
        chosen = named.get("device") or function not in _device_constructors()
        if drawn_from is None or drawn_from.device == self.device or chosen:
            return super().__torch_function__(function, types, arguments, named)  # type: ignore[no-untyped-call]
        return function(*arguments, **named, device=drawn_from.device).to(self.device)
