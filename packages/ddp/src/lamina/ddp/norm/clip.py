"""The true global gradient norm, on every mesh, with each parameter counted once."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers.engine import PNorm
from lamina.collectives.engine import Agreement, CommonFacts, all_reduce_small
from lamina.ddp.group.group import step_agreement
from lamina.ddp.inspect.inspection import HasGroups
from lamina.ddp.monitor.health import HealthMonitor
from lamina.ddp.monitor.replicas import ReplicaMonitor
from lamina.ddp.norm.exact_squares import norm_of
from lamina.ddp.norm.shares import Share, shares_of
from lamina.ddp.parameters.axes import DataParallelAxes, whole_mesh
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, axis_if_there


def clip_grad_norm(
    parameters_or_module: nn.Module | Sequence[nn.Module] | Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    mesh: ParallelMesh | DeviceMesh | None = None,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    health: HealthMonitor | None = None,
    replicas: ReplicaMonitor | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`.

    Every parameter counts once: pieces are added over the axes that cut it (data-parallel shards,
    tensor-parallel pieces, experts, pipeline stages) and copies are not. Powers are added in fp64
    and the norm is rounded once, so the number of ranks does not change it. Modules that were
    wrapped with `invariant=True` have their 2-norm from integers, so no layout can change it.
    Collective over the mesh, or without one over the data-parallel ranks.

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
        health: judges the step by this norm and by the losses that it was given, which ride in the
            norm's message. Gradients of an unhealthy step are left as they are. The host waits for
            the norm.
        replicas: compares copies of weights and optimizer state over ranks, in the norm's message
            (with `norm_type=inf` in one of its own). The host waits for the norm.

    Returns:
        The norm before clipping: fp32, no dimensions, equal on all ranks.

    Raises:
        ValueError: for a negative `max_norm` or NaN, an order that is not positive, and without a
            mesh for parameters of which other ranks hold other parts, or with `health` or
            `replicas` on ranks that share no parameter. Also for fp64 gradients of a module that
            was wrapped with `invariant=True`.
        FloatingPointError: on every rank, if `health` says that training stops.
        DisagreementError: data- or tensor-parallel ranks have other steps or hyperparameters.
        ReplicaError: on every rank, if `replicas` finds copies that differ and does not heal them.
        RuntimeError: with `error_if_nonfinite`, on every rank, naming parameters with non-finite
            gradients where they are.

    Examples:
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> clip_grad_norm(model, max_norm=1.0).item()
        2.0
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"max_norm={max_norm} must be >= 0 and norm_type={norm_type} above 0")
    target = parameters_or_module
    items = [target] if isinstance(target, (nn.Module, torch.Tensor)) else list(target)
    norm_kind = norm_of(items, norm_type)
    shares = shares_of(items, norm_kind, mesh)
    op, device = norm_kind.op, _device_of(shares, mesh)
    # What rides in the norm's message, by who sends it: fp64 vectors, reduced as the norm is.
    riders: dict[str, torch.Tensor] = {}
    if health is not None:
        riders["health"] = health.message(op, device)
    if replicas is not None and op == "sum":
        riders["replicas"] = replicas.message(device)
    same = None if mesh is None or op != "sum" else _SameStep.of(items, mesh, device)
    # Riders make the host wait for the device: this one alone is not worth that.
    if same is not None and (riders or _reads_for_nothing(device)):
        riders["step"] = same.message
    total, axes = _total(shares, norm_kind, mesh, list(riders.values()))
    norm = total.to(torch.float32)
    read = _on_host({**riders, "norm": norm.double().reshape(1)}) if riders else {}
    # Ranks that differ in the step judge other things differently too, so this is judged first.
    if same is not None and "step" in read:
        same.judge(read["step"])
    if replicas is not None:
        if "replicas" in read:
            replicas.judge(read["replicas"], axes, device)
        else:
            replicas.compare()
    if health is not None:
        loss, ranks, *pace = read["health"]
        mean = None if not ranks else loss if math.isinf(norm_type) else loss / ranks
        names = functools.partial(_names, shares)
        if not health.judge(mean, read["norm"][0], axes, norm.device, names, pace).healthy:
            return norm
    # The host looks once at most, and never on a GPU that is not asked to refuse.
    known = float(norm) if error_if_nonfinite or _reads_for_nothing(norm.device) else math.nan
    if error_if_nonfinite and not math.isfinite(known):
        raise RuntimeError(_blame(known, shares, mesh))
    if math.isinf(max_norm) or known < 0.999 * max_norm - 1e-6:
        return norm  # the factor is one: a pass over all gradients saved
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for share in shares:
            share.gradient.mul_(factor.to(share.gradient.dtype))
    return norm


class _SameStep:
    """Compares, in the norm's message, what ranks' optimizers must have in common in a step.

    Ranks that hold the same parameters, or parts of them, are compared, and pipeline stages are
    not. The messages of equal ranks add up to zero. See Note [A sum that is zero if copies agree].
    """

    def __init__(self, axes: DataParallelAxes, step: Agreement, device: torch.device) -> None:
        self._step, wide = step, axes.wide
        along = f"ranks along {', '.join(axis.name for axis in wide)}"
        groups = [axis.sibling("reduce") for axis in wide]
        self._common = CommonFacts(along, groups, axes.here, device)
        word, _ = step.numbers
        halves = [word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF]  # fp64 adds 32 bits exactly
        factor = 1 if any(axis.rank for axis in wide) else 1 - _size(wide)
        # Filled in place: numbers that are copied from pageable memory make the host wait.
        self.message = torch.empty(len(halves), dtype=torch.float64, device=device)
        for place, half in zip(self.message, halves, strict=True):
            place.fill_(half * factor)

    @classmethod
    def of(
        cls,
        items: Sequence[nn.Module | torch.Tensor],
        mesh: ParallelMesh | DeviceMesh,
        device: torch.device,
    ) -> Self | None:
        """What is compared for some modules; None on one rank, and for parameters alone."""
        wrapped = (item for item in items if isinstance(item, HasGroups))
        groups = [group for item in wrapped for group in item.parameter_groups()]
        dense = next((g.axes for g in groups if not g.refs[0].role.expert), None)
        if dense is None:
            return None
        axes = replace(dense, tp=dense.tp or axis_if_there(mesh, "tp"))
        return cls(axes, step_agreement(groups), device) if axes.wide else None

    def judge(self, sums: Sequence[float]) -> None:
        """Raise DisagreementError on ranks that differ; collective if any do."""
        if any(sums):
            self._common.require(self._step)


def _total(
    shares: Sequence[Share],
    norm: PNorm,
    mesh: ParallelMesh | DeviceMesh | None,
    riders: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, tuple[MeshAxis, ...]]:
    """The norm in fp64, with the same collectives on every rank whatever parameters it has.

    Over a mesh each rank adds one share, a number unless the norm is exact (decision 0403). Without
    one it adds a share per set of data-parallel axes, which all ranks along them have alike. The
    message over the widest set takes along the `riders` (fp64), and that set is returned too.
    """
    device = _device_of(shares, mesh)
    everyone = whole_mesh(mesh)
    sums: dict[tuple[MeshAxis, ...], torch.Tensor] = {}
    if mesh is not None:
        # A rank without shares sends the norm of nothing, because the others wait for its message.
        sums[everyone] = norm.empty(device)
    for share in shares:
        axes = share.axes if mesh is None else everyone
        before = sums.setdefault(axes, norm.empty(device))
        if share.value is not None:
            sums[axes] = norm.join(before, share.value)
    widest = max(sums, key=_size, default=())
    if riders and mesh is None and _size(widest) < _world_size():
        raise ValueError(
            f"clip_grad_norm(health=, replicas=) without a mesh reaches {_size(widest)} of "
            f"{_world_size()} ranks, and the others would not know the verdict: pass mesh="
        )
    for axes, value in sums.items():
        message = [value, *riders] if axes is widest else [value]
        for axis in axes:
            all_reduce_small(message, axis.sibling("reduce"), op=norm.op)
    return norm.root(functools.reduce(norm.join, sums.values(), norm.empty(device))), widest


def _reads_for_nothing(device: torch.device) -> bool:
    """Whether the host need not wait to read a number of this device."""
    return device.type == "cpu"


def _on_host(vectors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """The values of some fp64 vectors; the host waits for the device once."""
    values = iter(torch.cat(list(vectors.values())).tolist())
    return {name: [next(values) for _ in range(len(each))] for name, each in vectors.items()}


def _size(axes: Sequence[MeshAxis]) -> int:
    return math.prod(axis.size for axis in axes)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _names(shares: Sequence[Share], infinite: bool) -> list[str]:
    """Parameters whose gradients are not finite on this rank, or else the one with the largest."""
    named = [pair for share in shares for pair in share.named]
    if infinite:
        return [name for name, gradient in named if not bool(torch.isfinite(gradient).all())]
    sizes = {name: float(part.double().norm()) for name, part in named if part.numel()}
    name = max(sizes, key=sizes.__getitem__, default="")
    return [f"{name} (norm {sizes[name]:.4g} on a rank)"] if name else []


def _blame(norm: float, shares: Sequence[Share], mesh: ParallelMesh | DeviceMesh | None) -> str:
    names = _names(shares, infinite=True)
    here = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    where = f" (rank at {dict(mesh.coordinate)})" if isinstance(mesh, ParallelMesh) else ""
    return (
        f"the gradient norm is {norm}; not finite on this rank{where}: "
        f"{here or 'nothing, so look at the messages of other ranks'}. Skip the step, or lower the "
        "loss scale or the learning rate"
    )


def _device_of(shares: Sequence[Share], mesh: ParallelMesh | DeviceMesh | None) -> torch.device:
    """Where messages lie. A rank without gradients sends from where its peers do."""
    if shares:
        return shares[0].gradient.device
    kind = "cpu" if mesh is None else mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
