"""Sums of gradients by the roles of their parameters: over tp ranks, and over tied copies.

The gradients are main grads of groups, or `.grad` of parameters that no wrapper holds.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives import all_reduce_fp32
from lamina.collectives.engine import all_reduce_small, host_device
from lamina.ddp.group.group import ParameterGroup
from lamina.mesh import ParallelMesh, Role, role_of
from lamina.mesh.engine import MeshAxis, axis_if_there


class GroupGradient:
    """The main grads of a group: flat, what this rank holds of them."""

    def __init__(self, group: ParameterGroup) -> None:
        self.name, self.role = group.refs[0].name, group.refs[0].role
        self.shape = tuple(group.layout.specs[0].shape)
        self._gradients = group.trained

    @property
    def produced(self) -> list[bool]:
        """For each parameter whether it has a gradient."""
        return list(self._gradients.produced_gradient)

    def complete(self, produced: list[bool]) -> None:
        """Have a gradient for each of these parameters: zeros where this rank has none."""
        self._gradients.mark_produced(produced)
        if any(produced):
            self._gradients.zero_if_empty()

    @property
    def values(self) -> torch.Tensor:
        """What sums are written to."""
        return self._gradients.main.data


class PlainGradient:
    """`.grad` of a parameter that no wrapper holds; members as of `GroupGradient`."""

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name, self.role = name, role_of(parameter)
        self.shape = tuple(parameter.shape)
        self.parameter = parameter

    @property
    def produced(self) -> list[bool]:
        """Whether there is one."""
        return [self.parameter.grad is not None]

    def complete(self, produced: list[bool]) -> None:
        """Have one, if somebody has."""
        if any(produced) and self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)

    @property
    def values(self) -> torch.Tensor:
        """The gradient; zeros in place of none."""
        self.complete([True])
        return self.parameter.grad  # type: ignore[return-value]


AnyGradient = GroupGradient | PlainGradient
_GradientT = TypeVar("_GradientT", GroupGradient, PlainGradient)


def wide_axis(mesh: ParallelMesh | DeviceMesh, name: str) -> MeshAxis | None:
    """An axis of a mesh; None where it is not there or has one rank."""
    axis = axis_if_there(mesh, name)
    return axis if axis is not None and axis.size > 1 else None


def is_summed_over_tp(role: Role, mesh: ParallelMesh | DeviceMesh) -> bool:
    """Whether `sum_over_tp` adds gradients of this role up (a mean of means may be taken twice)."""
    axis = wide_axis(mesh, "expert_tp" if role.expert else "tp")
    return role.tp_grad == "sum" and axis is not None


def sum_over_tp(gradients: Iterable[AnyGradient], mesh: ParallelMesh | DeviceMesh) -> None:
    """Sum or average what every tp rank holds whole, as roles say.

    ValueError refuses an expert on a `DeviceMesh` with tp, which does not say who holds it.
    """
    whole = [gradient for gradient in gradients if gradient.role.tp_grad is not None]
    for name, expert in (("tp", False), ("expert_tp", True)):
        chosen = [gradient for gradient in whole if gradient.role.expert is expert]
        axis = wide_axis(mesh, name)
        if axis is not None:
            # Ranks must send as much as their peers: who has no gradient sends zeros.
            _agree_who_has_one(chosen, axis, mesh.device_type)
            sums = [gradient for gradient in chosen if gradient.role.tp_grad == "sum"]
            means = [gradient for gradient in chosen if gradient.role.tp_grad == "mean"]
            _all_reduce(sums, axis, None)
            _all_reduce(means, axis, 1.0 / axis.size)
        elif expert and chosen and isinstance(mesh, DeviceMesh) and wide_axis(mesh, "tp"):
            raise ValueError(
                f"{chosen[0].name} belongs to an expert and has tp_grad: which ranks hold "
                "it whole is known to a ParallelMesh (its expert_tp axis), not to a DeviceMesh"
            )


def sum_tied(gradients: Iterable[_GradientT], mesh: ParallelMesh | DeviceMesh) -> list[_GradientT]:
    """Sum the gradients of copies of tied parameters, here or on the first and the last stage.

    Under V-shaped schedules one rank holds both of these stages, and the others neither. Tied
    parameters have groups of their own, so all copies are cut alike.

    The gradients that are sums now come back. Errors are those of `_tied_axis`, and ValueError for
    copies of different shapes.
    """
    copies: dict[str, list[_GradientT]] = {}
    for gradient in gradients:
        if (name := gradient.role.tied) is not None:
            copies.setdefault(name, []).append(gradient)
    # Both ends of a V-shaped pipeline are here, and no other rank has copies.
    here = [both for both in copies.values() if len(both) > 1]
    for both in here:
        _sum_here(both)
    summed = [gradient for both in here for gradient in both]
    # The other copy is on the last stage, or on the first one. Names give one order on both.
    names = sorted(name for name, both in copies.items() if len(both) == 1)
    axis = _tied_axis(names, mesh)
    if axis is not None:
        alone = [copies[name][0] for name in names]
        _agree_who_has_one(alone, axis, mesh.device_type)
        _all_reduce(alone, axis, None)
        summed += alone
    return summed


def _sum_here(copies: Sequence[AnyGradient]) -> None:
    """Sum the gradients of copies on this rank, and give all of them the sum."""
    shapes = {gradient.shape: gradient.name for gradient in copies}
    if len(shapes) > 1:
        raise ValueError(
            f"{' and '.join(shapes.values())} are tied as {copies[0].role.tied!r} and have "
            f"shapes {list(shapes)}: copies of one parameter have one shape"
        )
    if not any(flag for gradient in copies for flag in gradient.produced):
        return
    for gradient in copies:
        gradient.complete([True] * len(gradient.produced))
    # The first copy collects the sum, so all copies end with the same bits.
    first, *others = copies
    for gradient in others:
        first.values.add_(gradient.values)
    for gradient in others:
        gradient.values.copy_(first.values)


def _agree_who_has_one(gradients: Sequence[AnyGradient], axis: MeshAxis, device_type: str) -> None:
    """A gradient that only some ranks of an axis have is zero on the others."""
    if not gradients:
        return
    group = axis.sibling("reduce")
    produced = [flag for gradient in gradients for flag in gradient.produced]
    flags = torch.tensor(produced, dtype=torch.int32, device=host_device([group], device_type))
    all_reduce_small([flags], group, op="max")
    agreed = map(bool, flags.tolist())
    for gradient in gradients:
        gradient.complete([next(agreed) for _ in gradient.produced])


def _all_reduce(gradients: Iterable[AnyGradient], axis: MeshAxis, scale: float | None) -> None:
    """Sum over an axis in fp32 at least, with one collective per dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for values in [gradient.values for gradient in gradients if any(gradient.produced)]:
        dtype = torch.promote_types(values.dtype, torch.float32)
        by_dtype.setdefault(dtype, []).append(values)
    for dtype, members in by_dtype.items():
        # One message for all of them, however small they are.
        packed = torch.cat([member.reshape(-1).to(dtype) for member in members])
        all_reduce_fp32(packed, packed, axis.sibling("reduce"), scale=scale)
        pieces = torch.split(packed, [member.numel() for member in members])
        for member, piece in zip(members, pieces, strict=True):
            member.copy_(piece.view(member.shape))


