"""Statistics of the routers of a model in a step, over all ranks."""

import math
from dataclasses import dataclass
from itertools import islice
from typing import cast

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
        entropy: the mean entropy of a token's scores in nats; `log(num_experts)` if all are equal.
        dropped: the share of the copies that were dropped.
        losses: auxiliary losses by name, with their coefficients.
    """

    load: tuple[float, ...]
    entropy: float
    dropped: float
    losses: dict[str, float]

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load: 1 is balanced."""
        return max(self.load) * len(self.load)


def routing_statistics(model: nn.Module, mesh: MeshLike = None) -> dict[str, LayerRouting]:
    """Return the statistics of the last training step, by the router's name.

    A step ends with `finalize_step`, which `finalize_grads` calls. If it was never called, all
    forwards so far are one step. This is collective over the ranks that hold different tokens, and
    the host waits for the device once.

    Args:
        model: holds routers, at any depth; the same on all ranks of the mesh.
        mesh: the mesh; None for one process.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> routing_statistics(GPTModel(config))  # a model without experts
        {}
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
    """Counts, sums, and the number of forwards, in which ranks may differ."""
    chosen = cast(Tensor, totals.chosen)
    sums = (value.double().flatten() for value in totals.sums.values())
    # torch.tensor would copy from the host, which waits on CUDA.
    forwards = torch.full((1,), totals.forwards, dtype=torch.float64, device=chosen.device)
    return torch.cat([chosen.double(), *sums, forwards])


def _read(totals: RoutingTotals, values: list[float], shared_by: int) -> LayerRouting:
    """Turn the sums over all ranks into statistics; `shared_by` ranks share each microbatch."""
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
