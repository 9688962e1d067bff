"""Which cases of a product to run: a pairwise cover, a shard."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

Case = tuple[int, ...]  # a case as the index of its value along each axis


def pairs(case: Case) -> frozenset[tuple[int, int, int, int]]:
    """Return the (axis, value, axis, value) pairs that a case shows together."""
    if len(case) == 1:
        return frozenset({(0, case[0], 0, case[0])})
    along = combinations(enumerate(case), 2)
    return frozenset((axis, value, other, second) for (axis, value), (other, second) in along)


def cover(cases: Sequence[Case], strength: int = 2) -> list[int]:
    """Choose few of `cases` so that what occurs in one occurs in a chosen one.

    At strength 2 every pair of values, at strength 1 every value. `cases` may be any part of a
    product: what is impossible is left out of it. The choice depends on the cases and their order
    alone. Returns positions in `cases`, ascending.
    """
    chosen = _values(cases) if strength == 1 else _pairwise(cases)
    return sorted(chosen) if chosen else list(range(min(1, len(cases))))


def _values(cases: Sequence[Case]) -> list[int]:
    """Take the case with the most new values; of equals the one whose values were taken least."""
    taken: Counter[tuple[int, int]] = Counter()
    missing = {value for case in cases for value in enumerate(case)}
    chosen: list[int] = []
    while missing:
        best = max(
            range(len(cases)),
            key=lambda place: (
                len(missing.intersection(enumerate(cases[place]))),
                -sum(taken[value] for value in enumerate(cases[place])),
                -place,
            ),
        )
        missing.difference_update(enumerate(cases[best]))
        taken.update(enumerate(cases[best]))
        chosen.append(best)
    return chosen


def _pairwise(cases: Sequence[Case]) -> list[int]:
    """Take the case with the most new pairs each time, the first of equals."""
    shown = [pairs(case) for case in cases]
    missing = set().union(*shown) if shown else set()
    # What a case adds only shrinks, so an old count is an upper bound: recount the best one only.
    queue = [(-len(show), place) for place, show in enumerate(shown)]
    heapq.heapify(queue)
    chosen: list[int] = []
    while missing:
        _, place = heapq.heappop(queue)
        gain = len(shown[place] & missing)
        if queue and (-gain, place) > queue[0]:
            heapq.heappush(queue, (-gain, place))
            continue
        missing -= shown[place]
        chosen.append(place)
    return chosen


def in_shard(name: str, shard: int, shards: int) -> bool:
    """Whether the case of that name belongs to `shard` (1 to `shards`): each to exactly one."""
    return zlib.crc32(name.encode()) % shards == shard - 1
