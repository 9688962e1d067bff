"""What routers did in a step: load, entropy, what was dropped, auxiliary losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from lamina.collectives.engine import all_reduce_small
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.router import RoutingTotals, TopKRouter

__all__ = ["LayerRouting", "routing_statistics"]


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing in the last step, over all ranks.

    Attributes:
        load: each expert's share of the copies, before any were dropped; they sum to one.
        entropy: of a token's scores in nats, averaged; `log(num_experts)` if it knows nothing.
        dropped: share of the copies that found no place.
        losses: auxiliary losses by name, with their coefficients.
    """

    load: tuple[float, ...]
    entropy: float
    dropped: float
    losses: dict[str, float]

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean: 1 is balanced."""
        return max(self.load) * len(self.load)


def routing_statistics(model: nn.Module, mesh: MeshLike = None) -> dict[str, LayerRouting]:
    """What the routers of a model did in the last training step, by the router's name.

    The last step is what came before the last `finalize_step` (that `finalize_grads` calls), or
    all there was if it was never called. Collective over the ranks that hold different tokens;
    the host waits once.

    Args:
        model: holds routers, at any depth; the same on all ranks of the mesh.
        mesh: the mesh; None for one process.
    """
    routers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) and module.latest.chosen is not None
    }
    if not routers:
        return {}
    totals = [router.latest for router in routers.values()]
    rows = [_row(t) for t in totals]
    packed = torch.cat(rows)
    axes = next(iter(routers.values())).axes
    if mesh is not None:
        axes = ExpertAxes.of(mesh, sequence_parallel=not axes.replicated)
    for axis in axes.token_axes:
        all_reduce_small([packed], axis.sibling("tokens"))
    shared_by = math.prod(axis.size for axis in axes.along_sequence)
    values = iter(packed.tolist())
    return {
        name: _read(router.latest, list(islice(values, row.numel())), shared_by)
        for (name, router), row in zip(routers.items(), rows, strict=True)
    }


def _row(totals: RoutingTotals) -> Tensor:
    """Counts, sums, and forwards: ranks may differ in those."""
    chosen = totals.chosen
    if chosen is None:
        raise ValueError("a router without counts")
    sums = (value.double().flatten() for value in totals.sums.values())
    # Not a tensor of the host's number: on CUDA its copy makes the host wait.
    forwards = torch.full((1,), totals.forwards, dtype=torch.float64, device=chosen.device)
    return torch.cat([chosen.double(), *sums, forwards])


def _read(totals: RoutingTotals, values: list[float], shared_by: int) -> LayerRouting:
    """Name the sums over all ranks; `shared_by` of them hold parts of each microbatch."""
    *values, forwards = values
    experts = len(values) - len(totals.sums)
    sums = dict(zip(totals.sums, values[experts:], strict=True))
    copies = max(sum(values[:experts]), 1.0)
    microbatches = forwards / shared_by
    return LayerRouting(
        load=tuple(value / copies for value in values[:experts]),
        entropy=sums.pop("entropy") / max(sums.pop("tokens"), 1.0),
        dropped=sums.pop("dropped") / copies,
        losses={name: value / microbatches for name, value in sums.items()},
    )
