"""Limits in bytes: of whole weights that are live, and of gradients on the wire."""

from collections.abc import Iterable, Mapping, Sequence

from lamina.fsdp.execution.unit import Unit, UnitState
from lamina.fsdp.units.plan import UnitPlan

__all__ = ["GatherBudget", "check_budgets"]


class GatherBudget:
    """How many bytes of whole weights may be live at once, and who makes room for whom.

    A unit is gathered ahead only where it fits. One that is about to compute is always gathered:
    units that are not computing (gathered ahead, or kept since their forward) go first. Units that
    stay whole for a step because somebody asked for it are not counted.

    Args:
        units: the model's units.
        limit: bytes per rank.
    """

    def __init__(self, units: Iterable[Unit], limit: int) -> None:
        self.limit = limit
        self._units = tuple(units)

    @property
    def live(self) -> int:
        """Bytes of whole weights that are there or on their way."""
        return sum(unit.live_bytes for unit in self._units if not unit.stays_whole)

    def fits(self, unit: Unit) -> bool:
        """Whether a unit can be gathered beside what is live."""
        return self.live + unit.gathered_bytes - unit.live_bytes <= self.limit

    def make_room(self, unit: Unit, order: Sequence[Unit], computing: Sequence[Unit]) -> None:
        """Give back what need not be there for a unit that is about to compute.

        Args:
            unit: the unit.
            order: in which units run; those whose turn is farthest off go first.
            computing: units in whose forward we are.
        """
        if self.fits(unit):
            return
        turn = {id(one): index for index, one in enumerate(order)}
        here = turn.get(id(unit), 0)
        idle = [
            other
            for other in self._units
            if other.live_bytes
            and other is not unit
            and other.state is not UnitState.IN_BACKWARD
            and not any(other is one for one in computing)
        ]
        idle.sort(key=lambda other: abs(turn.get(id(other), len(order)) - here), reverse=True)
        for other in idle:
            if self.fits(unit):
                return
            other.reshard()


def check_budgets(
    plans: Sequence[UnitPlan],
    gathered: Mapping[str, int],
    on_wire: Mapping[str, int],
    gathers: int | None,
    reductions: int | None,
) -> None:
    """Refuse limits under which a step could not be made.

    Args:
        plans: the units.
        gathered: bytes of each unit's whole weights, by the unit's name.
        on_wire: bytes of each unit's largest reduction.
        gathers: limit of whole weights; None for none.
        reductions: limit of gradients on the wire; None for none.

    Raises:
        ValueError: if the units that compute together, or one reduction, are more.
    """
    within = {plan.name: set(map(id, plan.module.modules())) for plan in plans}
    for plan in plans:
        around = [name for name, inside in within.items() if id(plan.module) in inside]
        needed = sum(gathered[name] for name in around)
        if gathers is not None and needed > gathers:
            names = " and ".join(name or "the root" for name in around)
            raise ValueError(
                f"gather_budget={gathers} bytes, and the whole weights of {names}, which compute "
                f"together, are {needed} bytes: raise it, or choose smaller fsdp_unit_modules"
            )
        if reductions is not None and on_wire[plan.name] > reductions:
            raise ValueError(
                f"reduce_budget={reductions} bytes, and gradients of {plan.name or 'the root'} are "
                f"{on_wire[plan.name]} bytes on the wire: raise it, or choose smaller "
                "fsdp_unit_modules"
            )
