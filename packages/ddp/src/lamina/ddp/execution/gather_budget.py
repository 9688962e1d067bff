"""How many bytes of whole weights a rank may have at once, and who makes room for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.ddp.execution.unit import Unit


class GatherBudget:
    """A limit on the bytes of whole weights that are there, or on their way.

    A unit is gathered ahead only where it fits. One that is about to compute is always gathered:
    units that are not computing (gathered ahead, or kept since their forward) go first. Units that
    stay whole for a step because somebody asked for it are not counted.
    """

    def __init__(self, units: Iterable[Unit], limit: int) -> None:
        self.limit = limit
        self._units = tuple(units)

    def fits(self, unit: Unit) -> bool:
        """Whether a unit can be gathered beside what is there or on its way."""
        # Units that stay whole for a step cannot be given back, so the limit is not about them.
        live = sum(other.live_bytes for other in self._units if not other.stays_whole)
        return live + unit.gathered_bytes - unit.live_bytes <= self.limit

    def make_room(self, unit: Unit, order: Sequence[Unit], computing: Sequence[Unit]) -> None:
        """Give back what need not be there for a unit that is about to compute.

        Units run in this order: those whose turn is farthest off go first, and none in whose
        forward we are (`computing`).
        """
        if self.fits(unit):
            return
        turn = {id(other): index for index, other in enumerate(order)}
        here = turn.get(id(unit), 0)
        idle = [
            other
            for other in self._units
            if other.live_bytes
            and other is not unit
            and not other.in_backward
            and not any(other is busy for busy in computing)
        ]
        idle.sort(key=lambda other: abs(turn.get(id(other), len(order)) - here), reverse=True)
        for other in idle:
            if self.fits(unit):
                return
            other.reshard()
