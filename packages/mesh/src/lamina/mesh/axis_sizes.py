"""How many ranks each parallel axis takes, and which rank stands where: integers only.

Nothing here touches torch.distributed, so a layout of a million ranks can be checked on a laptop.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from lamina.mesh.errors import LayoutError

__all__ = ["DENSE_AXES", "DERIVED_AXES", "EXPERT_AXES", "MODEL_AXES", "AxisSizes"]

SizesT = TypeVar("SizesT", bound="AxisSizes")

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of dense parameters, outermost first: neighbours in rank order share a tp group."""

EXPERT_AXES = ("pp", "dp_replicate", "expert_dp", "ep", "expert_tp")
"""Axes of expert parameters over the same ranks, outermost first."""

MODEL_AXES = ("pp", "tp", "ep", "expert_tp")
"""Axes along which ranks hold different parts of a model (of its experts: the last two)."""

DERIVED_AXES: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
}
"""Names for several dense axes taken as one."""


@dataclass(frozen=True)
class AxisSizes:
    """The integers of a `ParallelLayout`: sizes of the axes, and which rank stands where."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_size(field.name, getattr(self, field.name))
        open_axes = [name for name in DENSE_AXES if getattr(self, name) == -1]
        if len(open_axes) > 1:
            raise LayoutError(
                f"{' and '.join(f'{name}=-1' for name in open_axes)}: only one axis can be "
                "inferred from the world size. Give all but one of them a size."
            )

    @property
    def needs_sequence_parallel(self) -> bool:
        """Whether a model with experts must run sequence parallelism on this layout.

        Where expert parameters don't follow the dense tp axis, the ranks of one tp group route
        tokens to experts on their own. Without sequence parallelism they all hold the same
        tokens, so every token would be counted tp times. The layout can't know whether a model
        has experts: models ask `require_sequence_parallel`.
        """
        return self.tp > 1 and not (self.ep == 1 and self.expert_tp == self.tp)

    def require_sequence_parallel(self, enabled: bool) -> None:
        """Refuse to run experts on this layout without sequence parallelism.

        Models that have experts call this with their own flag when they are built.

        LayoutError: `needs_sequence_parallel` and not `enabled`.
        """
        if self.needs_sequence_parallel and not enabled:
            raise LayoutError(
                f"tp={self.tp} with ep={self.ep}, expert_tp={self.expert_tp} needs sequence "
                f"parallelism: without it the {self.tp} ranks of a tp group hold the same tokens "
                f"and send each of them to the experts {self.tp} times. Turn sequence parallelism "
                f"on in the model, or use tp=1, or ep=1 with expert_tp={self.tp}."
            )

    def validate(self: SizesT, world_size: int) -> SizesT:
        """This layout with every size known, if `world_size` ranks can take it.

        LayoutError has the arithmetic that does not work out.
        """
        if not isinstance(world_size, int) or world_size < 1:
            raise LayoutError(f"world size {world_size!r} is not a positive integer.")
        layout = self._infer(world_size)
        # Without an open axis nothing was inferred, and the product may be any number.
        sizes = {name: getattr(layout, name) for name in DENSE_AXES}
        product = math.prod(sizes.values())
        if product != world_size:
            raise LayoutError(
                f"world {world_size} = {_product(sizes)}: the axes take {product} ranks, not "
                f"{world_size}. {_suggestion(sizes, world_size)}"
            )
        layout._check_experts()
        return layout

    @property
    def world_size(self) -> int:
        """Ranks this layout takes. LayoutError while an axis is -1."""
        return math.prod(self.dense_shape)

    @property
    def expert_dp(self) -> int:
        """Copies of each expert inside one `dp_replicate` copy of the model."""
        self._must_be_known()
        return self.dp_shard * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Sizes of DENSE_AXES, outermost first."""
        self._must_be_known()
        return tuple(getattr(self, name) for name in DENSE_AXES)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Sizes of EXPERT_AXES, outermost first."""
        return tuple(getattr(self, name) for name in EXPERT_AXES)

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along each dense and each expert axis.

        LayoutError: no such rank, or an axis is still -1.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside this layout's ranks 0..{self.world_size - 1}."
            )
        place = dict.fromkeys([*DENSE_AXES, *EXPERT_AXES], 0)
        for axes in (DENSE_AXES, EXPERT_AXES):
            rest = rank
            # The innermost axis counts fastest, as neighbours in rank order share it.
            for name in reversed(axes):
                rest, place[name] = divmod(rest, getattr(self, name))
        return place

    def ranks_through(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks that share all of `rank`'s places except along `axes`, ascending.

        `axes` are names from DENSE_AXES, or from EXPERT_AXES. LayoutError: no such rank, or no mesh
        has all of these axes.
        """
        names = next((n for n in (DENSE_AXES, EXPERT_AXES) if set(axes) <= set(n)), None)
        if names is None:
            raise LayoutError(
                f"no mesh has all of the axes {', '.join(axes)}: name axes of one of "
                f"({', '.join(DENSE_AXES)}) and ({', '.join(EXPERT_AXES)})."
            )
        own = self.coordinate_of(rank)
        ranks = [0]
        for name in names:
            size = getattr(self, name)
            places = range(size) if name in axes else (own[name],)
            ranks = [outer * size + place for outer in ranks for place in places]
        return tuple(ranks)

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`, which names either all dense or all expert axes.

        More names than needed are checked against each other, so the result of `coordinate_of`
        can be given back whole.

        LayoutError: axes are missing, a coordinate is outside its axis, or two contradict each
        other.
        """
        self._must_be_known()
        ranks = set()
        for axes in (DENSE_AXES, EXPERT_AXES):
            if not all(name in coordinate for name in axes):
                continue
            rank = 0
            for name in axes:
                place, size = coordinate[name], getattr(self, name)
                if not 0 <= place < size:
                    raise LayoutError(f"{name}={place} is outside its axis: 0..{size - 1}.")
                rank = rank * size + place
            ranks.add(rank)
        if len(ranks) == 1:
            return ranks.pop()
        given = ", ".join(f"{name}={place}" for name, place in coordinate.items())
        if ranks:
            raise LayoutError(
                f"({given}) names ranks {sorted(ranks)}: its dense and its expert part disagree."
            )
        raise LayoutError(
            f"({given}) names no rank: give all of {', '.join(DENSE_AXES)}, "
            f"or all of {', '.join(EXPERT_AXES)}."
        )

    def _infer(self: SizesT, world_size: int) -> SizesT:
        open_axis = next((name for name in DENSE_AXES if getattr(self, name) == -1), None)
        if open_axis is None:
            return self
        known = {n: getattr(self, n) for n in DENSE_AXES if n != open_axis and getattr(self, n) > 1}
        taken = math.prod(known.values())
        if world_size % taken:
            smaller = world_size // taken * taken
            nearest = f"{smaller} or {smaller + taken}" if smaller else f"{taken}"
            raise LayoutError(
                f"world {world_size} = {open_axis} ? x {_product(known)}: {world_size} is not "
                f"divisible by {taken}; the nearest worlds that are: {nearest}. Start that many "
                f"ranks or change {' or '.join(known)}."
            )
        return replace(self, **{open_axis: world_size // taken})

    def _check_experts(self) -> None:
        inner = {"dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        ranks, wanted = math.prod(inner.values()), self.ep * self.expert_tp
        if ranks % wanted:
            raise LayoutError(
                f"{_product(inner)} = {ranks} ranks = expert_dp ? x ep {self.ep} x expert_tp "
                f"{self.expert_tp}: {ranks} is not divisible by {wanted}. Expert axes take their "
                f"ranks from dp_shard x cp x tp (dp_replicate and pp lie outside): make "
                f"ep x expert_tp a divisor of {ranks}."
            )

    def _must_be_known(self) -> None:
        for name in DENSE_AXES:
            if getattr(self, name) == -1:
                raise LayoutError(
                    f"{name}=-1 is not known yet: call layout.validate(world_size) and use the "
                    "layout it returns."
                )


def _check_size(name: str, size: object) -> None:
    may_be_open = name in DENSE_AXES
    if isinstance(size, bool) or not isinstance(size, int) or not (size >= 1 or size == -1):
        remedy = "a positive integer, or -1 to infer it" if may_be_open else "a positive integer"
        raise LayoutError(f"{name}={size!r}: an axis size is {remedy}.")
    if size == -1 and not may_be_open:
        raise LayoutError(
            f"{name}=-1: expert axes are not inferred (expert_dp is: dp_shard x cp x tp / "
            f"(ep x expert_tp)). Give {name} a size."
        )


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _suggestion(sizes: Mapping[str, int], world_size: int) -> str:
    others = math.prod(size for name, size in sizes.items() if name != "dp_shard")
    if world_size % others == 0:
        return f"dp_shard={world_size // others} (or -1) would fit."
    return f"Without dp_shard they take {others}, which does not divide {world_size}."
