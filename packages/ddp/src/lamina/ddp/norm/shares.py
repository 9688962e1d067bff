"""What this rank adds to a norm over the mesh, so that every parameter is counted once.

A piece that an axis cuts is counted by all ranks along that axis. A piece that several ranks hold
is counted by the first of them along every axis that copies it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import PNorm
from lamina.ddp.backward.gradient_hooks import main_of
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import HasGroups
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.mesh import ParallelMesh, Role, role_of
from lamina.mesh.engine import MODEL_AXES, MeshAxis, axis_if_there, mesh_axis


@dataclass(frozen=True)
class Share:
    """Gradients that lie together on this rank.

    Attributes:
        gradient: this rank's part of them, which clipping multiplies.
        named: (name, gradient) of each parameter in it; to be read once.
        axes: data-parallel axes (of size > 1) along which other ranks may hold other parts.
        value: what this rank adds to the norm (see `PNorm`); None where another rank does.
    """

    gradient: torch.Tensor
    named: Iterator[tuple[str, torch.Tensor]]
    axes: tuple[MeshAxis, ...]
    value: torch.Tensor | None


def shares_of(
    items: Iterable[nn.Module | torch.Tensor],
    norm: PNorm,
    mesh: ParallelMesh | DeviceMesh | None,
) -> list[Share]:
    """The gradients of modules and parameters: one share per group of a wrapped module.

    ValueError: without a mesh, other ranks hold other parts of a parameter. RuntimeError: gradients
    are not summed over ranks yet.
    """
    given = list(items)
    shares = _Shares(norm, mesh, [role_of(p) for item in given for p in _parameters_of(item)])
    made: list[Share | None] = []
    for index, item in enumerate(given):
        groups = list(item.parameter_groups()) if isinstance(item, HasGroups) else []
        if groups:
            made += [shares.of_group(group) for group in groups]
        elif isinstance(item, nn.Module):  # plain, or wrapped over another engine
            made += [shares.of_parameter(name, p) for name, p in item.named_parameters()]
        else:
            name = f"parameter {index} of shape {tuple(item.shape)}"
            made.append(shares.of_parameter(name, item))
    return [share for share in made if share is not None]


class _Shares:
    """Makes shares, and remembers which tied parameters were counted on this rank.

    `mesh` is None for data-parallel ranks alone, and `roles` are those of all parameters.
    """

    def __init__(
        self, norm: PNorm, mesh: ParallelMesh | DeviceMesh | None, roles: Iterable[Role]
    ) -> None:
        self._norm = norm
        self._mesh = mesh
        self._copies = Counter(role.tied for role in roles if role.tied is not None)
        self._counted: set[str] = set()
        self._must_be_whole = mesh is None and dist.is_initialized() and dist.get_world_size() > 1

    def of_group(self, group: ParameterGroup) -> Share | None:
        """The main grads of a group (what counts is the same for all of it); None without any."""
        role, axes = group.refs[0].role, (group.axes.outer, group.axes.inner)
        if self._must_be_whole:
            _refuse_part(group.refs[0].name, role, group.axes)
        gradients = group.gradients
        if gradients is None:
            return None
        group.shown.refuse_unsummed("clip_grad_norm()")
        if not any(gradients.produced_gradient):
            return None
        stepped = group.gradients_to_step
        # Asked at every clip: reductions look for them from then on. They are rounded, so an exact
        # norm has no use for them.
        squares = group.shown.squares if type(self._norm) is PNorm else None
        if self._norm.order != 2:
            squares = None
        value = None
        # Ranks may have found the squares in pieces of a gradient that all of them hold whole.
        pieces = stepped.cuts if squares is None else squares.pieces
        if self._counts(role, axes, compress(axes, pieces)):
            value = self._norm.share(stepped.data) if squares is None else squares.value
        return Share(
            stepped.data,
            ((ref.name, stepped.span_view(index)) for index, ref in enumerate(group.refs)),
            tuple(axis for axis in axes if axis.size > 1),
            value,
        )

    def of_parameter(self, name: str, given: torch.Tensor) -> Share | None:
        """The gradient of one parameter; None if it has none."""
        parameter = main_of(given)
        role, gradient = role_of(parameter), parameter.grad
        if self._must_be_whole:
            _refuse_part(name, role)
        if gradient is None:
            return None
        cut: tuple[MeshAxis, ...] = ()
        if hasattr(gradient, "device_mesh"):  # a DTensor, whose class takes long to import
            cut = _axes_that_cut(gradient)
            gradient = gradient.to_local()  # type: ignore[attr-defined]
        elif isinstance(gradient, ShardedTensor):
            cut = tuple(axis for axis in gradient.spec.axes if isinstance(axis, MeshAxis))
            gradient = gradient.to_local()
        counts = self._counts(role, _data_parallel(role, self._mesh), cut)
        return Share(
            gradient,
            iter([(name, gradient)]),
            tuple(axis for axis in cut if axis.size > 1),
            self._norm.share(gradient) if counts else None,
        )

    def _counts(self, role: Role, axes: Iterable[MeshAxis], cut: Iterable[MeshAxis]) -> bool:
        """Whether this rank counts a parameter: the first one along all axes that copy it.

        Of its data-parallel `axes`, ranks along `cut` hold different parts.
        """
        if role.tied is not None:
            if role.tied in self._counted:
                return False
            self._counted.add(role.tied)
        parts = [axis.ranks for axis in cut]  # `in` asks for identity first: ranks may be many
        copying: list[MeshAxis | None] = [axis for axis in axes if axis.ranks not in parts]
        if self._mesh is not None:
            if role.tied is not None and self._copies[role.tied] < 2:
                # The other copy is on another stage; two copies here are all that there are.
                copying.append(axis_if_there(self._mesh, "pp"))
            if role.tp_shard_dim is None:
                copying.append(axis_if_there(self._mesh, "expert_tp" if role.expert else "tp"))
        return all(axis is None or axis.rank == 0 for axis in copying)


def _refuse_part(name: str, role: Role, axes: DataParallelAxes | None = None) -> None:
    """Refuse, without a mesh, what is known to lie over other than data-parallel ranks."""
    apart = () if axes is None else axes.apart
    tied = axes is None and role.tied is not None
    experts = role.expert and (axes is None or axes.size < axes.divisor)
    for why, holds in (
        (f"{name} is cut over tp", role.tp_shard_dim is not None),
        (f"{name} is an expert's, and other ranks may hold other experts", experts),
        (f"the mesh has {' and '.join(apart)} ranks", bool(apart)),
        (f"{name} is tied across pipeline stages", tied),
    ):
        if holds:
            raise ValueError(
                f"clip_grad_norm without a mesh adds over data-parallel ranks alone, and {why}: "
                "the norm, and so the factor, would differ between ranks; pass mesh="
            )


def _parameters_of(item: nn.Module | torch.Tensor) -> Iterable[torch.Tensor]:
    return item.parameters() if isinstance(item, nn.Module) else (item,)


def _axes_that_cut(gradient: Any) -> tuple[MeshAxis, ...]:
    """The axes along which a DTensor's ranks hold different rows."""
    names = gradient.device_mesh.mesh_dim_names or ()
    return tuple(
        mesh_axis(gradient.device_mesh, name)
        for name, placement in zip(names, gradient.placements, strict=True)
        if placement.is_shard()
    )


def _data_parallel(role: Role, mesh: ParallelMesh | DeviceMesh | None) -> list[MeshAxis]:
    """The data-parallel axes that a mesh has for a parameter."""
    if mesh is None:
        return []
    if isinstance(mesh, ParallelMesh):
        names = ["dp_replicate", "expert_dp" if role.expert else "dp_shard_cp"]
    else:
        names = [name for name in mesh.mesh_dim_names or () if name not in MODEL_AXES]
    return [mesh_axis(mesh, name) for name in names]
