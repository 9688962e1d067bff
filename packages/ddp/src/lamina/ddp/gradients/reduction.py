"""Ways to sum gradients over ranks, as data: what `reduction=` and `reproducible=` choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lamina.buffers import FlatBuffer
from lamina.collectives.engine import MESSAGE_BYTES, ErrorFeedback, Int8Blocks, ReductionName
from lamina.ddp.gradients.reproducible import ReproducibleSum
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.sums import AxisSum, Collectives, RankSum, TwoAxisSum
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.strategy import Cadence

__all__ = ["ORDERED", "Reduction", "resolve_reduction"]

RankSumFactory = Callable[[FlatBuffer, DataParallelAxes, float | None, ScratchBuffers], RankSum]


@dataclass(frozen=True)
class Reduction:
    """One way to sum gradients over ranks.

    `make` makes the sum of one group, at a cadence of its own or, with None, of the strategy. A
    rank that `keeps_losses` keeps what its wire has lost: one fp32 number per element. Backends
    (NCCL) bring large ordered sums in slices of `message_bytes`.
    """

    name: str
    make: RankSumFactory
    cadence: Cadence | None = None
    keeps_losses: bool = False
    message_bytes: int = MESSAGE_BYTES


def _by(
    reduction: ReductionName,
    *,
    averages: bool = False,
    int8: bool = False,
    checked: bool = False,
    message_bytes: int = MESSAGE_BYTES,
) -> RankSumFactory:
    """A factory of sums over axes; with `averages` the collectives divide by the ranks already.

    With `int8` each sum has a codec of its own, because what it has lost belongs to its buffer.
    """

    def make(
        main: FlatBuffer, axes: DataParallelAxes, scale: float | None, scratch: ScratchBuffers
    ) -> RankSum:
        kind = AxisSum if axes.outer.size == 1 else TwoAxisSum
        if averages:
            rest = (1.0 if scale is None else scale) * axes.size
            scale = None if rest == 1.0 else rest
        codec = ErrorFeedback(Int8Blocks()) if int8 else None
        collectives = Collectives(
            reduction,
            average=averages,
            codec=codec,
            checked=checked,
            message_bytes=message_bytes,
        )
        return kind(collectives, main, axes, scale, scratch)

    return make


ORDERED = Reduction("ordered", _by("ordered"))
"""Sums in fp32 in one fixed order over ranks (law 2)."""

_REDUCTIONS = {
    "ordered": ORDERED,
    "native": Reduction("native", _by("native")),
    "int8": Reduction("int8", _by("ordered", int8=True), keeps_losses=True),
    "checked": Reduction("checked", _by("ordered", checked=True)),
}
_NATIVE_AVERAGE = Reduction("native", _by("native", averages=True))
"""The backend divides by the number of ranks: sums in fp16 do not overflow."""
_REPRODUCIBLE = Reduction("reproducible", ReproducibleSum, Cadence.EVERY_MICROBATCH)


def resolve_reduction(
    reduction: str = "ordered",
    reproducible: bool = False,
    average: bool = False,
    *,
    per_token: bool = False,
    message_bytes: int = MESSAGE_BYTES,
) -> Reduction:
    """The reduction that settings ask for.

    Args:
        reduction: "ordered"; "checked" for the same with checksums on the wire (CPUs only);
            "native" for the backend's own (tolerance only); "int8" for the
            ordered sum of what a wire of int8 blocks makes of the gradients (docs/ddp.md).
        reproducible: one tree over microbatches and ranks: the same bits for every strategy and
            number of ranks. Every microbatch is reduced.
        average: let the backend average instead of sum, where it is the backend that adds. The
            ordered sum is scaled in fp32 as it is stored, whatever this says.
        per_token: sums are left for `finalize_grads` to divide.
        message_bytes: of the slices in which a backend (NCCL) brings large ordered sums.

    Raises:
        ValueError: for messages of no bytes or of a size that the reduction does not take, an
            unknown name, a native reduction that is to be reproducible, or an average of what is
            to be left a sum.
    """
    if average and per_token:
        raise ValueError(
            "average_in_collective=True averages over ranks and calculate_per_token_loss=True "
            "leaves sums for finalize_grads(num_tokens=) to divide: choose one"
        )
    if reduction not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"reduction={reduction!r} is not known; choose one of {known}")
    if message_bytes < 1:
        raise ValueError(f"reduce_message_bytes={message_bytes}: a message needs a byte at least")
    if message_bytes != MESSAGE_BYTES:
        if reproducible or reduction != "ordered":
            raise ValueError(
                f"reduce_message_bytes={message_bytes} cuts ordered sums, and reduction="
                f"{reduction!r}, reproducible={reproducible} has messages of its own: leave it out"
            )
        make = _by("ordered", message_bytes=message_bytes)
        return replace(ORDERED, make=make, message_bytes=message_bytes)
    if not reproducible:
        native_average = average and reduction == "native"
        return _NATIVE_AVERAGE if native_average else _REDUCTIONS[reduction]
    if reduction == "int8":
        raise ValueError(
            "reduction='int8' adds to each gradient what this rank's earlier ones have lost on the "
            "wire, so other ranks would send other numbers, and reproducible=True gives the same "
            "bits for any number of ranks: use reduction='ordered'"
        )
    if reduction == "checked":
        raise ValueError(
            "reduction='checked' and reproducible=True: the reproducible sum has no checksums on "
            "its wire; choose one"
        )
    if reduction != "ordered":
        raise ValueError(
            f"reduction={reduction!r} leaves the order of the sum to the backend, which "
            "reproducible=True fixes: use reduction='ordered'"
        )
    return _REPRODUCIBLE
