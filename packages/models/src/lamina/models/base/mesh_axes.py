"""The axes of a mesh that layers are divided over, and weights that are cut over one of them."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, mesh_axis

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


def data_parallel_axis(mesh: MeshLike) -> MeshAxis | None:
    """Find the axis whose ranks have other sequences; None is one rank.

    Of a DeviceMesh it is all dimensions but `pp`, `tp` and `cp`. A bare axis is that of tp.
    """
    if mesh is None or isinstance(mesh, MeshAxis):
        return None
    if not isinstance(mesh, DeviceMesh):
        return axis_of(mesh, "dp")
    names = [name for name in mesh.mesh_dim_names or () if name not in ("pp", "tp", "cp")]
    return axis_of(mesh_axis(mesh, names), "dp") if names else None


def context_ranks(mesh: MeshLike) -> int:
    """Count the ranks that share a sequence; 1 for a bare axis, which is that of tp."""
    axis = None if isinstance(mesh, MeshAxis) else axis_of(mesh, "cp")
    return 1 if axis is None else axis.size


def require_divisible(what: str, total: int, axis: MeshAxis | None) -> int:
    """Return `total / axis.size`, or raise ValueError with the arithmetic."""
    size = 1 if axis is None else axis.size
    if total % size:
        raise ValueError(
            f"{what} {total} is not divisible by {axis.name if axis else 'tp'} {size} "
            f"(remainder {total % size}): change one of them"
        )
    return total // size


def cut_weight(
    whole: Tensor, dim: int, rank: int, size: int, blocks: Sequence[int] | None = None
) -> Tensor:
    """Take one rank's piece of a whole tensor.

    `rank` of `size` has the piece along `dim`. Of matrices fused along it (queries, keys, values;
    gate, up), of lengths `blocks`, each is cut by itself, and the piece is the pieces'
    concatenation.
    """
    parts = torch.split(whole, [whole.shape[dim]] if blocks is None else list(blocks), dim=dim)
    pieces = [
        part.narrow(dim, rank * (part.shape[dim] // size), part.shape[dim] // size)
        for part in parts
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def join_weight(pieces: Sequence[Tensor], dim: int, blocks: Sequence[int] | None = None) -> Tensor:
    """Join the pieces of all ranks: the inverse of `cut_weight`."""
    size = len(pieces)
    total = sum(piece.shape[dim] for piece in pieces)
    lengths = [block // size for block in ([total] if blocks is None else blocks)]
    per_rank = [torch.split(piece, lengths, dim=dim) for piece in pieces]
    return torch.cat([parts[i] for i in range(len(lengths)) for parts in per_rank], dim=dim)
