"""Refuse parameters that are no longer what their buffers were made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.ddp.group import ParameterGroup

__all__ = ["refuse_changed"]


def refuse_changed(group: ParameterGroup) -> None:
    """Raise if somebody has converted, moved or unfrozen a group's parameters since it was made.

    Raises:
        RuntimeError: after `.half()` or `.to()`, which took them out of their buffers.
        ValueError: if the group has no gradients, and a parameter wants some by now.
    """
    ref, main, rest = group.refs[0], group.main_parameters[0], group.rest.data
    for parameter, dtype, device in (
        (ref.parameter, group.dtypes.weights, group.device),
        (main, rest.dtype, rest.device),
    ):
        if parameter.dtype != dtype or parameter.device != device:
            raise RuntimeError(
                f"{ref.name} is {parameter.dtype} on {parameter.device}, and was {dtype} on "
                f"{device} in its buffer, which nobody would update now: convert or move a model "
                "before it is wrapped or sharded"
            )
    for ref in () if group.requires_grad else group.refs:
        if ref.parameter.requires_grad:
            raise ValueError(
                f"{ref.name} was frozen when the model was wrapped and requires_grad now: it "
                "has no gradient buffer, so no rank would sum its gradient. Wrap the model "
                "with requires_grad=True and freeze parameters afterwards"
            )
