"""One axis of a mesh as one rank sees it: its ranks, this rank's index, its process group.

This is all that the layers above need of a mesh, whether it is a ParallelMesh or any torch
DeviceMesh with named dimensions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh.errors import AxisError
from lamina.mesh.groups.hosts import make_host_groups
from lamina.mesh.groups.process_groups import GroupRef, group_of, group_ref, live_group, watch_mesh

MeshT = TypeVar("MeshT")


@dataclass(frozen=True)
class MeshAxis:
    """One axis (or several taken as one) through this rank.

    Attributes:
        name: the axis' name; several axes taken as one are joined with "_", outer first.
        size: ranks on the axis.
        rank: this rank's place, 0 <= rank < size. Equals its rank in `group`.
        ranks: global ranks in axis order.
        ref: refers to the process group over `ranks`; None for an axis of one rank.
        apart: names of other axes that have cut what lies along this one, for those who ask for a
            norm of many tensors.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    ref: GroupRef | None
    apart: tuple[str, ...] = ()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group over `ranks`; None for an axis of one rank, which needs none.

        RuntimeError: it is destroyed.
        """
        return live_group(self.ref)

    def sibling(self, purpose: str) -> dist.ProcessGroup | None:
        """A second communicator over the same ranks, made at the first call and kept.

        Two collectives on one NCCL communicator run one after the other even on two streams, so
        whoever wants a gather beside a reduction asks for `sibling("gather")`. The first call is
        collective over the axis' ranks. `sibling("reduce")` is for sums, so where the axis spans
        several hosts the groups inside and between hosts are made with it.

        `purpose` becomes part of the description of the group, as in "dp_shard:gather". An axis of
        one rank has None.
        """
        # One rank has nobody to talk to, on whichever communicator.
        if self.ref is None:
            return None
        if purpose not in self._siblings:
            if not purpose:
                raise ValueError(
                    "sibling('') would be the axis' own group: name what the second communicator "
                    "is for, such as 'gather'."
                )
            made = group_of(_described_axis(self), self.ranks, purpose)
            if purpose == "reduce":
                make_host_groups(made)
            self._siblings[purpose] = GroupRef(made)
        return self._siblings[purpose].group

    @cached_property
    def _siblings(self) -> dict[str, GroupRef]:
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        # A copied module talks to the same ranks over the same communicator.
        return self


class NamedAxes(Protocol):
    """What gives its axes by name. `ParallelMesh` does, and a torch DeviceMesh does not."""

    def axis(self, name: str | Sequence[str]) -> MeshAxis:
        """The axis `name`, or several axes, outer first, taken as one."""


def mesh_axis(mesh: NamedAxes | DeviceMesh, name: str | Sequence[str]) -> MeshAxis:
    """The axis `name` of any mesh, or several axes taken as one.

    Args:
        mesh: a ParallelMesh, or a torch DeviceMesh (or submesh) whose dimensions have names.
            Dimensions that torch has flattened (`mesh["dp", "cp"]._flatten("dp_cp")`) count.
        name: an axis' name, or names outer first: `("dp_replicate", "dp_shard")`. Taking several
            as one may make a process group: then the first call is collective over its ranks.

    Raises:
        AxisError: no such axis (the message lists those there are), names out of order or twice,
            or this rank is not on the mesh.
        TypeError: `mesh` is no mesh.
    """
    if isinstance(mesh, DeviceMesh):
        return _device_mesh_axis(mesh, (name,) if isinstance(name, str) else tuple(name))
    if not hasattr(mesh, "axis"):
        raise TypeError(
            f"{mesh!r} is no mesh: pass what ParallelLayout(...).build() returns, or a torch "
            "DeviceMesh with named dimensions."
        )
    return mesh.axis(name)


def axis_if_there(mesh: NamedAxes | DeviceMesh, name: str) -> MeshAxis | None:
    """The axis `name` of any mesh; None of a DeviceMesh without a dimension of that name.

    AxisError: a ParallelMesh has no such axis.
    """
    if isinstance(mesh, DeviceMesh) and name not in (mesh.mesh_dim_names or ()):
        return None
    return mesh_axis(mesh, name)


def named_mesh(mesh: MeshT) -> MeshT:
    """A mesh whose dimensions have names: a DeviceMesh of one unnamed dimension is `dp_shard`.

    That is how most users of FSDP2 make theirs. It keeps its process group. Other meshes come back
    as they are.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names or mesh.ndim != 1:
        return mesh
    named = DeviceMesh.from_group(
        mesh.get_group(), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=("dp_shard",)
    )
    return cast("MeshT", named)


