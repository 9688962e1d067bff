"""Gradients as the norm sees them: pieces, and which ranks count them.

A number per rank is added up over the whole mesh, so every rank takes part in the same
collectives whatever parameters it has. A piece that several ranks hold is counted by the first of
them along every axis that copies it; a piece that an axis cuts is counted by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import ShardedTensor
from lamina.ddp.backward.grad_attribute import refuse_unsummed
from lamina.ddp.backward.gradient_hooks import main_of
from lamina.ddp.group.group import ParameterGroup
from lamina.mesh import ParallelMesh, Role, role_of
from lamina.mesh.engine import MODEL_AXES, MeshAxis, axis_if_there, mesh_axis

__all__ = ["Measured", "Ties", "of_groups", "of_parameters", "whole_mesh"]


@dataclass(frozen=True)
class Measured:
    """Gradients that lie together here.

    Attributes:
        parts: gives (name, gradient) of each parameter in it.
        flat: the gradients, flat.
        scaled: the same memory, as what is to be multiplied.
        axes: data-parallel axes along which other ranks may hold other pieces (of size > 1).
        counts: whether this rank adds the piece to a sum over the mesh.
        squares: the piece's sum of squares, if it is known.
        counts_squares: whether this rank adds that.
    """

    parts: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    flat: torch.Tensor
    scaled: torch.Tensor
    axes: tuple[MeshAxis, ...]
    counts: bool
    squares: torch.Tensor | None = None
    counts_squares: bool = False


@dataclass
class Ties:
    """Tied parameters on this rank.

    Attributes:
        copies: how many there are of each name; two or more are all that exist.
        counted: names of which one was counted.
    """

    copies: Counter[str]
    counted: set[str] = field(default_factory=set)

    @classmethod
    def among(cls, roles: Iterable[Role]) -> Ties:
        """The ties among the parameters with these roles."""
        return cls(Counter(role.tied for role in roles if role.tied is not None))


def whole_mesh(mesh: ParallelMesh | DeviceMesh | None) -> tuple[MeshAxis, ...]:
    """Axes that together make up all ranks of a mesh, in one order on all of them."""
    if mesh is None:
        return ()
    names: Iterable[str] = ("tp", "dp_shard_cp", "dp_replicate", "pp")
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
    axes = (mesh_axis(mesh, name) for name in names)
    return tuple(axis for axis in axes if axis.size > 1)


def of_groups(
    groups: Iterable[ParameterGroup], mesh: ParallelMesh | DeviceMesh | None, ties: Ties
) -> list[Measured]:
    """The main grads of groups, one piece per group (what counts is the same for all of it).

    `ties` remembers which tied parameters were counted: a rank may hold both copies.
    """
    found = []
    for group in groups:
        gradients = group.gradients
        if gradients is None:
            continue
        refuse_unsummed(group, "clip_grad_norm()")
        if not any(gradients.seen):
            continue
        stepped = group.gradients_to_step
        axes = (group.axes.outer, group.axes.inner)
        counted = _counted_once(group.refs[0].role, mesh, ties)
        squares = group.squares
        pieces = squares.pieces if squares is not None else (False, False)
        found.append(
            Measured(
                _parts_of(group),
                stepped.data,
                stepped.data,
                tuple(axis for axis in axes if axis.size > 1),
                counted and _is_first(axes, stepped.cuts),
                None if squares is None else squares.value,
                counted and _is_first(axes, pieces),
            )
        )
    return found


def of_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]],
    mesh: ParallelMesh | DeviceMesh | None,
    ties: Ties,
) -> list[Measured]:
    """The gradients of parameters, one piece each; `ties` as of `of_groups`."""
    found = []
    for name, given in parameters:
        parameter = main_of(given)
        gradient = parameter.grad
        if gradient is None:
            continue
        role = role_of(parameter)
        cut: tuple[MeshAxis, ...] = ()
        flat = scaled = gradient.reshape(-1) if gradient.is_contiguous() else gradient
        if hasattr(gradient, "device_mesh"):  # a DTensor, whose class takes long to import
            cut = _axes_that_cut(gradient)
            scaled = gradient.to_local()  # type: ignore[attr-defined]
            flat = scaled.reshape(-1)
        elif isinstance(gradient, ShardedTensor):
            cut = tuple(axis for axis in gradient.spec.axes if isinstance(axis, MeshAxis))
            flat = scaled = gradient.to_local()
        elif flat.dim() != 1:
            flat = gradient.reshape(-1)
        copies = _data_parallel(role, mesh, cut)
        found.append(
            Measured(
                _one_part(name, flat),
                flat,
                scaled,
                tuple(axis for axis in cut if axis.size > 1),
                _counted_once(role, mesh, ties) and all(axis.rank == 0 for axis in copies),
            )
        )
    return found


def _axes_that_cut(gradient: Any) -> tuple[MeshAxis, ...]:
    """The axes along which a DTensor's ranks hold different rows."""
    names = gradient.device_mesh.mesh_dim_names or ()
    return tuple(
        mesh_axis(gradient.device_mesh, name)
        for name, placement in zip(names, gradient.placements, strict=True)
        if placement.is_shard()
    )


def _parts_of(group: ParameterGroup) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        for index, ref in enumerate(group.refs):
            yield ref.name, group.gradients_to_step.span_view(index)

    return parts


def _one_part(name: str, flat: torch.Tensor) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    return lambda: iter([(name, flat)])


def _is_first(axes: Iterable[MeshAxis], cut: Iterable[bool]) -> bool:
    return all(axis.rank == 0 or is_cut for axis, is_cut in zip(axes, cut, strict=True))


def _counted_once(role: Role, mesh: ParallelMesh | DeviceMesh | None, ties: Ties) -> bool:
    """Whether this rank is the one to count, as far as the model-parallel axes go."""
    if role.tied is not None:
        if role.tied in ties.counted:
            return False
        ties.counted.add(role.tied)
    if mesh is None:
        return True
    stages = axis_if_there(mesh, "pp")
    across = role.tied is not None and ties.copies[role.tied] < 2
    if across and stages is not None and stages.rank != 0:
        return False  # tied across stages: the first rank that holds it counts
    if role.tp_shard_dim is not None:
        return True
    copies = axis_if_there(mesh, "expert_tp" if role.expert else "tp")
    return copies is None or copies.rank == 0


def _data_parallel(
    role: Role, mesh: ParallelMesh | DeviceMesh | None, cut: tuple[MeshAxis, ...]
) -> list[MeshAxis]:
    """The data-parallel axes of a mesh that copy a parameter: those that do not cut it."""
    if mesh is None:
        return []
    if isinstance(mesh, ParallelMesh):
        names = ["dp_replicate", "expert_dp" if role.expert else "dp_shard_cp"]
    else:
        names = [name for name in mesh.mesh_dim_names or () if name not in MODEL_AXES]
    axes = [mesh_axis(mesh, name) for name in names]
    held = {axis.ranks for axis in cut}
    return [axis for axis in axes if axis.ranks not in held]
