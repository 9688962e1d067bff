"""Where a tensor lies in a larger one that tensor or expert parallelism has cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from lamina.buffers.layout.boxes import Box, boxes_of_span
from lamina.mesh import Role
from lamina.mesh.engine import MeshAxis


class Run(NamedTuple):
    """Indices `start..start + length` of a dimension of the part, at `whole` in the whole."""

    start: int
    length: int
    whole: int


class RegionBox(NamedTuple):
    """A box of the whole that lies in a span of the part.

    `span[box.start : box.start + box.numel].view(box.sizes)[inner]`, with `inner` a tuple of
    slices, is `whole[offsets : offsets + sizes]`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    box: Box
    inner: tuple[slice, ...]


@dataclass(frozen=True)
class TensorRegion:
    """The part of a larger tensor that one rank's parameter is.

    `TensorRegion.whole(shape)` is everything; each `cut` narrows it along one dimension.

    `runs` has, per dimension of the larger tensor's `shape`, the runs of the part's indices and
    where they lie there.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorRegion:
        """All of a tensor of `shape`."""
        sizes = tuple(int(size) for size in shape)
        return cls(sizes, tuple((Run(0, size, 0),) for size in sizes))

    @classmethod
    def of_part(
        cls, shape: Sequence[int], role: Role, tensor: MeshAxis | None, experts: MeshAxis | None
    ) -> TensorRegion | None:
        """Where a rank's parameter of `shape` lies; None if no axis of several ranks has cut it.

        `tensor` (`expert_tp` of an expert, else `tp`) cuts the dimension that the role names.
        `experts` (`ep`) cuts stacked experts [experts, rows, columns]; those with modules of their
        own differ in name. ValueError says what does not divide, and over which axes.
        """
        cuts: list[tuple[int, MeshAxis, tuple[int, ...] | None]] = []
        if role.tp_shard_dim is not None and tensor is not None and tensor.size > 1:
            cuts.append((role.tp_shard_dim, tensor, role.tp_blocks))
        # A dimension is cut once: where tp has cut the experts themselves, ep has not.
        stacked = role.expert and len(shape) == 3 and role.tp_shard_dim != 0
        if stacked and experts is not None and experts.size > 1:
            cuts.append((0, experts, None))
        size = list(shape)
        # From the part's shape to that of the whole, which then is cut again.
        for dim, axis, _ in cuts:
            size[dim] *= axis.size
        region = cls.whole(size)
        try:
            for dim, axis, blocks in cuts:
                region = region.cut(dim, axis.rank, axis.size, blocks)
        except ValueError as error:
            where = ", ".join(f"{axis.size} ranks of {axis.name!r}" for _, axis, _ in cuts)
            raise ValueError(f"{where}: {error}") from error
        return region if cuts else None

    def cut(
        self, dim: int, rank: int, size: int, blocks: Sequence[int] | None = None
    ) -> TensorRegion:
        """One of `size` equal pieces along `dim`.

        Args:
            dim: a dimension that is not cut yet; negative ones count from the end.
            rank: which piece.
            size: number of pieces.
            blocks: lengths, in the whole, of matrices fused along `dim` (query, key, value): each
                is cut by itself, and the part is the concatenation of its pieces.

        Raises:
            ValueError: the dimension is cut already, a block does not divide into `size` pieces, or
                the blocks do not add up to the dimension. Names the numbers.
        """
        dim %= len(self.shape)
        extent = self.shape[dim]
        lengths = (extent,) if blocks is None else tuple(blocks)
        if self.runs[dim] != (Run(0, extent, 0),):
            raise ValueError(f"dimension {dim} of {self.shape} is cut already: {self.runs[dim]}")
        uneven = [length for length in lengths if length % size]
        if sum(lengths) != extent or uneven or not 0 <= rank < size:
            raise ValueError(
                f"piece {rank} of {size} along dimension {dim} of {self.shape}: blocks {lengths} "
                f"must add up to {extent} and each be a multiple of {size}"
            )
        # Each fused matrix gives its own piece, so the part is runs that lie apart in the whole.
        runs, start, whole = [], 0, 0
        for length in lengths:
            piece = length // size
            runs.append(Run(start, piece, whole + rank * piece))
            start += piece
            whole += length
        return replace(self, runs=(*self.runs[:dim], tuple(runs), *self.runs[dim + 1 :]))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def boxes(self, start: int, stop: int) -> tuple[RegionBox, ...]:
        """Elements `start..stop` of the flattened part as boxes of the whole."""
        if not math.prod(self.part_shape):
            zero = (0,) * len(self.shape)
            sizes = self.part_shape
            return (RegionBox(zero, sizes, Box(zero, sizes, 0), tuple(map(slice, sizes))),)
        boxes = []
        for box in boxes_of_span(self.part_shape, start, stop):
            # Fused matrices cut a dimension into runs that lie apart in the whole, so a box of the
            # part is the product of what its sides meet there.
            sides = [
                list(_meet(offset, size, runs))
                for offset, size, runs in zip(box.offsets, box.sizes, self.runs, strict=True)
            ]
            for side in product(*sides):
                offsets = tuple(whole for whole, _ in side)
                inner = tuple(within for _, within in side)
                sizes = tuple(within.stop - within.start for within in inner)
                boxes.append(RegionBox(offsets, sizes, box, inner))
        return tuple(boxes)

    def __deepcopy__(self, memo: dict[int, object]) -> TensorRegion:
        return self


def _meet(offset: int, size: int, runs: Sequence[Run]) -> list[tuple[int, slice]]:
    """Where one side of a box meets the runs: (index in the whole, slice of the box's side)."""
    met = []
    for run in runs:
        low = max(offset, run.start)
        high = min(offset + size, run.start + run.length)
        if low < high:
            met.append((run.whole + low - run.start, slice(low - offset, high - offset)))
    return met