def _device_mesh_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> MeshAxis:
    # A mesh holds its groups since torch 2.13, and would keep them beyond the end of the job.
    watch_mesh(mesh)
    mesh = _flattened_by_torch(mesh, names) or mesh
    dims = _dimensions(mesh, names)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise AxisError(f"rank {dist.get_rank()} is not on {mesh}: it has no place along {names}.")
    ranks = _ranks_through(mesh, dims, tuple(coordinate))
    place = ranks.index(mesh.get_rank())
    name = "_".join(names)
    # Axes of one rank need no group, so what is left of several may have one of torch's already.
    # An axis of one rank adds nobody: one dimension may be left, which has a group of torch's.
    wide = [dim for dim in dims if mesh.size(dim) > 1]
    if not wide:
        return MeshAxis(name, 1, 0, ranks, None)
    group = mesh.get_group(wide[0]) if len(wide) == 1 else group_of(name, ranks)
    return MeshAxis(name, len(ranks), place, ranks, group_ref(group))


def _flattened_by_torch(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The one-dimensional mesh that somebody made with `mesh[...]._flatten(name)`, if it is that.

    Megatron-FSDP's users name such dimensions, and a root mesh finds them.
    """
    if len(names) != 1 or not mesh.mesh_dim_names or names[0] in mesh.mesh_dim_names:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        try:
            return mesh[names[0]]
        except KeyError:
            return None


def _dimensions(mesh: DeviceMesh, names: tuple[str, ...]) -> list[int]:
    there = mesh.mesh_dim_names
    if not there:
        raise AxisError(
            f"{mesh} has no dimension names, so it has no axis {names}. Build it with "
            "init_device_mesh(..., mesh_dim_names=(...))."
        )
    check_axis_names(names, there, str(mesh))
    return [there.index(name) for name in names]


def check_axis_names(names: Sequence[str], there: Sequence[str], mesh: str) -> None:
    """Refuse names that are absent, repeated or not outer first, with an AxisError."""
    listed = ", ".join(there)
    if not names:
        raise AxisError(f"no axis named; {mesh} has: {listed}.")
    for name in names:
        if name not in there:
            raise AxisError(f"no axis '{name}' on {mesh}; it has: {listed}.")
    # Ranks of several axes are numbered outer first, so another order would be another axis.
    order = [there.index(name) for name in names]
    if order != sorted(set(order)):
        raise AxisError(
            f"axes {tuple(names)} can't be taken as one: name each once, outer first, in the "
            f"mesh's order ({listed})."
        )


def _ranks_through(
    mesh: DeviceMesh, dims: list[int], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    through = tuple(slice(None) if dim in dims else place for dim, place in enumerate(coordinate))
    ranks = tuple(int(rank) for rank in mesh.mesh[through].flatten().tolist())
    if list(ranks) != sorted(ranks):
        raise AxisError(
            f"{mesh} lists the ranks {list(ranks)} out of order along "
            f"{[(mesh.mesh_dim_names or ())[dim] for dim in dims]}. torch numbers the ranks of a "
            "process group in ascending order, so places on the mesh and in the group would "
            "differ. Build the mesh with ascending ranks along each dimension."
        )
    return ranks


def _described_axis(axis: MeshAxis) -> str:
    # The group's own description names axes that share a communicator alike ("dp" of a mesh with
    # dp_replicate=1 is "dp_shard"), so their siblings are shared too. torch's own groups are
    # described as "mesh_<dim>", or not by axis at all.
    group = axis.group
    described = "" if group is None else str(group.group_desc)
    if described in ("", "undefined", "default_pg", "mesh_default"):
        return axis.name
    return described.removeprefix("mesh_")
