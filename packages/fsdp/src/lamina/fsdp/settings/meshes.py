"""From a mesh and the settings about it to data-parallel axes, with the caller's own groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lamina.ddp.engine import DataParallelAxes, ModelAxes, check_dimensions, data_parallel_axes
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.mesh import AxisError, ParallelMesh
from lamina.mesh.engine import GroupRef, MeshAxis, axis_if_there, live_group, mesh_axis

Names = str | Sequence[str]
Mesh = ParallelMesh | DeviceMesh

_PARTS, _EXPERT_PARTS = ("tp", "pp"), ("ep", "expert_tp")
"""Dimensions along which ranks hold different parts of the model, and of its experts."""


@dataclass(frozen=True)
class _WithGatherGroup(MeshAxis):
    """An axis whose gathers go over a communicator that the caller made."""

    gather: GroupRef | None = None

    def sibling(self, purpose: str) -> ProcessGroup | None:
        """The caller's communicator for gathers, the axis's own for all else."""
        return live_group(self.gather) if purpose == "gather" else super().sibling(purpose)


def resolve_meshes(
    mesh: Mesh, settings: ShardingSettings
) -> tuple[DataParallelAxes, DataParallelAxes | None]:
    """Dense and expert data-parallel axes; expert ones are None where the mesh has none.

    ValueError says that nothing names the dimension that shards, that a dimension of a `DeviceMesh`
    is neither data-parallel nor known to cut the model, or that a group has other ranks than its
    axis; AxisError that the mesh does not have a name.
    """
    if settings.tp_dim is not None:
        _check_tp(mesh, settings, settings.tp_dim)
    # The words of a ParallelMesh are known. Of a DeviceMesh the user says what shards, or it is the
    # only dimension that is left.
    shard, outer = _shard_dim(mesh, settings), settings.dp_outer_dim
    if outer is None and isinstance(mesh, ParallelMesh):
        outer = "dp_replicate"
    try:
        dense = data_parallel_axes(mesh, shard, outer)
    except AxisError as error:
        raise AxisError(f"dp_shard_dim={shard!r}, dp_outer_dim={outer!r}: {error}") from error
    if isinstance(mesh, DeviceMesh):
        check_dimensions(mesh, dense, {*_PARTS, *_names(settings.tp_dim)}, _REMEDY)
    expert = _expert_axes(mesh, settings, dense)
    _check_hybrid("hybrid_fsdp_group", settings.hybrid_fsdp_group, dense)
    dense = _with_gather("fsdp_group_ag", settings.fsdp_group_ag, dense)
    if expert is not None:
        _check_hybrid("hybrid_fsdp_expt_group", settings.hybrid_fsdp_expt_group, expert)
        return dense, _with_gather("expt_fsdp_group_ag", settings.expt_fsdp_group_ag, expert)
    for name in ("expt_fsdp_group_ag", "hybrid_fsdp_expt_group"):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"{name} is given, and the mesh has no expert axes: pass expt_device_mesh"
            )
    return dense, None


_REMEDY = (
    "If they train the same weights on other data, name the dimension in dp_shard_dim= or "
    "dp_outer_dim= (ep too, with expt_device_mesh= for the experts); if they hold other parts of "
    "the model, in tp_dim=, or pass mesh['dp'] alone"
)


def computing_device(
    module: nn.Module, mesh: Mesh, asked: torch.device | str | int | None
) -> torch.device:
    """Where a model computes: where it was asked to, else on the mesh's kind of device.

    A model that is on an accelerator stays there under a mesh of CPUs (gloo serves both).
    """
    device = torch.device(mesh.device_type if asked is None else asked)
    for parameter in module.parameters() if asked is None else ():
        # Meta parameters have no place yet, and one on the host may still have to be moved.
        if not parameter.is_meta and device.type in ("cpu", parameter.device.type):
            return parameter.device
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def model_axes(mesh: Mesh, settings: ShardingSettings) -> ModelAxes:
    """The tensor- and expert-parallel axes: `tp_dim`, or those named as a ParallelMesh has them."""
    expert = settings.expt_device_mesh or mesh
    tp = axis_if_there(mesh, settings.tp_dim or "tp")
    return ModelAxes(tp, axis_if_there(expert, "expert_tp"), axis_if_there(expert, "ep"))


def _check_tp(mesh: Mesh, settings: ShardingSettings, name: str) -> None:
    try:
        mesh_axis(mesh, name)
    except AxisError as error:
        raise ValueError(f"tp_dim={name!r}: {error}") from error
    data = [*_names(settings.dp_shard_dim), *_names(settings.dp_outer_dim)]
    if name in data:
        raise ValueError(
            f"tp_dim={name!r} is a data-parallel dimension too (dp_shard_dim and dp_outer_dim are "
            f"{data}): ranks along it hold different parts of a weight, not copies"
        )


def _shard_dim(mesh: Mesh, settings: ShardingSettings) -> Names:
    if settings.dp_shard_dim is not None:
        return settings.dp_shard_dim
    if isinstance(mesh, ParallelMesh):
        return "dp_shard_cp"
    # What is left when replicas and tensor-parallel ranks are taken away can only be what shards.
    taken = {settings.tp_dim, *_names(settings.dp_outer_dim)}
    names = mesh.mesh_dim_names or ()
    free = [name for name in names if name not in taken]
    if len(free) != 1:
        raise ValueError(
            f"the mesh has dimensions {names}: say which one shards with dp_shard_dim=, which "
            "replicates with dp_outer_dim=, and which is tensor-parallel with tp_dim="
        )
    return free[0]


def _expert_axes(
    dense_mesh: Mesh, settings: ShardingSettings, dense: DataParallelAxes
) -> DataParallelAxes | None:
    """Axes of expert parameters; gradients are averaged over the dense ranks (docs/ddp.md)."""
    mesh = settings.expt_device_mesh
    if mesh is None:
        mesh = dense_mesh
        # Without expert dimensions, or with one rank along each, experts are like any weights.
        if not isinstance(mesh, ParallelMesh):
            return None
        if mesh.layout.ep == mesh.layout.expert_tp == mesh.layout.tp == 1:
            return None
    if isinstance(mesh, ParallelMesh):
        return data_parallel_axes(mesh, "expert_dp", "dp_replicate", dense.size)
    # A DeviceMesh for experts has the dense one's names, or `expert_dp`. Along ep and expert_tp
    # experts are different already, so a dimension of that name shards dense weights alone.
    names = mesh.mesh_dim_names or ()
    shard = _names(_shard_dim(dense_mesh, settings))
    if not set(shard) <= set(names) and "expert_dp" in names:
        shard = ("expert_dp",)
    shard = tuple(name for name in shard if name not in _EXPERT_PARTS)
    outer = settings.dp_outer_dim
    outer = outer if set(_names(outer)) <= set(names) else None
    axes = data_parallel_axes(mesh, shard or None, outer, dense.size)
    check_dimensions(mesh, axes, {*_PARTS, *_EXPERT_PARTS, *_names(settings.tp_dim)}, _REMEDY)
    return axes


def _with_gather(
    argument: str, group: ProcessGroup | None, axes: DataParallelAxes
) -> DataParallelAxes:
    """The same axes, whose gathers go over the caller's group."""
    if group is None:
        return axes
    members = tuple(dist.get_process_group_ranks(group))
    inner = axes.inner
    # In the axis' order, too: a gather puts pieces where ranks are in their group.
    if members != inner.ranks:
        raise ValueError(
            f"{argument} has ranks {members} and the sharding axis {inner.name!r} has "
            f"{inner.ranks}: pieces would be gathered in the wrong places; make the group over "
            "the axis' ranks in the same order"
        )
    return replace(
        axes,
        inner=_WithGatherGroup(
            inner.name, inner.size, inner.rank, inner.ranks, inner.ref, gather=GroupRef(group)
        ),
    )


def _names(given: Names | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _check_hybrid(argument: str, group: ProcessGroup | None, axes: DataParallelAxes) -> None:
    """A group over both axes has to agree with them."""
    if group is None:
        return
    members = tuple(dist.get_process_group_ranks(group))
    # This rank knows who is on its own row and column; the number says the rest.
    mine = {*axes.outer.ranks, *axes.inner.ranks}
    if len(members) != axes.size or not mine <= set(members):
        raise ValueError(
            f"{argument} has ranks {members}, and the mesh says {axes.size} ranks with at least "
            f"{sorted(mine)} among them ({axes.describe()}): flatten dp_outer_dim and dp_shard_dim "
            "of the same mesh"
        )
