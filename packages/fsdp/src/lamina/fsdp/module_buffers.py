"""Buffers of a sharded model: they stay whole, where the model computes, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from lamina.collectives import broadcast
from lamina.ddp import DataParallelAxes
from lamina.fsdp.units import UnitPlan
from lamina.mesh import role_of

__all__ = ["broadcast_buffers", "move_buffers"]


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Put buffers where the model computes, which need not be where it was built.

    Args:
        modules: whose own buffers to move.
        device: where to.
    """
    moved: dict[int, torch.Tensor] = {}  # a buffer that several modules hold stays one
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def broadcast_buffers(
    plan: UnitPlan, dense: DataParallelAxes, expert: DataParallelAxes | None
) -> None:
    """Take the first rank's buffers, as parameters do, once (collective).

    Random features or codebooks would else differ where ranks are seeded differently. Buffers of
    experts go over the experts' axes: ranks along ep hold different ones.

    Args:
        plan: the unit whose own modules' buffers they are.
        dense: data-parallel axes of ordinary parameters.
        expert: those of expert parameters; None where the mesh has none.
    """
    experts = set(_of_experts(plan.module)) if expert is not None else set()
    for module in plan.own_modules():
        axes = expert if expert is not None and id(module) in experts else dense
        for buffer in module._buffers.values():
            if buffer is None or not buffer.numel():
                continue
            sent = buffer.detach().contiguous()
            as_bytes = sent.reshape(-1).view(torch.uint8)  # backends do not know all dtypes
            for group in axes.groups("gather"):
                broadcast(as_bytes, group, src=0).wait()
            if sent.data_ptr() != buffer.data_ptr():
                with torch.no_grad():
                    buffer.copy_(sent)


def _of_experts(root: nn.Module) -> Iterator[int]:
    """`id`s of the modules at and below which all parameters, one at least, are experts'."""
    for module in root.modules():
        roles = [role_of(parameter).expert for parameter in module.parameters()]
        if roles and all(roles):
            yield from (id(below) for below in module.modules())
