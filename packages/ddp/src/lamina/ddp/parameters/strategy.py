"""Strategies: where the three states of a group live, and how often gradients are reduced.

A strategy is data (docs/ddp.md). The engine reads placements and cadence; no code below
this module knows a strategy's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lamina.buffers import Placements, Replicate, Shard
from lamina.buffers.engine import Placement

__all__ = [
    "OUTER_STRATEGIES",
    "STRATEGIES",
    "Cadence",
    "Strategy",
    "resolve_strategy",
    "strategy_number",
]

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of the inner strategies; a strategy's number is its place (ZeRO 0, 1, 2, 3)."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""Names of the outer axis' strategies: 0 is HSDP, 1 (gradients and optimizer cut) is HFSDP."""


class Cadence(Enum):
    """How often gradients are summed over the inner data-parallel axis."""

    ONCE = "once"
    """Microbatches add up locally; ranks are summed once per step."""
    EVERY_MICROBATCH = "every_microbatch"
    """Every microbatch is summed over ranks at once, so no rank keeps a whole gradient."""


@dataclass(frozen=True)
class Strategy:
    """Three placements over the axes (outer, inner) and a cadence.

    Attributes:
        placements: where model weights, reduced main grads and optimizer state live.
        cadence: when gradients are summed over the inner axis.
    """

    placements: Placements
    cadence: Cadence


# model weights, main grads, optimizer state; then the cadence
_INNER: tuple[tuple[tuple[Placement, Placement, Placement], Cadence], ...] = (
    ((Replicate(), Replicate(), Replicate()), Cadence.ONCE),
    ((Replicate(), Shard(), Shard()), Cadence.ONCE),
    ((Replicate(), Shard(), Shard()), Cadence.EVERY_MICROBATCH),
    ((Shard(), Shard(), Shard()), Cadence.EVERY_MICROBATCH),
)
_OUTER: tuple[tuple[Placement, Placement, Placement], ...] = (
    (Replicate(), Replicate(), Replicate()),
    (Replicate(), Shard(), Shard()),
)


def resolve_strategy(inner: int | str = 3, outer: int | str = 0) -> Strategy:
    """The strategy of a number or name for the inner axis, and one for the outer.

    Args:
        inner: 0..3 or a name of `STRATEGIES` (ZeRO, Rajbhandari et al. 2020).
        outer: 0 or 1, or a name of `OUTER_STRATEGIES`.

    Raises:
        ValueError: for an unknown number or name, listing the known ones.
    """
    inner_row, cadence = _INNER[strategy_number(inner)]
    outer_row = _OUTER[_index(outer, OUTER_STRATEGIES, "outer_dp_sharding_strategy")]
    weights, grads, optimizer = zip(outer_row, inner_row, strict=True)
    return Strategy(
        Placements(model_weights=weights, main_grads=grads, optimizer_state=optimizer), cadence
    )


def strategy_number(inner: int | str) -> int:
    """The number (0..3) of an inner strategy.

    Raises:
        ValueError: for an unknown number or name, listing the known ones.
    """
    return _index(inner, STRATEGIES, "zero_dp_strategy")


def _index(value: int | str, names: tuple[str, ...], argument: str) -> int:
    known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
    if isinstance(value, str):
        if value in names:
            return names.index(value)
        if value.isdigit():
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(names):
        raise ValueError(f"{argument}={value!r} is not known; choose one of {known}")
    return value
