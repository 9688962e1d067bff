"""The search behind `BufferLayout.plan`: pure integers, no torch.

A shard boundary lies at a multiple of the shard size S. A tensor that one boundary crosses can be
shifted so that the boundary falls between two of its granules. A tensor that two boundaries cross
cannot, unless S is itself a multiple of its granule; any tensor of more than 2 S elements is
crossed twice wherever it lies. So the least S that can work is a multiple of the granules of all
tensors longer than 2 S (`Divisors`), and from there up candidates are tried with a greedy placement
(`_Packer`), which is optimal for a fixed order.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from operator import neg
from typing import NamedTuple

# Placements of one tensor that an exhaustive search may cost.
_FEW = 20_000


class Item(NamedTuple):
    """A tensor to the planner: elements, and how many of them stay together."""

    numel: int
    granule: int


@dataclass(frozen=True)
class Placed:
    """A plan: shard size, offsets in the order of the items, whether another order was needed."""

    shard_size: int
    offsets: tuple[int, ...]
    reordered: bool


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def plan_items(items: Sequence[Item], num_shards: int, alignment: int, unit: int) -> Placed:
    """Choose offsets and the shard size, a multiple of `unit` (itself one of `alignment`)."""
    if num_shards == 1 or all(alignment % item.granule == 0 for item in items):
        return _in_a_row(items, num_shards, alignment, unit)
    divisors = Divisors(items, num_shards, unit)
    best: Placed | None = None
    for position, order in enumerate(_orders(items, alignment)):

        def attempt(size: int, order: Sequence[int] = order) -> list[int] | None:
            """Offsets in shards of this size, if all fits."""
            return _Packer(items, alignment, size, num_shards * size).pack(order)

        few = _FEW // max(len(items), 1)
        better = _search(attempt, divisors, few, None if best is None else best.shard_size)
        if better is not None:
            best = Placed(better[0], tuple(better[1]), position > 0)
        if best is not None and best.shard_size == divisors.least:
            break
    if best is None:  # pragma: no cover - one shard that holds everything always works
        raise RuntimeError("lamina.buffers: the planner found no layout; please report the shapes")
    return best


def _in_a_row(items: Sequence[Item], num_shards: int, alignment: int, unit: int) -> Placed:
    """Cuts are free at every aligned element: tensors follow each other, shards cut anywhere."""
    lengths = (round_up(item.numel, alignment) for item in items)
    *offsets, end = accumulate(lengths, initial=0)
    return Placed(round_up(-(-end // num_shards), unit), tuple(offsets), False)


class Divisors:
    """Which shard sizes the granules allow at all.

    The least one that is possible (`least`) holds the payload and the largest tensor that may not
    be cut, and is a multiple of `unit` and of each granule that is forced.
    """

    def __init__(self, items: Sequence[Item], num_shards: int, unit: int) -> None:
        whole = [item.numel for item in items if item.numel <= item.granule]
        payload = sum(item.numel for item in items)
        # Longest first.
        cuttable = sorted({item for item in items if item.numel > item.granule > 1}, reverse=True)
        # Sizes from half of cuttable[k].numel on are free of the granules of k, k + 1, ...
        self._floors = [-(-item.numel // 2) for item in cuttable]
        granules = (item.granule for item in cuttable)
        self._multiples = [*accumulate(granules, math.lcm, initial=unit)]
        self.least = self.next(max([-(-payload // num_shards), *whole, 1]))

    def next(self, size: int) -> int:
        """The least allowed shard size that is not below `size`."""
        # _floors descends; the tensors with a floor above `size` force their granules.
        forced = bisect_left(self._floors, -size, key=neg)
        while True:
            candidate = round_up(size, self._multiples[forced])
            if forced == 0 or candidate < self._floors[forced - 1]:
                return candidate
            size = self._floors[forced - 1]
            while forced and self._floors[forced - 1] <= size:
                forced -= 1

    def easy_sizes(self) -> list[int]:
        """For each set of granules, longest tensors first, the least size that all divide."""
        return sorted({round_up(self.least, multiple) for multiple in set(self._multiples)})[:64]

    def sizes(self) -> Iterator[int]:
        """All allowed sizes, ascending, without end."""
        size = self.least
        while True:
            yield size
            size = self.next(size + 1)


def _orders(items: Sequence[Item], alignment: int) -> list[list[int]]:
    """Orders worth trying: as given; coarsest granules first; longest first, free ones last."""
    given = list(range(len(items)))
    coarse = sorted(given, key=lambda at: (-_step(items[at], alignment), -items[at].numel))
    free = [alignment % items[at].granule == 0 for at in given]
    longest = sorted(given, key=lambda at: (free[at], -items[at].numel))
    return [given, coarse, longest]


def _step(item: Item, alignment: int) -> int:
    return math.lcm(min(item.granule, max(item.numel, 1)), alignment)


def _search(
    attempt: Callable[[int], list[int] | None], divisors: Divisors, few: int, best: int | None
) -> tuple[int, list[int]] | None:
    """The least shard size that fits, with its offsets; None where it is not below `best`.

    What fits is not monotone in the size. Where the sizes are `few` all are tried; bisection may
    miss a smaller one by a little, and stops within a two-thousandth.
    """
    high, offsets = best, None
    # First sizes that more granules divide than must: boundaries suit them anywhere. Galloping
    # passes such sizes by, as they are rare.
    for size in divisors.easy_sizes():
        if best is not None and size >= best:
            break
        if (offsets := attempt(size)) is not None:
            high = size
            break
    # Then gallop up from the least size, for a bound below that.
    size, step, failed = divisors.least, divisors.least // 1024 + 1, 0
    while high is None or size < high:
        if (tried := attempt(size)) is not None:
            high, offsets = size, tried
            break
        failed, size, step = size, divisors.next(size + step), step * 2
    bound = high
    below = list(islice(takewhile(lambda size: size < bound, divisors.sizes()), few + 1))
    if len(below) <= few:
        fits = ((size, tried) for size in below if (tried := attempt(size)) is not None)
        return next(fits, None if offsets is None else (high, offsets))
    # Bisect between the last size that failed and the bound.
    while failed and high - failed > max(high // 2048, 1):
        middle = divisors.next((failed + high) // 2)
        if middle >= high:
            # Nothing allowed in the upper half: look once more just above what failed.
            middle = divisors.next(failed + 1)
            if middle >= high:
                break
        if (tried := attempt(middle)) is None:
            failed = middle
        else:
            high, offsets = middle, tried
    return None if offsets is None else (high, offsets)


class _Packer:
    """Places tensors for one shard size: at the cursor, or in a gap that an earlier one left."""

    def __init__(self, items: Sequence[Item], alignment: int, shard_size: int, limit: int) -> None:
        self.items = items
        self.alignment = alignment
        self.shard_size = shard_size
        self.limit = limit
        self.gaps: list[tuple[int, int]] = []  # (length, start), sorted; none crosses a boundary

    def pack(self, order: Sequence[int]) -> list[int] | None:
        """Offsets of the items, placed in this order; None where they do not fit."""
        offsets = [0] * len(self.items)
        cursor = 0
        in_given_order = all(at == position for position, at in enumerate(order))
        for at in order:
            item = self.items[at]
            gap = None if in_given_order else self._take_gap(item.numel)
            # A plan in the given order has ascending offsets: there no gap is filled.
            if gap is not None:
                offsets[at] = gap
                continue
            start = self._earliest(cursor, item)
            if start is None or start + item.numel > self.limit:
                return None
            if not in_given_order:
                self._leave_gap(cursor, start)
            offsets[at] = start
            cursor = start + round_up(item.numel, self.alignment)
        return offsets

    def _earliest(self, cursor: int, item: Item) -> int | None:
        """The first aligned start at or after `cursor` where no boundary cuts a granule."""
        size = self.shard_size
        numel, step = item.numel, _step(item, self.alignment)
        boundary = (cursor // size + 1) * size
        if cursor + numel <= boundary or step == self.alignment:
            return cursor
        if numel <= item.granule:
            return boundary if numel <= size else None
        # As many granules before the boundary as fit there, so that it falls between two of them.
        steps_before = (boundary - cursor) // step
        if numel <= size or size % step == 0:
            return boundary - steps_before * step
        if steps_before * step >= numel - size:  # one boundary only, between two granules
            return boundary - steps_before * step
        # Else it starts in the next shard, with as many granules before that one's end as fit.
        steps_before = size // step
        if steps_before * step >= numel - size:
            return boundary + size - steps_before * step
        return None

    def _take_gap(self, numel: int) -> int | None:
        if not numel:
            return None
        at = bisect_left(self.gaps, (numel, -1))
        if at == len(self.gaps):
            return None
        length, start = self.gaps.pop(at)
        used = round_up(numel, self.alignment)
        if used < length:  # the rest stays a gap
            insort(self.gaps, (length - used, start + used))
        return start

    def _leave_gap(self, start: int, stop: int) -> None:
        while start < stop:
            end = min((start // self.shard_size + 1) * self.shard_size, stop)
            insort(self.gaps, (end - start, start))
            start = end
