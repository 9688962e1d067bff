"""Tensors that tensor parallelism has cut, as parts of the whole model's.

A tp rank's parameter is an ordinary tensor with a shape of its own. Under one name the ranks would
store different tensors, and a restore on another number of tp ranks could not work. So such a
tensor is shown to DCP as the part of the whole that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import Region, ShardedTensor, TensorPart
from lamina.checkpoint.errors import CheckpointError
from lamina.mesh import MeshAxis, ParallelMesh, mesh_axis, role_of


class Parts:
    """Knows which parameters are parts.

    Args:
        state: the modules in it are searched for the tp axis that they were built on.
        mesh: names the axis where modules don't.

    """

    def __init__(
        self, state: Mapping[str, Any], mesh: ParallelMesh | DeviceMesh | None = None
    ) -> None:
        self._mesh = mesh
        self._axes: dict[str, MeshAxis] = {}
        for value in state.values():
            if isinstance(value, torch.nn.Module):
                self._search(value)

    def _search(self, module: torch.nn.Module) -> None:
        for submodule in module.modules():
            for value in vars(submodule).values():
                if isinstance(value, MeshAxis) and value.name in ("tp", "expert_tp"):
                    self._axes.setdefault(value.name, value)

    def region(self, name: str, parameter: torch.Tensor) -> Region | None:
        """Return where this rank's parameter lies in the whole model's; None if it is whole.

        Raises:
            CheckpointError: it is marked as cut and nothing says over which ranks.

        """
        role = role_of(parameter)
        if role.tp_shard_dim is None or hasattr(parameter, "placements"):
            return None
        axis = self._axis("expert_tp" if role.expert else "tp", name)
        if axis is None or axis.size == 1:
            return None
        dim, shape = role.tp_shard_dim, list(parameter.shape)
        shape[dim] *= axis.size
        return Region.whole(shape).cut(dim, axis.rank, axis.size, role.tp_blocks)

    def _axis(self, axis: str, name: str) -> MeshAxis | None:
        if axis in self._axes:
            return self._axes[axis]
        mesh = self._mesh
        if isinstance(mesh, DeviceMesh) and axis not in (mesh.mesh_dim_names or ()):
            return None
        if mesh is not None:
            return mesh_axis(mesh, axis)
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                f"'{name}' is marked as cut over the axis {axis}, but neither its module nor the "
                "CheckpointManager knows that axis: pass mesh= to CheckpointManager"
            )
        return None


def as_part(tensor: torch.Tensor, region: Region | None, held: torch.Tensor) -> torch.Tensor:
    """Show a tensor of the parameter's shape as the part that the parameter is.

    Args:
        tensor: the parameter as a state_dict holds it, or a state of the same shape, which is the
            same part; others (step counts) are left alone.
        region: of the parameter.
        held: the parameter.

    """
    if region is None or tensor.shape != held.shape or isinstance(tensor, TensorPart):
        return tensor
    if not isinstance(tensor, ShardedTensor) and hasattr(tensor, "placements"):
        return tensor
    return TensorPart(tensor.detach(), region)
