"""The data-parallel axes of a group of parameters, with a communicator for each direction.

Gathers and reductions get communicators of their own: two collectives on one NCCL communicator
run one after the other even on two streams, so a prefetch would wait for a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import Placement, Replicate
from lamina.mesh import MeshAxis, ParallelMesh, mesh_axis

__all__ = ["DataParallelAxes", "data_parallel_axes"]


@dataclass(frozen=True)
class DataParallelAxes:
    """The outer (replicating) and the inner (sharding) data-parallel axis of one kind of parameter.

    Attributes:
        outer: axis of replicas; of size 1 where there are none.
        inner: axis along which ZeRO shards.
        divisor: D, the ranks whose losses are averaged. For expert parameters it is the dense D,
            not the size of the expert axes (docs/ddp.md, "One factor").
        at: this rank's coordinates in the whole mesh, for messages.
    """

    outer: MeshAxis
    inner: MeshAxis
    divisor: int
    at: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """(outer size, inner size)."""
        return (self.outer.size, self.inner.size)

    @property
    def coordinates(self) -> tuple[int, int]:
        """This rank's place along (outer, inner)."""
        return (self.outer.rank, self.inner.rank)

    @property
    def size(self) -> int:
        """Ranks that hold copies or pieces of the same parameter."""
        return self.outer.size * self.inner.size

    def groups(self, purpose: str) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Communicators of (outer, inner) kept for one purpose: "gather" or "reduce"."""
        return (self.outer.sibling(purpose), self.inner.sibling(purpose))

    def effective(self, placements: Sequence[Placement]) -> tuple[Placement, Placement]:
        """The placements with axes of size 1 replicated: one piece of one is the whole."""
        outer, inner = placements
        return (
            outer if self.outer.size > 1 else Replicate(),
            inner if self.inner.size > 1 else Replicate(),
        )

    def ranks_inside(self) -> DataParallelAxes:
        """With ranks along the outer axis alone, it is the inner one: one collective, not two."""
        if self.inner.size > 1 or self.outer.size == 1:
            return self
        return replace(self, outer=self.inner, inner=self.outer)

    @property
    def here(self) -> str:
        """This rank, for messages: its number in the world and its place in the whole mesh."""
        return f"rank {self.inner.ranks[self.inner.rank]}" + (f" ({self.at})" if self.at else "")

    def describe(self) -> str:
        """This rank's data-parallel coordinates, for messages."""
        return (
            f"{self.outer.name}={self.outer.rank}/{self.outer.size}, "
            f"{self.inner.name}={self.inner.rank}/{self.inner.size}"
        )


def data_parallel_axes(
    mesh: ParallelMesh | DeviceMesh,
    inner: str | Sequence[str],
    outer: str | Sequence[str] | None = None,
    divisor: int | None = None,
) -> DataParallelAxes:
    """The axes called `inner` and `outer` of a mesh.

    Args:
        mesh: a `ParallelMesh`, or any `DeviceMesh` with named dimensions.
        inner: name (or names, flattened in that order) of the sharding axis.
        outer: name of the replicating axis; None where there is none.
        divisor: D; by default outer size x inner size.

    Raises:
        AxisError: for a name the mesh does not have (from `mesh_axis`).
    """
    inner_axis = mesh_axis(mesh, inner)
    outer_axis = (
        MeshAxis("none", 1, 0, (inner_axis.ranks[inner_axis.rank],), None)
        if outer is None
        else mesh_axis(mesh, outer)
    )
    divisor = divisor or outer_axis.size * inner_axis.size
    return DataParallelAxes(outer_axis, inner_axis, divisor, _coordinates(mesh))


def _coordinates(mesh: ParallelMesh | DeviceMesh) -> str:
    if isinstance(mesh, ParallelMesh):
        sizes = zip(mesh.mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)
        found = {name: mesh.coordinate[name] for name, size in sizes if size > 1}
    else:
        found = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
    return ", ".join(f"{name}={place}" for name, place in found.items())
