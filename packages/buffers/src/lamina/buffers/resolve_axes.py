"""The data-parallel axes of any mesh, as buffers need them: sizes and this rank's coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, mesh_axis


@dataclass(frozen=True)
class PlainAxis:
    """An axis given by numbers alone: layouts can be computed for ranks that don't run here."""

    name: str
    size: int
    rank: int
    apart: tuple[str, ...] = ()


Axis: TypeAlias = MeshAxis | PlainAxis
MeshLike: TypeAlias = ParallelMesh | DeviceMesh | Axis | Sequence[Axis]


def resolve_axes(mesh: MeshLike | None, count: int) -> tuple[Axis, ...]:
    """The `count` data-parallel axes of `mesh`, outer first.

    The mesh is one axis, several (outer first), a torch DeviceMesh with `count` dimensions, a
    ParallelMesh (one axis: `dp_cp`; two: `dp_replicate` and `dp_shard_cp`), or None for a world of
    one. ValueError: it has another number of axes.
    """
    if mesh is None:
        return tuple(PlainAxis(f"axis{position}", 1, 0) for position in range(count))
    if isinstance(mesh, DeviceMesh):
        return _device_mesh_axes(mesh, count)
    if isinstance(mesh, ParallelMesh):
        # Context parallelism holds the same weights as data parallelism, and takes part in its
        # sums.
        names = {1: ("dp_cp",), 2: ("dp_replicate", "dp_shard_cp")}.get(count)
        if names is None:
            raise ValueError(
                f"a ParallelMesh has one or two data-parallel axes, the placement names {count}: "
                "pass the axes themselves, [mesh_axis(mesh, name), ...], outer first"
            )
        return tuple(mesh_axis(mesh, name) for name in names)
    axes = (mesh,) if isinstance(mesh, Axis) else tuple(mesh)
    if len(axes) != count:
        names_given = [axis.name for axis in axes]
        raise ValueError(
            f"the placement names {count} axes, the mesh gives {len(axes)} {names_given}: give one "
            "placement per axis, outer first"
        )
    return axes


def _device_mesh_axes(mesh: DeviceMesh, count: int) -> tuple[Axis, ...]:
    if mesh.ndim != count:
        raise ValueError(
            f"the placement names {count} axes, the DeviceMesh has {mesh.ndim} "
            f"{mesh.mesh_dim_names}: pass the sub-mesh of its data-parallel dimensions, outer first"
        )
    names = mesh.mesh_dim_names or tuple(f"axis{position}" for position in range(count))
    # A sub-mesh may leave ranks out.
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the mesh: it can hold no piece of the buffer")
    return tuple(
        PlainAxis(name, mesh.size(position), place)
        for position, (name, place) in enumerate(zip(names, coordinate, strict=True))
    )