def _tied_axis(names: Iterable[str], mesh: ParallelMesh | DeviceMesh) -> MeshAxis | None:
    """The first and the last pipeline stage, which hold one copy each of the same parameters.

    Collective over those two stages, which compare what they hold.

    `names` are what this rank holds one copy of (the `tied` of a role). None: nobody else holds
    copies. ValueError refuses a tie to a stage in between, or one that only one of the two knows.
    """
    tied = sorted(names)
    stages = axis_if_there(mesh, "pp")
    if stages is None or stages.size == 1:
        return None
    first_or_last = stages.rank in (0, stages.size - 1)
    if tied and not first_or_last:
        raise ValueError(
            f"stage {stages.rank} of {stages.size} holds a parameter marked tied={tied[0]!r}: "
            "gradients of tied parameters are summed between the first and the last stage only; "
            "move it there, or give it a name of its own"
        )
    if isinstance(mesh, ParallelMesh):
        axis = mesh.embedding_axis
    else:
        axis = stages if stages.size == 2 else None
        if axis is None and tied:
            raise ValueError(
                f"tied={tied[0]!r} on a DeviceMesh with {stages.size} stages: the first and the "
                "last need a group of their own, which ParallelLayout(...).build() makes"
            )
    if axis is None or axis.size == 1:
        return None
    # A stage without ties takes part too: the other one may hold copies that have no partner here.
    _refuse_other_ties(tied, axis, mesh.device_type)
    return axis if tied else None


def _refuse_other_ties(tied: list[str], axis: MeshAxis, device_type: str) -> None:
    """Raise ValueError on both stages if they hold other names."""
    number = zlib.crc32("\0".join(tied).encode()) if tied else 0
    group = axis.sibling("reduce")
    device = host_device([group], device_type)
    # The largest number and the negated smallest one are each other's negatives if all are equal.
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    all_reduce_small([extremes], group, op="max")
    largest, negated = extremes.tolist()
    if largest != -negated:
        raise ValueError(
            f"this stage (ranks {axis.ranks}, place {axis.rank}) holds parameters tied as "
            f"{tied or 'nothing'}, and the stage at the other end of the pipeline others: mark "
            "both copies of a tied parameter with the same name, and freeze both or none"
        )
