"""A gradient scaler whose ranks agree, over the whole mesh, on whether a step overflowed."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.norm.shares import whole_mesh
from lamina.mesh import ParallelMesh

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):  # type: ignore[misc, unused-ignore]
    """`torch.amp.GradScaler` for meshes with tensor, pipeline or expert parallelism.

    Each rank there looks at other parameters. A plain scaler lets those of one rank overflow and
    the others step: weights, scales and step counts then differ for good.

    Args:
        mesh: the mesh the model was wrapped over.
        settings: of `torch.amp.GradScaler`; `device` is the mesh's unless given.
    """

    def __init__(self, mesh: ParallelMesh | DeviceMesh, **settings: Any) -> None:
        settings.setdefault("device", mesh.device_type)
        super().__init__(**settings)
        self._axes = whole_mesh(mesh)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = found_inf.clone()  # a rank without gradients takes part as well
        for overflow in found.values():
            anywhere = torch.maximum(anywhere, overflow.to(anywhere.device))
        for axis in self._axes:
            all_reduce_small([anywhere], axis.sibling("reduce"), op="max")
        return {anywhere.device: anywhere}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; the whole mesh steps, or nobody does."""
        optimizer.__dict__["overflow_agreed"] = True
        return super().step(optimizer, *args, **kwargs)
