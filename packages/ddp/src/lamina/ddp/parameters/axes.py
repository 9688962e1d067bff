"""The data-parallel axes of a group of parameters, with a communicator for each direction.

Gathers and reductions get communicators of their own: two collectives on one NCCL communicator
run one after the other even on two streams, so a prefetch would wait for a reduction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import Replicate
from lamina.buffers.engine import Placement
from lamina.collectives.engine import SpanGroups
from lamina.ddp.parameters.parameters import ParameterRef
from lamina.mesh import ParallelMesh, Role
from lamina.mesh.engine import MeshAxis, mesh_axis


@dataclass(frozen=True)
class DataParallelAxes:
    """The outer (replicating) and the inner (sharding) data-parallel axis of one kind of parameter.

    Attributes:
        outer: axis of replicas; of size 1 where there are none.
        inner: axis along which ZeRO shards.
        divisor: D, the ranks whose losses are averaged. For expert parameters it is the dense D,
            not the size of the expert axes (docs/ddp.md, "One factor").
        at: this rank's coordinates in the whole mesh, for messages.
        apart: the mesh's tensor- and pipeline-parallel axes of more than one rank.
        tp: the mesh's tensor-parallel axis, if it has one of more than one rank.
        pieces: the axis along which `tp_shard_dim` of these parameters is cut: tp, or expert_tp.
        mesh: the whole mesh in words that are equal on its ranks.
    """

    outer: MeshAxis
    inner: MeshAxis
    divisor: int
    at: str = ""
    apart: tuple[str, ...] = ()
    tp: MeshAxis | None = None
    pieces: MeshAxis | None = None
    mesh: str = ""

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
    def wide(self) -> tuple[MeshAxis, ...]:
        """The axes of more than one rank, tp among them, the innermost first."""
        return tuple(axis for axis in (self.tp, self.inner, self.outer) if axis and axis.size > 1)

    def beyond(self, role: Role) -> SpanGroups | None:
        """Reaches the ranks with the other parts of a parameter, if tp has cut it."""
        if role.tp_shard_dim is None or self.pieces is None or self.pieces.size == 1:
            return None
        return SpanGroups([self.pieces.group])

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


@dataclass(frozen=True)
class ModelAxes:
    """Axes along which ranks hold different parts of the model; None where the mesh has none."""

    tp: MeshAxis | None = None
    expert_tp: MeshAxis | None = None
    ep: MeshAxis | None = None


def data_parallel_axes(
    mesh: ParallelMesh | DeviceMesh,
    inner: str | Sequence[str] | None,
    outer: str | Sequence[str] | None = None,
    divisor: int | None = None,
) -> DataParallelAxes:
    """The axes called `inner` and `outer` of a mesh.

    Args:
        mesh: a `ParallelMesh`, or any `DeviceMesh` with named dimensions.
        inner: name (or names, flattened in that order) of the sharding axis; None where nothing is
            to be sharded.
        outer: name of the replicating axis; None where there is none.
        divisor: D; by default outer size x inner size.

    Raises:
        AxisError: for a name the mesh does not have (from `mesh_axis`).
        ValueError: for axes that share ranks.
    """
    torch_mesh = mesh.mesh if isinstance(mesh, ParallelMesh) else mesh
    # An axis that nobody named has this rank alone, so whoever asks finds two axes in any case.
    alone = MeshAxis("none", 1, 0, (int(torch_mesh.get_rank()),), None)
    inner_axis = mesh_axis(mesh, inner) if inner else alone
    outer_axis = mesh_axis(mesh, outer) if outer else alone
    # Two axes cross in one rank. More ranks in common would sum each other's gradients twice.
    if len(set(inner_axis.ranks) & set(outer_axis.ranks)) > 1:
        raise ValueError(
            f"{inner!r} shards and {outer!r} replicates, and both have ranks "
            f"{sorted(set(inner_axis.ranks) & set(outer_axis.ranks))}, whose gradients would be "
            "counted twice: name two different dimensions"
        )
    divisor = divisor or outer_axis.size * inner_axis.size
    apart = _apart(torch_mesh)
    tp = mesh_axis(mesh, "tp") if "tp" in apart else None
    words = f"{torch_mesh.mesh_dim_names} {tuple(torch_mesh.shape)} {torch_mesh.mesh.tolist()}"
    at = _coordinates(mesh)
    return DataParallelAxes(outer_axis, inner_axis, divisor, at, apart, tp, pieces=tp, mesh=words)


def check_dimensions(
    mesh: DeviceMesh, axes: DataParallelAxes, apart: Collection[str], remedy: str
) -> None:
    """Refuse a mesh of which some dimension is neither data-parallel nor known to cut the model.

    Along the dimensions `apart` ranks hold different parts of the model, and `remedy` is what to do
    about one that is neither. ValueError: a dimension of several ranks is both or neither.
    """
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if size == 1:
            continue
        # A dimension may be part of an axis that was flattened out of several.
        ranks = set(mesh_axis(mesh, name).ranks)
        data = ranks <= set(axes.inner.ranks) or ranks <= set(axes.outer.ranks)
        if data and name in apart:
            raise ValueError(
                f"the {size} ranks along {name!r} hold different parts of the model, and would be "
                f"taken for copies ({axes.describe()}): the first one's parameters would overwrite "
                "the others'. Name the data-parallel dimension, or call this one 'dp'"
            )
        if not data and name not in apart:
            raise ValueError(
                f"the mesh has {size} ranks along {name!r}, which is no data-parallel dimension "
                f"here ({axes.describe()}): nobody would sum gradients over them, and their "
                f"weights would diverge. {remedy}"
            )


def check_experts(
    refs: Iterable[ParameterRef],
    dense: DataParallelAxes,
    expert: DataParallelAxes | None,
    model: ModelAxes,
) -> None:
    """Refuse expert parameters that ranks hold different parts of and would take for copies.

    `expert` is None if experts have the dense axes, and `model` are the axes that cut the model.
    ValueError names the first such parameter.
    """
    tp, expert_tp, ep = model.tp, model.expert_tp, model.ep
    copies = dense if expert is None else expert
    same = (copies.outer.ranks, copies.inner.ranks) == (dense.outer.ranks, dense.inner.ranks)
    # Two ranks of one axis of copies that are also two ranks of an axis of experts contradict.
    both = (set(copies.outer.ranks), set(copies.inner.ranks))
    apart = [
        axis for axis in (ep, expert_tp) if axis and any(len(r & set(axis.ranks)) > 1 for r in both)
    ]
    # Where experts have axes of their own, these must know that tp cuts experts as well.
    over_tp = tp is not None and tp.size > 1 and (expert_tp is None or expert_tp.size == 1)
    for ref in refs:
        if not ref.role.expert:
            continue
        if apart:
            raise ValueError(
                f"{ref.name} is an expert's, ranks along {apart[0].name!r} hold different experts "
                f"or parts of them, and they would be taken for copies ({copies.describe()}): use "
                "ParallelLayout(ep=, expert_tp=).build(), or say which mesh is the experts' "
                "(expt_device_mesh= of fully_shard; it may be the same mesh)"
            )
        if over_tp and not same and tp is not None and ref.role.tp_shard_dim is not None:
            raise ValueError(
                f"{ref.name} is an expert's and cut over the {tp.size} ranks of tp, and the mesh "
                f"says that experts are not (expert_tp=1): its copies would be sought along "
                f"{copies.describe()}. Use ParallelLayout(expert_tp={tp.size}), or build the model "
                "with the whole mesh, which keeps experts uncut"
            )


def refuse_unplaced(
    refs: Iterable[ParameterRef], dense: DataParallelAxes, tp: MeshAxis | None
) -> None:
    """Refuse parameters that are cut over tp, where all ranks of the world would be copies.

    `tp` cuts dense parameters, if the mesh has it. ValueError names the first such parameter.
    """
    # A part of the world may be one tp rank's data-parallel ranks, so only the whole world tells.
    if (tp is not None and tp.size > 1) or not 1 < dense.size == dist.get_world_size():
        return
    for ref in refs:
        if ref.role.tp_shard_dim is not None and not ref.role.expert:
            raise ValueError(
                f"{ref.name} is marked tp_shard_dim={ref.role.tp_shard_dim}, and the mesh takes "
                f"all {dense.size} ranks for copies ({dense.describe()}): the first one's tp piece "
                "would overwrite the others'. Pass the mesh that the model was built with "
                "(device_mesh= of fully_shard, mesh= of the others), with its tp dimension; mark "
                "no parameter that is whole because tp has one rank"
            )


def whole_mesh(mesh: ParallelMesh | DeviceMesh | None) -> tuple[MeshAxis, ...]:
    """Axes that together make up all ranks of a mesh, in one order on all of them."""
    if mesh is None:
        return ()
    names: Iterable[str] = ("tp", "dp_shard_cp", "dp_replicate", "pp")
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
    axes = (mesh_axis(mesh, name) for name in names)
    return tuple(axis for axis in axes if axis.size > 1)


def _apart(mesh: DeviceMesh) -> tuple[str, ...]:
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
    return tuple(name for name, size in sizes if size > 1 and name in ("pp", "tp"))


def _coordinates(mesh: ParallelMesh | DeviceMesh) -> str:
    if isinstance(mesh, ParallelMesh):
        sizes = zip(mesh.mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)
        places = {name: mesh.coordinate[name] for name, size in sizes if size > 1}
    else:
        # A rank outside of the mesh has no coordinates.
        places = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
    return ", ".join(f"{name}={place}" for name, place in places.items())
