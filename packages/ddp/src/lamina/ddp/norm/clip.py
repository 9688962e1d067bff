"""The true global gradient norm, on every mesh, with each parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.backward.gradient_hooks import main_of
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import HasGroups
from lamina.ddp.norm.shares import Measured, Ties, of_groups, of_parameters, whole_mesh
from lamina.mesh import ParallelMesh, role_of
from lamina.mesh.engine import MeshAxis

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    parameters_or_module: nn.Module | Sequence[nn.Module] | Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    mesh: ParallelMesh | DeviceMesh | None = None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`.

    Every parameter counts once: pieces are added over the axes that cut it (data-parallel shards,
    tensor-parallel pieces, experts, pipeline stages) and copies are not. Powers are added in fp64
    and the norm is rounded once, so the number of ranks does not change it. Collective over the
    mesh, or without one over the data-parallel ranks.

    Args:
        parameters_or_module: a wrapped module (fast: flat buffers, and the squares that reductions
            found by the way), this rank's pipeline stages, or parameters: those of the module, or
            the ones that its optimizer holds.
        max_norm: the limit; `inf` only measures.
        mesh: the mesh, for pieces that lie over tp, ep and pp; None for data parallelism alone
            (parameters known to lie over others are refused).
        norm_type: order of the norm; `inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite (synchronises the host, once). Without
            it such gradients are multiplied by NaN or zero, as torch does, unless `max_norm` is
            `inf`: nobody is told.

    Returns:
        The norm before clipping: fp32, no dimensions, equal on all ranks.

    Raises:
        ValueError: for a negative `max_norm` or NaN, an order that is not positive, and without a
            mesh for parameters of which other ranks hold other parts.
        RuntimeError: with `error_if_nonfinite`, on every rank, naming parameters with non-finite
            gradients where they are.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"max_norm={max_norm} must be >= 0 and norm_type={norm_type} above 0")
    found = _measured(parameters_or_module, mesh)
    norm = _norm(found, norm_type, mesh).to(torch.float32)
    # The one look of the host, and none on a GPU that is not asked to refuse.
    seen = float(norm) if error_if_nonfinite or norm.device.type == "cpu" else math.nan
    if error_if_nonfinite and not math.isfinite(seen):
        raise RuntimeError(_blame(seen, found, mesh))
    if math.isinf(max_norm) or seen < 0.999 * max_norm - 1e-6:
        return norm  # the factor is one: a pass over all gradients saved
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for piece in found:
            piece.scaled.mul_(factor.to(piece.scaled.dtype))
    return norm


def _measured(
    target: nn.Module | Sequence[nn.Module] | Iterable[torch.Tensor] | torch.Tensor,
    mesh: ParallelMesh | DeviceMesh | None,
) -> list[Measured]:
    given = [target] if isinstance(target, (nn.Module, torch.Tensor)) else list(target)
    found: list[Measured] = []
    ties = Ties.among(role_of(p) for item in given for p in _parameters_of(item))
    for item in given:
        groups = list(item.parameter_groups()) if isinstance(item, HasGroups) else []
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            _refuse_parts(groups, () if groups else _parameters_of(item))
        if groups:
            found += of_groups(groups, mesh, ties)
        elif isinstance(item, nn.Module):  # plain, or wrapped over another engine
            found += of_parameters(item.named_parameters(), mesh, ties)
    parameters = [item for item in given if isinstance(item, torch.Tensor)]
    names = ((f"parameter {index}", item) for index, item in enumerate(parameters))
    return found + of_parameters(names, mesh, ties)


def _refuse_parts(groups: Iterable[ParameterGroup], parameters: Iterable[torch.Tensor]) -> None:
    """Without a mesh: refuse what is known to lie over other than data-parallel ranks."""
    for group in groups:
        ref, axes = group.refs[0], group.axes
        why = f"the mesh has {' and '.join(axes.apart)} ranks" if axes.apart else None
        if ref.role.tp_shard_dim is not None:
            why = f"{ref.name} is cut over tp"
        elif ref.role.expert and axes.size < axes.divisor:
            why = f"{ref.name} is an expert's, and other ranks hold other experts"
        _refuse_because(why)
    for index, parameter in enumerate(parameters):
        role = role_of(main_of(parameter))
        shape = tuple(parameter.shape)
        for reason, holds in (
            ("is cut over tp", role.tp_shard_dim is not None),
            ("is an expert's", role.expert),
            ("is tied across pipeline stages", role.tied is not None),
        ):
            _refuse_because(f"parameter {index} of shape {shape} {reason}" if holds else None)


def _refuse_because(why: str | None) -> None:
    if why is not None:
        raise ValueError(
            f"clip_grad_norm without a mesh adds over data-parallel ranks alone, and {why}: the "
            "norm, and so the factor, would differ between ranks; pass mesh="
        )


def _parameters_of(item: nn.Module | torch.Tensor) -> Iterable[torch.Tensor]:
    return item.parameters() if isinstance(item, nn.Module) else (item,)


def _norm(
    found: Sequence[Measured],
    order: float,
    mesh: ParallelMesh | DeviceMesh | None,
) -> torch.Tensor:
    """The norm in fp64. What is added up is one number per rank, so all ranks join in alike."""
    everyone = whole_mesh(mesh)
    largest = math.isinf(order)
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
        torch.maximum if largest else torch.add
    )
    device = found[0].scaled.device if found else _device_of(mesh)
    by_axes: dict[tuple[MeshAxis, ...], torch.Tensor] = {}
    if mesh is not None:
        by_axes[everyone] = torch.zeros((), dtype=torch.float64, device=device)
    for piece in found:
        key = everyone if mesh is not None else piece.axes
        before = by_axes.setdefault(key, torch.zeros((), dtype=torch.float64, device=device))
        value = _power_sum_of(piece, order)
        if value is not None:
            by_axes[key] = combine(before, value)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for key, value in by_axes.items():
        for axis in key:
            all_reduce_small([value], axis.sibling("reduce"), op="max" if largest else "sum")
        total = combine(total, value)
    return total if largest else total.pow(1.0 / order)


def _power_sum_of(piece: Measured, order: float) -> torch.Tensor | None:
    """What this rank adds for a piece: nothing where it holds a copy that another rank counts."""
    if order == 2.0 and piece.squares is not None:
        return piece.squares if piece.counts_squares else None
    return _power_sum(piece.flat, order) if piece.counts else None


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


def _blame(norm: float, found: Sequence[Measured], mesh: ParallelMesh | DeviceMesh | None) -> str:
    names = [
        name
        for piece in found
        for name, part in piece.parts()
        if not bool(torch.isfinite(part).all())
    ]
    here = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    where = f" (rank at {dict(mesh.coordinate)})" if isinstance(mesh, ParallelMesh) else ""
    return (
        f"the gradient norm is {norm}; not finite on this rank{where}: "
        f"{here or 'nothing, so look at the messages of other ranks'}. Skip the step, or lower the "
        "loss scale or the learning rate"
    )


def _device_of(mesh: ParallelMesh | DeviceMesh | None) -> torch.device:
    """Where a rank without gradients makes its zero: where its peers' messages come from."""
    kind = "cpu" if mesh is None else mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
