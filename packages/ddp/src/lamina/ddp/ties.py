"""Who else holds a tied parameter: copies on this rank, and on the other end of the pipeline."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives import all_reduce_small, host_device
from lamina.mesh import MeshAxis, ParallelMesh, axis_if_there

__all__ = ["tied_axis"]


def tied_axis(names: Iterable[str], mesh: ParallelMesh | DeviceMesh) -> MeshAxis | None:
    """The first and the last pipeline stage, which hold one copy each of the same parameters.

    Collective over those two stages, which compare what they hold.

    Args:
        names: what this rank holds one copy of (the `tied` of a role).
        mesh: the mesh.

    Returns:
        None where nobody else holds copies.

    Raises:
        ValueError: for a tie to a stage in between, or one that only one of the two stages knows.
    """
    held = sorted(names)
    stages = axis_if_there(mesh, "pp")
    if stages is None or stages.size == 1:
        return None
    first_or_last = stages.rank in (0, stages.size - 1)
    if held and not first_or_last:
        raise ValueError(
            f"stage {stages.rank} of {stages.size} holds a parameter marked tied={held[0]!r}: "
            "gradients of tied parameters are summed between the first and the last stage only; "
            "move it there, or give it a name of its own"
        )
    if isinstance(mesh, ParallelMesh):
        axis = mesh.embedding_axis
    else:
        axis = stages if stages.size == 2 else None
        if axis is None and held:
            raise ValueError(
                f"tied={held[0]!r} on a DeviceMesh with {stages.size} stages: the first and the "
                "last need a group of their own, which ParallelLayout(...).build() makes"
            )
    if axis is None or axis.size == 1:
        return None
    _agree(held, axis, mesh.device_type)
    return axis if held else None


def _agree(held: list[str], axis: MeshAxis, device_type: str) -> None:
    """Raise ValueError on both stages if they hold other names."""
    number = zlib.crc32("\0".join(held).encode()) if held else 0
    group = axis.sibling("reduce")
    device = host_device([group], device_type)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    all_reduce_small([extremes], group, op="max")
    largest, negated = extremes.tolist()
    if largest != -negated:
        raise ValueError(
            f"this stage (ranks {axis.ranks}, place {axis.rank}) holds parameters tied as "
            f"{held or 'nothing'}, and the stage at the other end of the pipeline others: mark "
            "both copies of a tied parameter with the same name, and freeze both or none"
        )
