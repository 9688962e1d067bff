"""What a buffer holds and where it may be cut: pure integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Kind = Literal["element", "row", "block", "tensor"]


@dataclass(frozen=True)
class Granularity:
    """What a shard boundary may not cut.

    Make one with `element()`, `row()`, `block(rows)` or `tensor()`.

    A row is a run along the last dimension, so experts of shape `[E, F, D]` are `E * F` rows of
    `D` elements. Tensors of fewer than two dimensions have rows of one element.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (8, 4), Granularity.row())], num_shards=2)
    """

    kind: Kind = "element"
    rows: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("element", "row", "block", "tensor"):
            raise ValueError(
                f"granularity kind {self.kind!r} is unknown: use Granularity.element(), .row(), "
                ".block(rows) or .tensor()"
            )
        if self.rows < 1:
            raise ValueError(f"a block of {self.rows} rows cannot be kept whole: use rows >= 1")

    @classmethod
    def element(cls) -> Granularity:
        """Cut between any two aligned elements: the default, and the least padding."""
        return cls("element")

    @classmethod
    def row(cls) -> Granularity:
        """Keep every row (a run along the last dimension) on one shard."""
        return cls("row")

    @classmethod
    def block(cls, rows: int) -> Granularity:
        """Keep every block of `rows` rows, counted from the tensor's first row, on one shard.

        The last block is shorter when `rows` does not divide the number of rows.
        """
        return cls("block", rows)

    @classmethod
    def tensor(cls) -> Granularity:
        """Keep the whole tensor on one shard (optimizers that look at it whole)."""
        return cls("tensor")

    def elements(self, shape: Sequence[int]) -> int:
        """Elements of `shape` that stay together: a cut lies at a multiple of this number."""
        if self.kind == "element":
            return 1
        if self.kind == "tensor":
            return max(math.prod(shape), 1)
        row = shape[-1] if len(shape) >= 2 else 1
        return max(row * self.rows, 1)


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of a buffer.

    Args:
        name: its name, unique in a layout (tied parameters share one spec).
        shape: its shape; `()` is one element, a shape with a zero holds none.
        granularity: what a shard boundary may not cut.

    Raises:
        ValueError: a negative dimension.

    Examples:
        >>> TensorSpec("weight", (512, 256)).numel
        131072
    """

    name: str
    shape: tuple[int, ...]
    granularity: Granularity = field(default_factory=Granularity)

    def __post_init__(self) -> None:
        # A torch.Size compares and prints like a tuple but does not pickle to one without torch.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative dimension")

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def granule(self) -> int:
        """Elements that stay on one shard: 1, a row, a block of rows, or the whole tensor."""
        return self.granularity.elements(self.shape)
