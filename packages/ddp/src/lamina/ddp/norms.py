"""The true global gradient norm, on every mesh, with each parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import Shard, ShardedTensor
from lamina.collectives import all_reduce_small
from lamina.ddp.group import ParameterGroup
from lamina.ddp.inspection import HasGroups
from lamina.mesh import MeshAxis, ParallelMesh, Role, mesh_axis, role_of

__all__ = ["clip_grad_norm"]


@dataclass(frozen=True)
class _Piece:
    """Gradients that lie flat here, and the axes over which other pieces of them lie."""

    name: str
    flat: torch.Tensor
    axes: tuple[MeshAxis, ...]


def clip_grad_norm(
    parameters_or_module: nn.Module | Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    mesh: ParallelMesh | DeviceMesh | None = None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`.

    Every parameter counts once: pieces are added over the axes that cut it (data-parallel shards,
    tensor-parallel pieces, experts, pipeline stages) and copies are not. Powers are added in fp64
    and the norm is rounded once, so the number of ranks does not change it.

    Args:
        parameters_or_module: a wrapped module (fast: flat buffers), or parameters.
        max_norm: the limit; `inf` only measures.
        mesh: the mesh, for pieces that lie over tp, ep and pp; None for data parallelism alone.
        norm_type: order of the norm; `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite (synchronises the host).

    Returns:
        The norm before clipping: fp32, no dimensions, equal on all ranks.

    Raises:
        ValueError: for a negative `max_norm` or an order that is not positive.
        RuntimeError: with `error_if_nonfinite`, naming parameters with non-finite gradients here.
    """
    if max_norm < 0 or not norm_type > 0:
        raise ValueError(f"max_norm={max_norm} must be >= 0 and norm_type={norm_type} above 0")
    pieces, scaled = _pieces(parameters_or_module, mesh)
    total = _norm(pieces, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        found = [piece.name for piece in pieces if not bool(torch.isfinite(piece.flat).all())]
        raise RuntimeError(
            f"the gradient norm is {float(total)}; not finite on this rank: "
            f"{', '.join(found[:5]) or 'nothing (look at other ranks)'}. Skip the step, or lower "
            "the loss scale or learning rate"
        )
    norm = total.to(torch.float32)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for tensor in scaled:
            tensor.mul_(factor.to(tensor.dtype))
    return norm


def _norm(pieces: Sequence[_Piece], order: float) -> torch.Tensor:
    """Combine over each axis the sums of the pieces that lie along it: one message per axis."""
    device = pieces[0].flat.device if pieces else torch.device("cpu")
    largest = math.isinf(order)
    sums: dict[tuple[MeshAxis, ...], torch.Tensor] = {}
    for piece in pieces:
        value = _power_sum(piece.flat, order)
        before = sums.get(piece.axes)
        if before is not None:
            value = torch.maximum(before, value) if largest else before + value
        sums[piece.axes] = value
    axes = sorted({axis for key in sums for axis in key}, key=lambda axis: axis.name)
    for axis in axes:
        along = [sums[key] for key in sorted(sums, key=_names) if axis in key]
        all_reduce_small(along, axis.sibling("reduce"), op="max" if largest else "sum")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key in sorted(sums, key=_names):
        total = torch.maximum(total, sums[key]) if largest else total + sums[key]
    return total if largest else total.pow(1.0 / order)


def _names(axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def _power_sum(flat: torch.Tensor, order: float, chunk: int = 1 << 20) -> torch.Tensor:
    """Sum of |x|^order in fp64 (or the largest |x|), a cache-sized piece at a time."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].double()
        if math.isinf(order):
            total = torch.maximum(total, part.abs().max())
        elif order == 2.0:
            total = total + torch.dot(part, part)
        else:
            total = total + part.abs().pow(order).sum()
    return total


def _pieces(
    target: nn.Module | Iterable[torch.Tensor] | torch.Tensor,
    mesh: ParallelMesh | DeviceMesh | None,
) -> tuple[list[_Piece], list[torch.Tensor]]:
    """What is measured, and the tensors that are scaled (copies of counted ones included)."""
    if isinstance(target, nn.Module):
        if isinstance(target, HasGroups):
            return _of_groups(target.parameter_groups(), mesh)
        target = target.parameters()
    parameters = [target] if isinstance(target, torch.Tensor) else list(target)
    pieces, scaled = [], []
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        axes = _model_axes(role_of(parameter), mesh)
        if isinstance(gradient, ShardedTensor):
            flat = gradient.to_local()
            axes = (*(axis for axis in gradient.spec.axes if isinstance(axis, MeshAxis)), *axes)
        else:
            flat = gradient.reshape(-1)
        scaled.append(flat if isinstance(gradient, ShardedTensor) else gradient)
        if _counts_here(role_of(parameter), mesh):
            pieces.append(_Piece(f"parameter {index}", flat, axes))
    return pieces, scaled


def _of_groups(
    groups: Iterable[ParameterGroup], mesh: ParallelMesh | DeviceMesh | None
) -> tuple[list[_Piece], list[torch.Tensor]]:
    pieces, scaled = [], []
    for group in groups:
        if group.gradients is None or not any(group.gradients.seen):
            continue
        main = group.gradients.main
        scaled.append(main.data)
        cut = tuple(
            axis
            for placement, axis in zip(
                main.placement, (group.axes.outer, group.axes.inner), strict=True
            )
            if isinstance(placement, Shard)
        )
        role = group.refs[0].role  # what counts here is the same for a whole group
        if _counts_here(role, mesh):
            name = f"{group.refs[0].name} .. {group.refs[-1].name}"
            pieces.append(_Piece(name, main.data, (*cut, *_model_axes(role, mesh))))
    return pieces, scaled


def _model_axes(role: Role, mesh: ParallelMesh | DeviceMesh | None) -> tuple[MeshAxis, ...]:
    """The model-parallel axes along which other ranks hold other elements."""
    if mesh is None:
        return ()
    names = ["pp"]
    if role.expert:
        names += ["ep", "expert_tp"] if role.tp_shard_dim is not None else ["ep"]
    elif role.tp_shard_dim is not None:
        names.append("tp")
    if isinstance(mesh, DeviceMesh):
        names = [name for name in names if name in (mesh.mesh_dim_names or ())]
    axes = (mesh_axis(mesh, name) for name in names)
    return tuple(axis for axis in axes if axis.size > 1)


def _counts_here(role: Role, mesh: ParallelMesh | DeviceMesh | None) -> bool:
    """A parameter tied across stages is counted on the first that holds it."""
    if role.tied is None or not isinstance(mesh, ParallelMesh):
        return True
    axis = mesh.embedding_axis
    return axis is None or axis.rank == 0
