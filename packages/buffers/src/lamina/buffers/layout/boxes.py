"""A span of a flattened tensor as boxes of its shape: pure integers, no torch.

A run of elements in row-major order is no box, but it is a few: the end of the first row, whole
rows, the start of the last row, and so on outwards, at most `2 * ndim - 1` of them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A box of a tensor and where its elements lie in the span it was cut from.

    `span[start : start + prod(sizes)].view(sizes)` is `tensor[offsets : offsets + sizes]`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes_of_span(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut elements `start..stop` of a row-major tensor of `shape` into boxes, in element order.

    ValueError: the span is not inside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"span {start}..{stop} is not inside a tensor of {numel} elements")
    if start == stop:
        return ()
    return tuple(
        Box(offsets, sizes, at - start) for offsets, sizes, at in _cut(tuple(shape), start, stop)
    )


def _cut(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield (offsets, sizes, first element) of boxes that tile `start..stop` in order."""
    if not shape:
        yield (), (), start
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:  # all inside one slice of the first dimension
        yield from _within(shape, first, head, tail)
        return
    if head:
        yield from _within(shape, first, head, inner)
        first += 1
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        yield offsets, (last - first, *shape[1:]), first * inner
    if tail:
        yield from _within(shape, last, 0, tail)


def _within(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Boxes of `start..stop` inside slice `index` of the first dimension."""
    base = index * math.prod(shape[1:])
    for offsets, sizes, at in _cut(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes), base + at
