"""Buffers of modules (running statistics, tables, random features), brought together over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from lamina.collectives.engine import broadcast
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.mesh import role_of

__all__ = ["broadcast_buffers"]


def broadcast_buffers(
    root: nn.Module,
    modules: Iterable[nn.Module],
    dense: DataParallelAxes,
    expert: DataParallelAxes | None,
) -> None:
    """Take the first rank's buffers, as parameters do (one collective for all of one device).

    Random features or codebooks would else differ where ranks are seeded differently. Buffers of
    experts go over the experts' axes: ranks along ep hold different ones.

    Args:
        root: the model, or the unit, that the modules are in.
        modules: those whose own buffers are sent.
        dense: data-parallel axes of ordinary parameters.
        expert: those of expert parameters; None where the mesh has none.
    """
    experts = set(_of_experts(root)) if expert is not None else set()
    found: dict[tuple[bool, torch.device], list[torch.Tensor]] = {}
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.numel() and not buffer.is_meta:
                found.setdefault((id(module) in experts, buffer.device), []).append(buffer)
    for (of_expert, _), buffers in found.items():
        axes = expert if of_expert and expert is not None else dense
        _send(buffers, axes)


def _send(buffers: list[torch.Tensor], axes: DataParallelAxes) -> None:
    # Bytes, because backends do not know all dtypes.
    sent = [b.detach().contiguous().reshape(-1).view(torch.uint8) for b in buffers]
    together = torch.cat(sent)
    for group in axes.groups("gather"):
        broadcast(together, group, src=0).wait()
    pieces = torch.split(together, [piece.numel() for piece in sent])
    with torch.no_grad():
        for buffer, piece in zip(buffers, pieces, strict=True):
            # A copy, because a piece may begin where its dtype may not.
            buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


def _of_experts(root: nn.Module) -> Iterator[int]:
    """`id`s of the modules at and below which all parameters, one at least, are experts'."""
    for module in root.modules():
        roles = [role_of(parameter).expert for parameter in module.parameters()]
        if roles and all(roles):
            yield from (id(below) for below in module.modules())
