"""What torch's `GradScaler` finds before it steps an optimizer whose gradients Lamina sums.

A scaler asks an optimizer whether it scales by itself (`_step_supports_amp_scaling`), before it
looks at any gradient. That question is answered here, because nothing else tells an optimizer that
a scaler is about to decide for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch.optim import Optimizer

from lamina.ddp.engine import ParameterGroup
from lamina.fsdp.execution.engine import ShardingEngine

__all__ = ["meet_scalers"]

_QUESTION = "_step_supports_amp_scaling"


def meet_scalers(
    optimizer: Optimizer, engine: ShardingEngine, groups: Iterable[ParameterGroup]
) -> None:
    """Let gradient scalers see finished gradients, and refuse those whose ranks would disagree.

    Args:
        optimizer: the user's own.
        engine: sums the gradients; finished before a scaler looks at them.
        groups: what the optimizer updates. Ranks beyond their data-parallel ones hold other
            parameters (tp, pp, ep, expert_tp), which a plain scaler does not see: it is refused
            when it steps.
    """
    answer = getattr(optimizer, _QUESTION, False)
    if not isinstance(answer, _Answer):
        answer = optimizer.__dict__[_QUESTION] = _Answer(optimizer, own=bool(answer))
    answer.add(engine, [group.axes.size for group in groups])


class _Answer:
    """True or false as the optimizer had it; asked by a scaler that is about to step."""

    def __init__(self, optimizer: Optimizer, *, own: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._own = own
        self._engines: list[weakref.ref[ShardingEngine]] = []  # in one order on all ranks
        self._ranks = self._alike = dist.get_world_size() if dist.is_initialized() else 1

    def add(self, engine: ShardingEngine, sizes: Iterable[int]) -> None:
        """One more model that the optimizer updates, with so many data-parallel ranks."""
        self._engines.append(weakref.ref(engine))
        self._alike = min([self._alike, *sizes])

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        agreed = optimizer is not None and optimizer.__dict__.get("overflow_agreed", False)
        if self._alike < self._ranks and not agreed:
            raise RuntimeError(
                f"torch's GradScaler looks at this rank's gradients, and {self._alike} of the "
                f"{self._ranks} ranks share them: the others, along tp, pp, ep or expert_tp, "
                "hold other gradients, so some would skip a step that the rest make. Use "
                "lamina.ddp.ShardedGradScaler(mesh) with the mesh of all of them"
            )
        for reference in self._engines:
            if (engine := reference()) is not None and not engine.reducer.is_final:
                engine.reducer.finish()
        return self._own
