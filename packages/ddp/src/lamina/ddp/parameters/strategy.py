"""Strategies: where the three states of a group live, and how often gradients are reduced.

A strategy is data (docs/ddp.md). The engine reads placements and cadence; no code below
this module knows a strategy's name.
"""

from dataclasses import dataclass
from enum import Enum

from lamina.buffers import Partial, Placements, Replicate, Shard
from lamina.buffers.engine import Placement

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of the inner strategies; a strategy's number is its place (ZeRO 0, 1, 2, 3)."""

OUTER_STRATEGIES = ("no_shard", "optim")
"""Names of the outer axis' strategies: 0 is HSDP, 1 (gradients and optimizer cut) is HFSDP."""

_STATES = ("model_weights", "main_grads", "optimizer_state")
_AXES = ("outer", "inner")


class Cadence(Enum):
    """How often gradients are summed over the inner data-parallel axis."""

    ONCE = "once"
    """Microbatches add up locally; ranks are summed once per step."""
    EVERY_MICROBATCH = "every_microbatch"
    """Every microbatch is summed over ranks at once, so no rank keeps a whole gradient."""


@dataclass(frozen=True)
class Strategy:
    """Three placements over the axes (outer, inner) and a cadence.

    Placements over one axis are about the inner one; along the outer axis everything is then
    Replicate (HSDP, where the mesh has an outer axis). `Strategy(Placements(Replicate(),
    Replicate(), Shard()), Cadence.ONCE)` is torch's `ZeroRedundancyOptimizer`.

    Attributes:
        placements: where model weights, reduced main grads and optimizer state (with the main
            weights) live.
        cadence: when gradients are summed over the inner axis.

    Raises:
        TypeError: something else than a `Placements` or a `Cadence`.
        ValueError: a combination that cannot train, or that would waste what it claims to save.

    Examples:
        >>> zero_redundancy = Strategy(Placements(Replicate(), Replicate(), Shard()), Cadence.ONCE)
        >>> zero_redundancy.gathers, zero_redundancy.shards_optimizer
        (False, True)
    """

    placements: Placements
    cadence: Cadence

    def __post_init__(self) -> None:
        for name, kind in (("placements", Placements), ("cadence", Cadence)):
            if not isinstance(given := getattr(self, name), kind):
                raise TypeError(f"{name}={given!r} is not a {kind.__name__}")
        object.__setattr__(self, "placements", _over_two_axes(self.placements))
        self._refuse_partial()
        self._refuse_whole_optimizer_over_pieces()
        self._refuse_pieces_apart()

    @property
    def gathers(self) -> bool:
        """Whether model weights are cut, and so gathered before a unit computes."""
        return any(placement.cuts for placement in self.placements.model_weights)

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is cut along some axis."""
        return any(placement.cuts for placement in self.placements.optimizer_state)

    def _refuse_partial(self) -> None:
        for state in _STATES:
            for axis, placement in zip(_AXES, getattr(self.placements, state), strict=True):
                if isinstance(placement, Partial):
                    raise ValueError(
                        f"{state} is Partial() along the {axis} axis, and a strategy says where "
                        "states are once they are summed: use Replicate() or Shard(), and a "
                        "Cadence for when gradients are summed"
                    )

    def _refuse_whole_optimizer_over_pieces(self) -> None:
        states = self.placements
        why = {
            "main_grads": "every rank would update all main weights and hold a piece of their "
            "gradient",
            "model_weights": "every rank would keep all main weights and gather from others what "
            "it has",
        }
        for state, reason in why.items():
            cut = zip(_AXES, getattr(states, state), states.optimizer_state, strict=True)
            for axis, placement, optimizer in cut:
                if placement.cuts and not optimizer.cuts:
                    raise ValueError(
                        f"{state} is Shard() along the {axis} axis and optimizer_state is "
                        f"Replicate(), so {reason}: make optimizer_state Shard() there, or {state} "
                        "Replicate()"
                    )

    def _refuse_pieces_apart(self) -> None:
        """The outer axis cuts what the inner one left, so not every two cuts are nested."""
        outer, _ = self.placements.model_weights
        if outer.cuts:
            raise ValueError(
                "model_weights is Shard() along the outer axis, and units are gathered along the "
                "inner one: make it Replicate() along the outer axis, or shard over both as one "
                "axis (dp_shard_dim with both names)"
            )
        grads, optimizer = self.placements.main_grads, self.placements.optimizer_state
        if all(placement.cuts for placement in optimizer) and grads[0].cuts and not grads[1].cuts:
            raise ValueError(
                "main_grads is Shard() along the outer axis only and optimizer_state along both, "
                "and the outer axis cuts what the inner one left, so ranks would not hold the "
                "gradients of their main weights: make main_grads Shard() along the inner axis "
                "too, or Replicate() along the outer one"
            )


def _over_two_axes(placements: Placements) -> Placements:
    if placements.num_axes == 1:
        return Placements(*((Replicate(), *getattr(placements, state)) for state in _STATES))
    if placements.num_axes != len(_AXES):
        raise ValueError(
            f"a strategy is over the inner data-parallel axis, or over (outer, inner), and these "
            f"placements name {placements.num_axes} axes: flatten those that do the same into one"
        )
    return placements


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


def resolve_strategy(inner: int | str | Strategy = 3, outer: int | str = 0) -> Strategy:
    """The strategy of a number or name for the inner axis, and one for the outer.

    Args:
        inner: 0..3 or a name of `STRATEGIES` (ZeRO, Rajbhandari et al. 2020); or a `Strategy`,
            which is taken as it is.
        outer: 0 or 1, or a name of `OUTER_STRATEGIES`.

    Raises:
        ValueError: for an unknown number or name, listing the known ones, and for an outer
            strategy beside a `Strategy`.
    """
    outer_row = _OUTER[_index(outer, OUTER_STRATEGIES, "outer_dp_sharding_strategy")]
    if isinstance(inner, Strategy):
        if outer_row is not _OUTER[0]:
            raise ValueError(
                f"outer_dp_sharding_strategy={outer!r} beside zero_dp_strategy=Strategy(...), "
                "which says by itself what the outer axis does: leave it out, and give the "
                "Strategy placements over (outer, inner)"
            )
        return inner
    inner_row, cadence = _INNER[_index(inner, STRATEGIES, "zero_dp_strategy")]
    return Strategy(Placements(*zip(outer_row, inner_row, strict=True)), cadence)


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
