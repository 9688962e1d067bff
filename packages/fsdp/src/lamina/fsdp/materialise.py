"""Giving a model that was built on the meta device its first values, unit by unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lamina.fsdp.units import UnitPlan

__all__ = ["materialise_unit"]


def materialise_unit(
    plan: UnitPlan,
    device: torch.device,
    init: Callable[[nn.Module], None] | None = None,
) -> None:
    """Allocate a unit's meta parameters and buffers and run their modules' own initialisation.

    Parameters keep their identity (and roles), so optimizers and ties made before still hold.

    Args:
        plan: the unit.
        device: where its tensors go.
        init: initialises one module's own tensors; None calls `module.reset_parameters()`.

    Raises:
        ValueError: for a module with meta tensors and no way to initialise them.
    """
    modules: dict[int, nn.Module] = {}
    for ref in plan.refs:
        if not ref.parameter.is_meta:
            continue
        real = nn.Parameter(
            torch.empty_like(ref.parameter, device=device),
            requires_grad=ref.parameter.requires_grad,
        )
        real.__dict__.update(ref.parameter.__dict__)
        torch.utils.swap_tensors(ref.parameter, real)  # type: ignore[no-untyped-call]
        for reference, _ in ref.owners:
            if (owner := reference()) is not None:
                modules.setdefault(id(owner), owner)
    for module in plan.own_modules():
        meta = [name for name, buffer in module._buffers.items() if _is_meta(buffer)]
        for name in meta:
            buffer = module._buffers[name]
            module._buffers[name] = torch.empty_like(buffer, device=device)  # type: ignore[arg-type]
        if meta:
            modules.setdefault(id(module), module)
    for module in modules.values():
        _initialise(module, plan, init)


def _initialise(
    module: nn.Module, plan: UnitPlan, init: Callable[[nn.Module], None] | None
) -> None:
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        names = [n for n, _ in module.named_parameters(recurse=False)]
        names += [n for n, _ in module.named_buffers(recurse=False)]
        raise ValueError(
            f"{type(module).__name__} in unit {plan.name or '(root)'} was built on the meta device "
            f"and has no reset_parameters() to give {', '.join(names)} first values: add one, or "
            "pass init_module=function(module)"
        )
    reset()


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta
