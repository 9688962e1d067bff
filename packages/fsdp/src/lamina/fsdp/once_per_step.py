"""What a pipeline schedule wants of a sharded model: gathers and sums once per step.

A schedule runs a stage forward and backward for many microbatches, in turns. Gathering units at
every turn would send the weights twice per microbatch, and strategies 2 and 3 would sum gradients
as often. Here units stay whole from their first use in a step to its end, and gradients add up on
the rank: the memory of strategy 1 for the time of a step, which `memory_plan` shows.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

from lamina.ddp import Cadence
from lamina.fsdp.engine import ShardingEngine

__all__ = ["StepMethods"]


class StepMethods:
    """Mixin of sharded modules."""

    @property
    @abstractmethod
    def sharding_engine(self) -> ShardingEngine:
        """The model's engine."""

    def gather_once_per_step(self, once: bool = True) -> None:
        """Whether units that were gathered stay whole until `release_units`."""
        for unit in self.sharding_engine.units:
            unit.stays_whole = once
            for weights in unit.gathered:
                weights.kept_for_step = once
        if not once:
            self.release_units()

    def reduce_once_per_step(self, once: bool = True) -> None:
        """Whether gradients are summed over ranks by final backwards only, under any strategy.

        Strategies 2 and 3 otherwise sum every microbatch's, inside `no_sync` too.

        Raises:
            RuntimeError: while gradients are accumulated.
        """
        reducer = self.sharding_engine.reducer
        for group in reducer.groups[:1]:
            settings = group.settings
            reducer.set_cadence(
                Cadence.ONCE if once and settings.reduction.cadence is None else settings.cadence
            )

    def release_units(self) -> None:
        """Give whole weights back (the end of a step)."""
        for unit in self.sharding_engine.units:
            unit.reshard(even_if_kept=True)

    def late_gradients(self) -> AbstractContextManager[None]:
        """Gradients that arrive inside belong to backwards that are over (split backwards)."""
        return self.sharding_engine.reducer.late_gradients()
