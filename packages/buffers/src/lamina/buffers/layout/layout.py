"""Where every tensor of a flat buffer lies, and how equal shards cut it: integers, no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from lamina.buffers.layout.granularity import TensorSpec
from lamina.buffers.layout.planning import Item, plan_items

if TYPE_CHECKING:
    import torch


class Span(NamedTuple):
    """Elements `start..stop` of a flattened tensor lie in `shard`, `offset` elements into it."""

    shard: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BufferLayout:
    """Offsets of tensors in one flat buffer that is cut into equal shards.

    Make one with `BufferLayout.plan`. All numbers are elements. Two layouts planned from equal
    arguments are equal, on every rank and in every run. Methods that take a `name` take the
    tensor's position in `specs` as well, which stays right when somebody renames the tensor.

    Attributes:
        specs: the tensors, in the order they were given.
        num_shards: number of equal pieces.
        shard_size: elements of a piece, padding included.
        offsets: where each of `specs` starts.
        alignment: every tensor and every shard starts at a multiple of it.
        reordered: True where a granularity made the planner leave the given order.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (512, 256))], num_shards=4)
        >>> layout.spans("q")[1].start
        32768
    """

    specs: tuple[TensorSpec, ...]
    num_shards: int
    shard_size: int
    offsets: tuple[int, ...]
    alignment: int = 128
    reordered: bool = False

    @classmethod
    def plan(
        cls,
        specs: Iterable[TensorSpec],
        num_shards: int,
        alignment: int = 128,
        shard_multiple: int = 1,
    ) -> BufferLayout:
        """Lay `specs` out so that equal shards cut no granule, with little padding.

        Tensors keep the order given unless a coarser granularity packs better in another (then
        `reordered` is True).

        Args:
            specs: the tensors. Names must differ.
            num_shards: number of equal shards.
            alignment: elements; every tensor and every shard starts at a multiple of it.
            shard_multiple: shard sizes are also a multiple of this many elements (`2**16` gives
                NCCL its best bus bandwidth, for padding that only large buffers can afford).

        Raises:
            ValueError: two tensors of one name, or a number below one.
        """
        chosen = tuple(specs)
        for label, value in (
            ("num_shards", num_shards),
            ("alignment", alignment),
            ("shard_multiple", shard_multiple),
        ):
            if value < 1:
                raise ValueError(f"BufferLayout.plan: {label} is {value}; it must be at least 1")
        names = Counter(spec.name for spec in chosen)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(
                f"two tensors are named {twice[0]!r}: names must differ (tied parameters share one "
                "spec, as `named_parameters()` gives them once)"
            )
        # Names and shapes do not matter from here on, so equal sizes give equal plans.
        items = [Item(spec.numel, spec.granule) for spec in chosen]
        placed = plan_items(items, num_shards, alignment, math.lcm(alignment, shard_multiple))
        return cls(
            chosen, num_shards, placed.shard_size, placed.offsets, alignment, placed.reordered
        )

    @cached_property
    def size(self) -> int:
        """Elements of the whole buffer, padding included: `num_shards * shard_size`."""
        return self.num_shards * self.shard_size

    @cached_property
    def numel(self) -> int:
        """Elements of the tensors alone."""
        return sum(spec.numel for spec in self.specs)

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.size - self.numel

    @property
    def padding_fraction(self) -> float:
        """Padding per element of the tensors: 0.01 means one element in a hundred more."""
        return self.padding / self.numel if self.numel else 0.0

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.name: position for position, spec in enumerate(self.specs)}

    def position(self, name: str | int) -> int:
        """Place of a tensor in `specs` and `offsets`. Raises KeyError."""
        if isinstance(name, int):
            return name
        try:
            return self._index[name]
        except KeyError:
            # A layout may have thousands of tensors, and a few names tell how they are spelled.
            few = ", ".join(list(self._index)[:4])
            raise KeyError(
                f"no tensor {name!r} in this layout of {len(self.specs)} tensors ({few}, ...)"
            ) from None

    def names(self) -> tuple[str, ...]:
        """Names in the order given to `plan`."""
        return tuple(self._index)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def spec(self, name: str | int) -> TensorSpec:
        """The spec of a tensor. Raises KeyError."""
        return self.specs[self.position(name)]

    def offset(self, name: str | int) -> int:
        """Element of the buffer where a tensor starts. Raises KeyError."""
        return self.offsets[self.position(name)]

    def span(self, name: str | int, shard: int) -> Span | None:
        """The run of a tensor that `shard` holds, or None where it holds none of it.

        Raises:
            KeyError: no such tensor.
            IndexError: no such shard.
        """
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} of {self.num_shards}: use 0..{self.num_shards - 1}")
        low = shard * self.shard_size
        start, stop = self.within(name, low, low + self.shard_size)
        return None if start == stop else Span(shard, start, stop, self.offset(name) + start - low)

    def spans(self, name: str | int) -> tuple[Span, ...]:
        """Which shard holds which elements of a tensor, in element order; () for an empty one."""
        numel = self.spec(name).numel
        if not numel:
            return ()
        # Shards are equal, so the first and the last one follow from the elements' places.
        offset = self.offset(name)
        first = offset // self.shard_size
        last = (offset + numel - 1) // self.shard_size
        spans = (self.span(name, shard) for shard in range(first, last + 1))
        return tuple(span for span in spans if span is not None)

    def within(self, name: str | int, start: int, stop: int) -> tuple[int, int]:
        """Elements `(first, last + 1)` of a tensor that lie in `start..stop` of the buffer.

        Equal numbers mean none; they are then clamped to the nearer end of the tensor, so pieces in
        buffer order always meet.
        """
        position = self.position(name)
        offset, numel = self.offsets[position], self.specs[position].numel
        low = min(max(start - offset, 0), numel)
        return low, max(min(stop - offset, numel), low)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Every tensor with its shape, by position: views of a flat tensor of `size` elements."""
        return [
            flat[offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        ]

    def padding_ranges(self) -> tuple[tuple[int, int], ...]:
        """Runs `(start, stop)` of the buffer that belong to no tensor, ascending."""
        placed = zip(self.offsets, self.specs, strict=True)
        runs = sorted((offset, offset + spec.numel) for offset, spec in placed if spec.numel)
        # Bounded by an empty run at either end, so that padding there is a gap as any other.
        runs = [(0, 0), *runs, (self.size, self.size)]
        return tuple((stop, start) for (_, stop), (start, _) in pairwise(runs) if stop < start)

    def describe(self) -> str:
        """A table of the tensors: offset, elements, first and last shard, granularity."""
        lines = [
            f"{len(self.specs)} tensors, {self.num_shards} shards of {self.shard_size} elements, "
            f"padding {self.padding} ({self.padding_fraction:.3%})"
            + (", reordered" if self.reordered else "")
        ]
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            spans = self.spans(spec.name)
            shards = f"{spans[0].shard}..{spans[-1].shard}" if spans else "-"
            lines.append(
                f"  {offset:>14}  {spec.numel:>14}  shards {shards:<12} "
                f"{spec.granularity.kind:<8} {spec.name} {list(spec.shape)}"
            )
        return "\n".join(lines)
