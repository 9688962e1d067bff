"""The axes of a mesh that layers are divided over, for every type that describes a mesh."""

from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, mesh_axis

__all__ = ["MeshLike", "axis_of", "context_ranks"]

MeshLike: TypeAlias = ParallelMesh | DeviceMesh | MeshAxis | None


def axis_of(mesh: MeshLike, name: str) -> MeshAxis | None:
    """Find the axis of a mesh that has this name and more than one rank.

    The mesh may be the axis itself, or None for one process. A DeviceMesh without the name is one
    process along it.
    """
    if mesh is None:
        return None
    if isinstance(mesh, DeviceMesh) and name not in (mesh.mesh_dim_names or ()):
        return None
    axis = mesh if isinstance(mesh, MeshAxis) else mesh_axis(mesh, name)
    return axis if axis.size > 1 else None


def context_ranks(mesh: MeshLike) -> int:
    """Count the ranks that share a sequence; 1 for a bare axis, which is that of tp."""
    axis = None if isinstance(mesh, MeshAxis) else axis_of(mesh, "cp")
    return 1 if axis is None else axis.size
