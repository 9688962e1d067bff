"""Slots: fixed memory that unsharded units share which are never live at the same time.

Two keys conflict when both may be live at once. A colouring gives each key a slot such that keys in
conflict never share one; the sum of the slots' sizes is what the pool holds for good.

Note [Slots]
    A slot costs no allocation, and a unit comes back to the same address each time, which CUDA
    graphs and registered memory need. The price is that a plan has to know which units live
    together, and that an order of use which it has not seen may find a slot taken. So slots are
    chosen (`mode="slots"`), planned from what a whole step has shown, and a key that finds its slot
    taken gets a block of its own until the next plan.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = Hashable
ConflictGraph: TypeAlias = dict[Key, set[Key]]


@dataclass(frozen=True)
class SlotPlan:
    """One slot: its size, and the keys that take turns in it."""

    nbytes: int
    keys: tuple[Key, ...]


def color_slots(
    sizes: Mapping[Key, int], conflicts: Mapping[Key, Iterable[Key]], *, dedicated: bool = False
) -> tuple[SlotPlan, ...]:
    """Give keys slots so that no two in conflict share one, in few bytes. Deterministic.

    Greedy in three orders (as given, largest first, most conflicts first); the best is kept: most
    bytes of keys placed, then fewest bytes of slots.

    The order of `sizes`, in bytes, is the first order. `conflicts` are made symmetric here. With
    `dedicated` a key that shares with no other gets a slot as well: that saves no memory, but fixes
    the address.
    """
    graph: ConflictGraph = {key: set() for key in sizes}
    for key, others in conflicts.items():
        for other in others:
            if key in sizes and other in sizes and key != other:
                graph[key].add(other)
                graph[other].add(key)
    # No order of a greedy colouring is best for all graphs: three are tried.
    given = list(sizes)
    orders = (
        given,
        sorted(given, key=lambda key: -sizes[key]),
        sorted(given, key=lambda key: (-len(graph[key]), -sizes[key])),
    )

    def coloured(order: Sequence[Key]) -> tuple[SlotPlan, ...]:
        """The slots that this order gives; a slot for one key alone saves nothing."""
        plans = _greedy(order, sizes, graph)
        return tuple(plan for plan in plans if dedicated or len(plan.keys) > 1)

    def score(plans: tuple[SlotPlan, ...]) -> tuple[int, int]:
        """The smaller the better: bytes of keys placed (more is better), then bytes of slots."""
        placed = sum(sizes[key] for plan in plans for key in plan.keys)
        return -placed, sum(plan.nbytes for plan in plans)

    return min(map(coloured, orders), key=score)


def _greedy(
    order: Sequence[Key], sizes: Mapping[Key, int], graph: Mapping[Key, set[Key]]
) -> tuple[SlotPlan, ...]:
    slots: list[list[Key]] = []
    nbytes: list[int] = []
    for key in order:
        need = sizes[key]
        if not need:
            continue
        free = [at for at, keys in enumerate(slots) if graph[key].isdisjoint(keys)]
        # The slot that grows least, and of those the smallest.
        at = min(free, key=lambda at: (max(need - nbytes[at], 0), nbytes[at], at), default=None)
        if at is not None:
            slots[at].append(key)
            nbytes[at] = max(need, nbytes[at])
        else:
            slots.append([key])
            nbytes.append(need)
    return tuple(SlotPlan(size, tuple(keys)) for size, keys in zip(nbytes, slots, strict=True))
