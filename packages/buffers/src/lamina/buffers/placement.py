"""Where a buffer's state lives along each data-parallel axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import compress, product
from typing import ClassVar


@dataclass(frozen=True)
class Placement:
    """Base of `Replicate`, `Shard` and `Partial`: one buffer's placement along one axis."""

    cuts: ClassVar[bool] = False
    """Whether each rank of the axis holds a piece of the buffer only."""


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the axis holds the same whole.

    Examples:
        >>> data_parallel = Placements(Replicate(), Replicate(), Replicate())
    """


@dataclass(frozen=True)
class Shard(Placement):
    """Every rank of the axis holds its own piece; pieces are equal in size.

    Examples:
        >>> zero_3 = Placements(Shard(), Shard(), Shard())
    """

    cuts: ClassVar[bool] = True


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank of the axis holds a whole that is still to be summed over the axis.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (8, 4))], num_shards=1)
        >>> local_gradients = FlatBuffer(layout, Partial())
    """


def as_placements(placement: Placement | Sequence[Placement]) -> tuple[Placement, ...]:
    """One placement, or several with the outer axis first, as a tuple; TypeError for others."""
    chosen = tuple(placement) if isinstance(placement, Sequence) else (placement,)
    for each in chosen:
        if not isinstance(each, Replicate | Shard | Partial):
            raise TypeError(
                f"placement {each!r} is not Replicate(), Shard() or Partial() (instances, not "
                "classes; torch's own placements name a tensor dimension and mean something else)"
            )
    return chosen


@dataclass(frozen=True)
class Placements:
    """A data-parallel strategy: where its three states live, per axis, outer axis first.

    A single placement stands for one axis.

    Raises:
        ValueError: the three states name different numbers of axes.

    Examples:
        >>> zero_1 = Placements(Replicate(), Shard(), Shard())
        >>> zero_1.num_axes
        1
    """

    model_weights: tuple[Placement, ...]
    main_grads: tuple[Placement, ...]
    optimizer_state: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for state in fields(self):
            object.__setattr__(self, state.name, as_placements(getattr(self, state.name)))
        counts = {state.name: len(getattr(self, state.name)) for state in fields(self)}
        if len(set(counts.values())) != 1:
            raise ValueError(f"placements name different numbers of axes: {counts}")

    @property
    def num_axes(self) -> int:
        """Number of data-parallel axes."""
        return len(self.model_weights)


@dataclass(frozen=True)
class Cut:
    """How some axes of given sizes cut one flat buffer.

    The innermost axis cuts first and an outer one cuts what the inner left, because gradients are
    reduce-scattered over the inner axis first: rank (o, i) of O x I holds piece `i * O + o`.

    Attributes:
        sizes: size of each axis, outer first.
        sharded: whether that axis cuts.
    """

    sizes: tuple[int, ...]
    sharded: tuple[bool, ...]

    @property
    def pieces(self) -> int:
        """Number of different pieces."""
        return math.prod(compress(self.sizes, self.sharded))

    def piece(self, coordinate: Sequence[int]) -> int:
        """Which of the pieces, in buffer order, the rank at `coordinate` (outer first) holds."""
        index = 0
        # From the innermost axis, whose place is the most significant: it cut first.
        axes = zip(self.sizes, self.sharded, coordinate, strict=True)
        for size, cuts, place in reversed(tuple(axes)):
            if cuts:
                index = index * size + place
        return index

    def range(self, size: int, coordinate: Sequence[int]) -> tuple[int, int]:
        """Elements `(start, stop)` of a buffer of `size`, a multiple of `pieces`, of a rank."""
        length, rest = divmod(size, self.pieces)
        if rest:
            raise ValueError(f"{size} elements do not cut into {self.pieces} equal pieces")
        start = self.piece(coordinate) * length
        return start, start + length

    def pieces_by_rank(self) -> tuple[int, ...]:
        """The piece of each rank of the flattened cutting axes, outer axis slowest.

        That is the rank order of a communicator over the product of the axes that cut.
        """
        sizes = [size for size, cuts in zip(self.sizes, self.sharded, strict=True) if cuts]
        inner = Cut(tuple(sizes), (True,) * len(sizes))
        return tuple(inner.piece(place) for place in product(*(range(size) for size in sizes)))
