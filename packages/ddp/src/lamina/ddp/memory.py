"""Memory as a formula: what a wrapped model holds at rest and at its peak, from its layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from lamina.ddp.group import ParameterGroup
from lamina.ddp.inspection import InspectsItself, groups_of
from lamina.ddp.strategy import Cadence

__all__ = ["MemoryBudgets", "MemoryPlan", "memory_plan"]


@dataclass(frozen=True)
class MemoryBudgets:
    """Limits in bytes per rank that a wrapper keeps; None where it keeps another.

    Attributes:
        gathers: whole weights that are live.
        reductions: gradients on the wire.
    """

    gathers: int | None = None
    reductions: int | None = None


@runtime_checkable
class _HasBudgets(Protocol):
    @property
    def memory_budgets(self) -> MemoryBudgets: ...


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank of one wrapped model, without activations and optimizer state.

    Attributes:
        weights: model weights at rest.
        main_weights: main weights that do not share the model weights' memory.
        main_grads: reduced gradients (kept, or from the first reduction until the forward after
            they were zeroed: `GroupSettings.release_gradients`).
        local_grads: gradients of a whole step before their reduction (strategies 0 and 1 where
            they can't share the main grads' memory).
        gathered: whole weights of the two largest units, for strategies that gather, and of all
            units that stay gathered for a step (pipeline schedules use them every microbatch).
            With a budget, that many bytes instead of two units.
        in_flight: gradient buffers of the two largest units, and what their reduction receives;
            with a budget, that many bytes, what they receive, and the largest buffer being filled.
        padding: the part of `weights` that belongs to no parameter.
    """

    weights: int
    main_weights: int
    main_grads: int
    local_grads: int
    gathered: int
    in_flight: int
    padding: int

    @property
    def resident(self) -> int:
        """Bytes held between steps."""
        return self.weights + self.main_weights + self.main_grads

    @property
    def peak(self) -> int:
        """Bytes held at most during a step, without activations and optimizer state."""
        return self.resident + self.local_grads + self.gathered + self.in_flight

    def __str__(self) -> str:
        rows = [
            ("model weights", self.weights),
            ("main weights", self.main_weights),
            ("main grads", self.main_grads),
            ("at rest", self.resident),
            ("local gradients of a step", self.local_grads),
            ("gathered units", self.gathered),
            ("reductions in flight", self.in_flight),
            ("peak", self.peak),
            ("of it padding at rest", self.padding),
        ]
        return "\n".join(f"{label:<28}{size / 2**20:12.2f} MiB" for label, size in rows)


def memory_plan(module: nn.Module) -> MemoryPlan:
    """The plan of a wrapped module, from layouts and placements alone (no measuring).

    Raises:
        TypeError: if the module was not wrapped by Lamina.
    """
    if isinstance(module, InspectsItself):
        plan: MemoryPlan = module.memory_plan()
        return plan
    groups = groups_of(module)
    trained = [group for group in groups if group.gradients is not None]
    gathering = [group for group in groups if not group.weights.local.is_whole]
    each_microbatch = [g for g in trained if g.trained.cadence is Cadence.EVERY_MICROBATCH]
    once = [g for g in trained if g.trained.cadence is Cadence.ONCE]
    kept = [group for group in gathering if group.weights.kept_for_step]
    coming = [group for group in gathering if not group.weights.kept_for_step]
    budgets = module.memory_budgets if isinstance(module, _HasBudgets) else MemoryBudgets()
    return MemoryPlan(
        weights=sum(_bytes(g, g.weights.local.data.numel(), "weights") for g in groups),
        main_weights=sum(
            _bytes(g, g.rest.data.numel(), "main")
            for g in trained
            if g.dtypes.main != g.dtypes.weights
        ),
        main_grads=sum(_bytes(g, g.trained.main.numel, "grads") for g in trained),
        local_grads=sum(
            _bytes(g, g.layout.size, "grads") for g in once if not g.trained.main.is_whole
        ),
        gathered=_gathered([_bytes(g, g.layout.size, "weights") for g in coming], budgets.gathers)
        + sum(_bytes(g, g.layout.size, "weights") for g in kept),
        in_flight=_largest_two([_in_flight(g, local=True) for g in each_microbatch])
        + _largest_two([_in_flight(g, local=False) for g in once])
        if budgets.reductions is None
        else _within(trained, budgets.reductions),
        padding=sum(_padding(group) for group in groups),
    )


def _bytes(group: ParameterGroup, numel: int, copy: str) -> int:
    return int(numel * getattr(group.dtypes, copy).itemsize)


def _in_flight(group: ParameterGroup, *, local: bool) -> int:
    """A bucket's own buffer, and the pieces it receives from the other ranks."""
    received = group.layout.size - group.layout.size // max(1, group.axes.inner.size)
    own = group.layout.size if local or group.dtypes.wire != group.dtypes.grads else 0
    return _bytes(group, own + received, "wire")


def _padding(group: ParameterGroup) -> int:
    """Bytes of padding in an average shard."""
    held = group.weights.local.data.numel()
    return _bytes(group, held, "weights") * group.layout.padding // max(1, group.layout.size)


def _gathered(sizes: list[int], budget: int | None) -> int:
    return _largest_two(sizes) if budget is None else min(budget, sum(sizes))


def _within(groups: list[ParameterGroup], budget: int) -> int:
    """Bytes on the wire, what they bring, and one buffer being filled."""
    sizes = [group.trained.wire_bytes for group in groups]
    ranks = max((group.axes.inner.size for group in groups), default=1)
    sent = min(budget, sum(sizes))
    return sent + sent * (ranks - 1) // ranks + max(sizes, default=0)


def _largest_two(sizes: list[int]) -> int:
    return sum(sorted(sizes)[-2:])
