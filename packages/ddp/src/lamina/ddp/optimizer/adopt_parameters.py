"""Pointing an optimizer at the parameters it will update from now on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.ddp.group.group import ParameterGroup

__all__ = ["cut_state", "point_optimizer_at", "refuse_optimizer"]


def point_optimizer_at(optimizer: Optimizer, groups: Iterable[ParameterGroup]) -> None:
    """Replace the user's parameters in an optimizer by the main parameters that stand for them.

    The optimizer object, its groups and their hyperparameters stay, so schedulers made before
    stay attached. State it already has is cut like the parameters.

    Args:
        optimizer: any torch optimizer made over the module's parameters.
        groups: the module's groups.

    Raises:
        ValueError: as `refuse_optimizer`.
    """
    places: dict[int, tuple[ParameterGroup, int]] = {
        id(ref.parameter): (group, index)
        for group in groups
        for index, ref in enumerate(group.refs)
    }
    mains = {id(main) for group, _ in places.values() for main in group.main_parameters}
    apart = {
        id(ref.parameter): ref.name
        for group, index in places.values()
        if group.main_parameters[index] is not (ref := group.refs[index]).parameter
    }
    refuse_optimizer(optimizer, mains | places.keys(), apart)
    for group, _ in places.values():
        group.has_optimizer = True
    for settings in optimizer.param_groups:
        settings["params"] = [_main_of(p, places) for p in settings["params"]]
    for parameter in [p for p in optimizer.state if id(p) in places]:
        group, index = places[id(parameter)]
        main = group.main_parameters[index]
        if main is not parameter:
            state = optimizer.state.pop(parameter)
            optimizer.state[main] = {
                name: cut_state(value, group, index) for name, value in state.items()
            }


def refuse_optimizer(
    optimizer: Optimizer, known: Collection[int], apart: Mapping[int, str]
) -> None:
    """Refuse an optimizer that cannot be pointed at main parameters.

    Args:
        optimizer: any.
        known: `id`s of the module's parameters, and of main ones that stand for them.
        apart: names, by `id`, of those that have (or will have) a main parameter beside them.

    Raises:
        ValueError: if the optimizer holds none of the module's parameters, or is an LBFGS (which
            keeps a list of them to itself) and main parameters are others than the module's.
    """
    held = [id(p) for settings in optimizer.param_groups for p in settings["params"]]
    if held and not any(one in known for one in held):
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(held)} parameters and none of them is in the "
            "module: build it with optimizer = ...(model.parameters()) before (or after) sharding "
            "that same model"
        )
    missed = [apart[one] for one in held if one in apart]
    if isinstance(optimizer, torch.optim.LBFGS) and missed:
        raise ValueError(
            f"LBFGS keeps its own list of parameters, and {missed[0]} gets a main "
            "parameter beside it (its weights are cut over ranks, or kept in fewer bits), so it "
            "would train nothing: use strategy 0 with fp32 weights, or another optimizer"
        )


def _main_of(
    parameter: nn.Parameter, places: dict[int, tuple[ParameterGroup, int]]
) -> nn.Parameter:
    if id(parameter) not in places:
        return parameter
    group, index = places[id(parameter)]
    return group.main_parameters[index]


def cut_state(value: object, group: ParameterGroup, index: int) -> object:
    """A state tensor of the parameter's size as this rank's part of it; others as they are."""
    spec = group.layout.specs[index]
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != spec.numel:
        return value
    flat = torch.zeros_like(group.rest.data, dtype=value.dtype)
    start, stop = group.span_in_rest(index)
    first, last = group.layout.within(index, *group.rest.range)
    flat[start:stop].copy_(value.reshape(-1)[first:last])
    return group.member_of(flat, index)
