"""Results of operators on meta tensors, which depend on the shapes of their arguments alone.

torch finds most of these in Python, which takes ten times as long as to make the tensors. A step of
many layers calls the same operators with the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.models.plan.record.operator_costs import tensors_in


class _Shape(NamedTuple):
    """What a new tensor is made by."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        """A tensor of its own memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class Remembered:
    """Calls operators, or gives what they gave to arguments of the same shapes."""

    def __init__(self) -> None:
        self._made: dict[Any, list[_Shape] | _Shape | None] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of an operator, new tensors for each call."""
        key = (func, _key(args), _key(kwargs)) if _makes_new_tensors(func) else None
        if key is None or any(part is _UNKNOWN for part in key):
            return func(*args, **kwargs)
        shapes = self._made.get(key, _UNKNOWN)
        if isinstance(shapes, _Shape):
            return shapes.made()
        if isinstance(shapes, list):
            return tuple(shape.made() for shape in shapes)
        result = func(*args, **kwargs)
        if shapes is _UNKNOWN:
            self._made[key] = _shapes_of(result, tensors_in((args, kwargs)))
        return result


_UNKNOWN = object()
"""Stands for arguments whose shapes do not say all, and for results that are not known yet."""
_PLAIN: tuple[type, ...] = (
    *(int, float, complex, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _key(argument: Any) -> Any:
    """What an operator's result can depend on."""
    if isinstance(argument, Tensor):
        if argument.device.type != "meta" or argument.layout != torch.strided:
            return _UNKNOWN
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        parts = tuple(map(_key, argument))
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else parts
    if isinstance(argument, dict):
        return _key([*argument.items()])
    # 1 and 1.0 and True are equal as keys, and promote otherwise.
    return (type(argument), argument) if isinstance(argument, _PLAIN) else _UNKNOWN


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether an operator of torch's returns neither a view nor one of its arguments."""
    schema = func._schema
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns)]
    return func.namespace == "aten" and not any(aliases)


def _shapes_of(result: Any, inputs: list[Tensor]) -> list[_Shape] | _Shape | None:
    """How to make the results again; None if they are not all of the kind that can be."""
    several = isinstance(result, tuple)
    results = list(result) if several else [result]
    taken = {tensor.untyped_storage()._cdata for tensor in inputs}
    shapes = []
    for tensor in results:
        if type(tensor) is not Tensor or tensor.device.type != "meta":
            return None
        storage = tensor.untyped_storage()
        shape = _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        new = shape.made().untyped_storage().nbytes() == storage.nbytes()
        if not new or storage._cdata in taken or tensor.layout != torch.strided:
            return None
        taken.add(storage._cdata)
        shapes.append(shape)
    return shapes if several else shapes[0]
