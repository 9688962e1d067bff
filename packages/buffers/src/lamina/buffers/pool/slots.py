"""Blocks of memory, and slots: fixed blocks, shared by units that are never live at the same time.

Two keys conflict when both may be live at once. A colouring gives each key a slot such that keys in
conflict never share one; the sum of the slots' sizes is what the pool holds for good.

Note [Slots]
    A slot costs no allocation, and a unit comes back to the same address each time, which CUDA
    graphs and registered memory need. The price is that a plan has to know which units live
    together, and that an order of use which it has not seen may find a slot taken. So slots are
    chosen (`mode="slots"`), planned from what a whole step has shown, and a key that finds its slot
    taken gets a block of its own until the next plan.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lamina.buffers.storage_access import access_of

__all__ = ["MemoryBlock", "SlotPlan", "Slots", "color_slots"]

Key: TypeAlias = Hashable
ConflictGraph: TypeAlias = dict[Key, set[Key]]


@dataclass(frozen=True)
class SlotPlan:
    """One slot: its size, and the keys that take turns in it."""

    nbytes: int
    keys: tuple[Key, ...]


class MemoryBlock:
    """A piece of memory: one key's own, or a slot (`fixed`) that several keys share.

    The keys' tensors view its `storage`, of `nbytes` bytes, or of none while an own block is
    released. A block in which nobody lives (`owner`) refuses access. Whoever reads it through a
    tensor that was kept gets the error `released`, and not a crash or what another key has left
    there. With `poison`, released bytes become 0xFF and are kept, instead of being given back or
    refused.
    """

    def __init__(
        self, device: torch.device, nbytes: int, released: str, *, fixed: bool, poison: bool
    ) -> None:
        made = torch.empty(nbytes if fixed else 0, dtype=torch.uint8, device=device)
        self.storage = made.untyped_storage()
        self.nbytes, self.fixed, self.poison = nbytes, fixed, poison
        self.owner: Key | None = None
        self.access = access_of(self.storage, released)
        self.release()

    def grow(self) -> None:
        """Take the bytes. What they hold is undefined (0xFF under poison)."""
        self.access.allow()  # first, as torch would refuse to resize it, too
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
            if self.poison:
                self._fill()

    def release(self) -> None:
        """Nobody lives here any longer: give an own block's bytes back, keep a slot's."""
        self.owner = None
        if self.poison:
            self._fill()
            return
        if not self.fixed:
            self.storage.resize_(0)
        self.access.refuse()

    def empty(self) -> None:
        """Give back the bytes, under poison too."""
        self.access.allow()
        self.storage.resize_(0)
        self.access.refuse()

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over the block, with a version counter of its own."""
        # Autograd could never save an inference tensor for backward.
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=self.storage.device)
            nbytes = self.storage.nbytes()
            self.access.allow()
            made.set_(self.storage, 0, (numel,), (1,))
            if self.storage.nbytes() != nbytes:
                self.storage.resize_(nbytes)  # set_ gives a storage that is too small its bytes
            if self.owner is None and not self.poison:
                self.access.refuse()
        return made

    def _fill(self) -> None:
        if self.storage.nbytes():
            self.view(self.nbytes, torch.uint8).fill_(0xFF)


class Slots:
    """The slots of one pool, and which of its keys were seen live together.

    `make` makes one, from its bytes and the message for reads of it while it is empty. `context` is
    entered once around the allocation of all new slots of a plan.
    """

    def __init__(
        self,
        make: Callable[[int, str], MemoryBlock],
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.blocks: list[MemoryBlock] = []
        """The slots that there are."""
        self._make = make
        self._context = context
        self._conflicts: ConflictGraph = {}
        self._homes: dict[Key, MemoryBlock] = {}
        self._observing = True

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(block.nbytes for block in self.blocks)

    def observe(self, key: Key, live: Iterable[Key]) -> None:
        """A key comes to life beside those that live."""
        for other in live if self._observing else ():
            self._conflicts.setdefault(key, set()).add(other)
            self._conflicts.setdefault(other, set()).add(key)

    @contextmanager
    def not_observing(self) -> Iterator[None]:
        """Keys may be live together in here as in no step."""
        before, self._observing = self._observing, False
        try:
            yield
        finally:
            self._observing = before

    def forget(self, key: Key) -> None:
        """A key is no longer the pool's."""
        self._conflicts.pop(key, None)
        self._homes.pop(key, None)
        for others in self._conflicts.values():
            others.discard(key)

    def plan(
        self,
        sizes: Mapping[Key, int],
        conflicts: Mapping[Key, Iterable[Key]],
        released: Mapping[Key, str],
        *,
        dedicated: bool,
    ) -> dict[Key, MemoryBlock]:
        """Make slots for keys of these sizes, in bytes: the slot of each key that has one.

        Conflicts that were observed count beside those given. A slot whose size and keys are
        unchanged stays as it is. `released` are messages for reads of an empty slot.
        """
        graph = {key: set(others) for key, others in self._conflicts.items()}
        for key, others in conflicts.items():
            graph.setdefault(key, set()).update(others)
        plans = color_slots(sizes, graph, dedicated=dedicated)
        # A slot that stays keeps its address, its tensors and what autograd saved of them.
        kept = [(plan, self._slot_like(plan)) for plan in plans]
        unchanged = [block for _, block in kept if block is not None]
        for block in self.blocks:
            if block not in unchanged:
                block.empty()
        self.blocks, self._homes = [], {}
        # Memory that goes is given back before new is taken: a new plan needs no room for both.
        with nullcontext() if all(block for _, block in kept) else self._context():
            for plan, same in kept:
                block = same or self._make(plan.nbytes, released[plan.keys[0]])
                self.blocks.append(block)
                self._homes.update(dict.fromkeys(plan.keys, block))
        return self._homes

    def _slot_like(self, plan: SlotPlan) -> MemoryBlock | None:
        """The slot there is for just these keys, if its size is right."""
        block = self._homes.get(plan.keys[0])
        if block is None or block.nbytes != plan.nbytes:
            return None
        keys = {key for key, home in self._homes.items() if home is block}
        return block if keys == set(plan.keys) else None


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
