"""Who is where: a mesh as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lamina.mesh.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout

if TYPE_CHECKING:
    from lamina.mesh.parallel_mesh import ParallelMesh

__all__ = ["describe_mesh"]


def describe_mesh(mesh: ParallelMesh, max_ranks: int) -> str:
    """The axes with their sizes, then the ranks with their places.

    Args:
        mesh: any mesh.
        max_ranks: rows of the second table; this rank's row is always among them.
    """
    return "\n".join(
        [
            f"{_ranks(mesh.layout.world_size)} on {mesh.device_type}, this is rank {mesh.rank}",
            "",
            *_axis_table(mesh),
            "",
            *_rank_table(mesh.layout, mesh.rank, max_ranks),
        ]
    )


def _axis_table(mesh: ParallelMesh) -> list[str]:
    rows: list[Sequence[str]] = [("axis", "size", "step", "place of this rank")]
    for axes, shape in (
        (DENSE_AXES, mesh.layout.dense_shape),
        (EXPERT_AXES[2:], mesh.layout.expert_shape[2:]),
    ):
        step = mesh.layout.world_size
        if axes != DENSE_AXES:
            step //= mesh.layout.pp * mesh.layout.dp_replicate
        for name, size in zip(axes, shape, strict=True):
            step //= size
            rows.append((name, str(size), str(step), str(mesh.coordinate[name])))
    return _aligned(rows)


def _rank_table(layout: ParallelLayout, own_rank: int, max_ranks: int) -> list[str]:
    names = [*DENSE_AXES, *EXPERT_AXES[2:]]
    world = layout.world_size
    shown = sorted({*range(min(world, max(max_ranks, 0))), own_rank})
    rows: list[Sequence[str]] = [("rank", *names)]
    for rank in shown:
        place = layout.coordinate_of(rank)
        mark = "*" if rank == own_rank else ""
        rows.append((f"{rank}{mark}", *(str(place[name]) for name in names)))
    lines = _aligned(rows)
    if len(shown) < world:
        lines.append(f"... and {world - len(shown)} more ranks")
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
