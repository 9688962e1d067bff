"""`check_order=True`: a unit that runs on some ranks only is named, where it would hang the others.

Under strategy 3 a unit's gather needs all ranks, so it runs on all of them or on none. Before every
gather, and at the end of every forward and backward, ranks tell each other where they are: a small
collective and a synchronisation each time, on a communicator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.collectives import all_gather_into
from lamina.fsdp.unit import Unit
from lamina.mesh import MeshAxis

__all__ = ["OrderCheck", "RankOrderError"]

_REMEDY = (
    "Under zero_dp_strategy=3 a unit runs on all ranks or on none: call it everywhere (on a dummy "
    "batch, times zero), or use zero_dp_strategy=2, which keeps weights whole"
)


class RankOrderError(RuntimeError):
    """Ranks run different units."""


class OrderCheck:
    """Compares over ranks which unit comes next.

    Args:
        axis: the sharding axis.
        units: the model's units.
        device: where the messages lie.
    """

    def __init__(self, axis: MeshAxis, units: Sequence[Unit], device: torch.device) -> None:
        self._axis = axis
        self._group = axis.sibling("check")
        self._names = [unit.name or "the root" for unit in units]
        self._places = {id(unit): place for place, unit in enumerate(units)}
        self._device = device
        self._stops = ["the end of a forward", "the end of a backward"]

    def gather(self, unit: Unit, ran: Sequence[Unit]) -> None:
        """A unit is about to be gathered, after these have begun to run.

        Raises:
            RankOrderError: if another rank gathers another, or has come to an end.
        """
        self._meet(self._places[id(unit)], ran)

    def end(self, ran: Sequence[Unit], *, backward: bool) -> None:
        """A forward or a backward has ended in which these units ran.

        Raises:
            RankOrderError: if they did not on another rank.
        """
        self._meet(len(self._names) + backward, ran)

    def _meet(self, place: int, ran: Sequence[Unit]) -> None:
        if self._group is None:
            return
        flags = [0] * len(self._names)
        for unit in ran:
            flags[self._places[id(unit)]] = 1
        mine = torch.tensor([place, *flags], device=self._device)
        everybody = mine.new_empty(self._axis.size * mine.numel())
        all_gather_into(everybody, mine, self._group).wait()
        found: list[list[int]] = everybody.view(self._axis.size, -1).tolist()
        where = [*self._names, *self._stops]
        by_place = {where[one[0]]: self._ranks(found, 0, one[0]) for one in found}
        at = "; ".join(f"at {name} on ranks {ranks}" for name, ranks in by_place.items())
        for index, name in enumerate(self._names, start=1):
            on, off = self._ranks(found, index, 1), self._ranks(found, index, 0)
            if on and off:
                ran_on = f"{name} has run on ranks {on} of {self._axis.name!r} and not on {off}"
                raise RankOrderError(f"{ran_on} ({at}). {_REMEDY}")
        if len(by_place) > 1:
            raise RankOrderError(f"ranks of {self._axis.name!r} differ: {at}. {_REMEDY}")

    def _ranks(self, found: Sequence[Sequence[int]], index: int, value: int) -> list[int]:
        ranks = zip(self._axis.ranks, found, strict=True)
        return [rank for rank, one in ranks if one[index] == value]
