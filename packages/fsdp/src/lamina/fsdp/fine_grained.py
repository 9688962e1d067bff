"""Units as small as modules: `enable_fine_grained_param_gather`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lamina.ddp import ParameterRef
from lamina.fsdp.units import UnitPlan

__all__ = ["refine"]


def refine(root: nn.Module, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Cut each unit into the modules that hold its parameters.

    A module below another one that holds parameters stays with it: `nn.MultiheadAttention` reads
    the weight of its `out_proj` without calling it. Tied parameters stay where they were.

    Args:
        root: the whole model.
        plans: its units, the root first.

    Returns:
        The units, the root first, the others in order of registration.
    """
    order = {id(module): (place, name) for place, (name, module) in enumerate(root.named_modules())}
    owned: dict[str, list[ParameterRef]] = {plan.name: [] for plan in plans}
    for plan in plans:
        holders = {_holder(ref, order) for ref in plan.refs} - {None}
        for ref in plan.refs:
            name = _holder(ref, order)
            outermost = plan.name if name is None else _outermost(name, plan.name, holders)
            owned.setdefault(outermost, []).append(ref)
    modules = {name: root.get_submodule(name) for name in owned if owned[name] or not name}
    names = sorted(modules, key=lambda name: order[id(modules[name])][0])
    return [
        UnitPlan(
            name,
            modules[name],
            tuple(owned[name]),
            tuple(
                modules[other]
                for other in names
                if other != name and (not name or other.startswith(name + "."))
            ),
        )
        for name in names
    ]


def _holder(ref: ParameterRef, order: dict[int, tuple[int, str]]) -> str | None:
    """The module that alone holds a parameter; None if several do."""
    owners = {id(module) for reference, _ in ref.owners if (module := reference())}
    return order[owners.pop()][1] if len(owners) == 1 else None


def _outermost(name: str, unit: str, holders: set[str | None]) -> str:
    """The outermost module at or above `name`, inside the unit, that holds parameters itself."""
    if unit and unit in holders:
        return unit
    start = len(unit) + 1 if unit else 0
    path = name
    parts = name[start:].split(".") if name != unit else []
    for depth in range(1, len(parts)):
        above = name[:start] + ".".join(parts[:depth])
        if above in holders:
            path = above
            break
    return path
