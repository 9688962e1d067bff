"""Tensors that tensor or expert parallelism has cut, as parts of the whole model's.

A tp rank's parameter is an ordinary tensor with a shape of its own. Under one name the ranks would
store different tensors, and a restore on another number of tp ranks could not work. So such a
tensor is shown to DCP as the part of the whole that it is. `lamina.fsdp` shows its models' tensors
so itself, and what it says counts; bare and DDP-wrapped modules are done here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import TensorPart, TensorRegion
from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.state.optimizer_names import parameters_of
from lamina.mesh import ParallelMesh, Role, role_of
from lamina.mesh.engine import MeshAxis, axis_if_there

_AXES = ("tp", "expert_tp", "ep")
_LAYOUT = ("pp", "cp", "tp")  # with the number of ranks they say what a rank's number means
Mesh = ParallelMesh | DeviceMesh | None


@dataclass(frozen=True)
class Hints:
    """What the caller says of the models: the axes, where modules don't, and names.

    `rename` goes from a name that this rank's module has to the name in the whole model.
    """

    mesh: Mesh = None
    rename: Callable[[str], str] = str


class CutTensors:
    """Knows which parameters are cut, and where in the whole model's tensors they lie.

    The modules in `state` are searched for regions, and for the axes that they were built on.
    """

    def __init__(self, state: Mapping[str, Any], hints: Hints) -> None:
        self.rename, self._mesh = hints.rename, hints.mesh
        self._axes: dict[str, MeshAxis] = {}
        self._shown: dict[int, TensorRegion] = {}  # by id of the parameter
        self._modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
        for module in self._modules:
            self._search(module)

    def _search(self, module: torch.nn.Module) -> None:
        named = parameters_of(module)
        if not any(_may_be_cut(role_of(parameter)) for _, parameter in named):
            return
        for submodule in module.modules():
            for axis in _axes_in(submodule, _AXES):
                self._axes.setdefault(axis.name, axis)
        tree = module.state_dict()
        for name, parameter in named:
            if isinstance(tree.get(name), TensorPart):
                self._shown[id(parameter)] = tree[name].tensor_region

    def coordinates(self) -> dict[str, tuple[int, int]]:
        """Return axis -> (this rank's place, size) of those beside data parallelism.

        From the mesh or, without one, from the modules, as far as they hold axes.
        """
        axes: dict[str, MeshAxis] = {}
        if self._mesh is None:
            modules = (each for module in self._modules for each in module.modules())
            for axis in (axis for each in modules for axis in _axes_in(each, _LAYOUT)):
                axes.setdefault(axis.name, axis)
        for name in _LAYOUT:
            if (on_mesh := self._on_mesh(name)) is not None:
                axes[name] = on_mesh
        return {n: (axes[n].rank, axes[n].size) for n in _LAYOUT if n in axes and axes[n].size > 1}

    def _on_mesh(self, axis: str) -> MeshAxis | None:
        return None if self._mesh is None else axis_if_there(self._mesh, axis)

    def region_of(self, name: str, parameter: torch.Tensor) -> TensorRegion | None:
        """Return where this rank's parameter lies in the whole model's; None if it is whole.

        CheckpointError says that it is marked as cut and nothing says over which ranks.
        """
        role = role_of(parameter)
        if not _may_be_cut(role) or hasattr(parameter, "placements"):
            return None
        if id(parameter) in self._shown:
            return self._shown[id(parameter)]
        tensor = None
        if role.tp_shard_dim is not None:
            tensor = self._axis("expert_tp" if role.expert else "tp", name)
        return TensorRegion.of_part(parameter.shape, role, tensor, self._axis("ep", None))

    def _axis(self, axis: str, name: str | None) -> MeshAxis | None:
        """Find an axis of more than one rank; `name` of a parameter that must have it."""
        mesh_axis = self._axes.get(axis)
        if mesh_axis is None and self._mesh is not None:
            mesh_axis = self._on_mesh(axis)
        elif mesh_axis is None and axis == "expert_tp" and "tp" in self._axes:
            mesh_axis = self._axes["tp"]  # experts cut as dense layers are
        elif mesh_axis is None and name and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                f"'{name}' is marked as cut over the axis {axis}, but neither its module nor the "
                "CheckpointManager knows that axis: pass mesh= to CheckpointManager"
            )
        return None if mesh_axis is None or mesh_axis.size == 1 else mesh_axis


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether a tensor says itself which boxes of a larger one this rank holds."""
    return hasattr(tensor, "__create_chunk_list__")


def _may_be_cut(role: Role) -> bool:
    return role.tp_shard_dim is not None or role.expert


def _axes_in(module: torch.nn.Module, names: Sequence[str]) -> Iterator[MeshAxis]:
    """Yield the axes that a module holds, by itself or in a dataclass of axes."""
    for value in vars(module).values():
        if isinstance(value, MeshAxis):
            values: list[Any] = [value]
        else:
            values = list(vars(value).values()) if is_dataclass(value) else []
        yield from (axis for axis in values if isinstance(axis, MeshAxis) and axis.name in names)


def as_part(
    tensor: torch.Tensor, region: TensorRegion | None, parameter: torch.Tensor
) -> torch.Tensor:
    """Show a tensor of the shape of `parameter` as the part that `parameter` is.

    It is the parameter as a state_dict holds it, or a state of the same shape, which is the same
    part; others (step counts) are left alone.
    """
    if region is None or tensor.shape != parameter.shape or isinstance(tensor, TensorPart):
        return tensor
    if not isinstance(tensor, ShardedTensor) and hasattr(tensor, "placements"):
        return tensor
    return TensorPart(tensor.detach(), region)
