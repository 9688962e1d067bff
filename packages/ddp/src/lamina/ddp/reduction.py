"""Ways to sum gradients over ranks, as data: what `reduction=` and `reproducible=` choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lamina.buffers import FlatBuffer
from lamina.collectives import (
    all_reduce_fp32,
    all_reduce_native,
    reduce_scatter_fp32,
    reduce_scatter_native,
)
from lamina.ddp.axes import DataParallelAxes
from lamina.ddp.rank_sums import AxisSum, Collectives, RankSum, TwoAxisSum
from lamina.ddp.reproducible import ReproducibleSum
from lamina.ddp.strategy import Cadence
from lamina.ddp.transient import TransientBuffers

__all__ = ["ORDERED", "Reduction", "resolve_reduction"]

RankSumFactory = Callable[[FlatBuffer, DataParallelAxes, float | None, TransientBuffers], RankSum]


@dataclass(frozen=True)
class Reduction:
    """One way to sum gradients over ranks.

    Attributes:
        name: for messages.
        make: makes the sum of one group.
        cadence: the cadence it needs whatever the strategy's; None leaves that to the strategy.
    """

    name: str
    make: RankSumFactory
    cadence: Cadence | None = None


def _by(collectives: Collectives) -> RankSumFactory:
    def make(
        main: FlatBuffer, axes: DataParallelAxes, scale: float | None, transient: TransientBuffers
    ) -> RankSum:
        kind = AxisSum if axes.outer.size == 1 else TwoAxisSum
        return kind(collectives, main, axes, scale, transient)

    return make


ORDERED = Reduction("ordered", _by(Collectives(reduce_scatter_fp32, all_reduce_fp32, True)))
"""Sums in fp32 in one fixed order over ranks (law 2)."""

_REDUCTIONS = {
    "ordered": ORDERED,
    "native": Reduction(
        "native", _by(Collectives(reduce_scatter_native, all_reduce_native, False))
    ),
}
_REPRODUCIBLE = Reduction("reproducible", ReproducibleSum, Cadence.EVERY_MICROBATCH)


def resolve_reduction(reduction: str = "ordered", reproducible: bool = False) -> Reduction:
    """The reduction that two settings ask for.

    Args:
        reduction: "ordered", or "native" for the backend's own (tolerance only).
        reproducible: one tree over microbatches and ranks: the same bits for every strategy and
            number of ranks. Every microbatch is reduced.

    Raises:
        ValueError: for an unknown name, or a native reduction that is to be reproducible.
    """
    if reduction not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"reduction={reduction!r} is not known; choose one of {known}")
    if not reproducible:
        return _REDUCTIONS[reduction]
    if reduction != "ordered":
        raise ValueError(
            f"reduction={reduction!r} leaves the order of the sum to the backend, which "
            "reproducible=True fixes: use reduction='ordered'"
        )
    return _REPRODUCIBLE
