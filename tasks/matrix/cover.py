"""Which cases of a product to run: a pairwise cover, a shard."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence
from itertools import combinations

Case = tuple[int, ...]  # a case as the index of its value along each axis


def together(case: Case, strength: int = 2) -> frozenset[tuple[tuple[int, int], ...]]:
    """Return the groups of `strength` values, each with its axis, that a case shows together."""
    return frozenset(combinations(enumerate(case), min(strength, len(case))))


def cover(cases: Sequence[Case], strength: int = 2) -> list[int]:
    """Choose few of `cases` so that what occurs together in one occurs together in a chosen one.

    `strength` 2 is a pairwise cover: every pair of values. 1 has every value once. Takes the case
    with the most new groups each time, the first of equals, so the choice depends on the cases and
    their order alone. `cases` may be any part of a product: what is impossible is left out of it.
    Returns positions in `cases`, ascending.
    """
    shown = [together(case, strength) for case in cases]
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
    return sorted(chosen) if chosen else list(range(min(1, len(cases))))


def in_shard(name: str, shard: int, shards: int) -> bool:
    """Whether the case of that name belongs to `shard` (1 to `shards`): each to exactly one."""
    return zlib.crc32(name.encode()) % shards == shard - 1
