"""`StoragePool`: memory that unsharded units are gathered into and that is given back after use.

Two kinds of place. A key with a storage of its own has bytes that come and go while its tensor and
views stay (`resize`): always right, at the price of an allocation each time. A key in a slot shares
fixed memory with keys that are never live at the same time: no allocation, the same address each
time. Autograd's saved views of a released key are valid again once the key is back in the same
place with the same content; `SavedTensorGuard` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias

import torch

from lamina.buffers.pool.memory_blocks import Place, Places
from lamina.buffers.pool.pool_keys import Entry, Key, PoolKeys, StaleStorageError
from lamina.buffers.pool.slots import ConflictGraph, SlotPlan, color_slots

__all__ = ["PoolExhaustedError", "StaleStorageError", "StoragePool"]

Mode: TypeAlias = Literal["resize", "slots"]


class PoolExhaustedError(RuntimeError):
    """The pool's byte budget is spent: says the bytes wanted and the bytes there."""


class StoragePool(PoolKeys):
    """Key-addressed storage for unsharded units.

    A key's tensor exists from `register` on; its bytes exist only between `acquire` and `release`.
    Views are made with `views`, or inside `viewing`. Under `slots`, `plan_slots` moves keys to
    shared fixed memory: the tensors of the keys it returns are new, and the caller makes its views
    again.

    Whoever gathers writes through `destination(key)`, which has a version counter of its own, so
    that autograd does not take a repeated gather for a modification of what it saved. Code that
    writes through the tensor or its views does it under
    `torch.autograd._unsafe_preserve_version_counter`. On CUDA, acquire and release on one stream
    (or give `allocation_context`), and let that stream wait for the last use before `release`.

    Args:
        device: where the memory lies.
        mode: `"resize"`, or `"slots"` to allow `plan_slots` (keys that fit no free slot take
            `resize`).
        budget: bytes of slots and live keys together, or None for no limit.
        poison: fill released memory with 0xFF bytes (NaN in fp64, fp32, bf16, fp16, e4m3fn, e5m2)
            and keep it, so that whoever reads it sees NaN instead of old values or a crash.
        allocation_context: entered around every allocation and release, such as
            `lambda: torch.cuda.stream(s)` or `lambda: torch.cuda.use_mem_pool(pool)`.
        slot_context: entered once around the allocation of all slots of a `plan_slots`, for memory
            that is registered as a whole (`lambda: register_pool(groups)`).

    Raises:
        ValueError: unknown mode or a budget below zero.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        mode: Mode = "resize",
        *,
        budget: int | None = None,
        poison: bool = False,
        allocation_context: Callable[[], AbstractContextManager[object]] | None = None,
        slot_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        if mode not in ("resize", "slots"):
            raise ValueError(f"StoragePool mode is {mode!r}: use 'resize' or 'slots'")
        if budget is not None and budget < 0:
            raise ValueError(f"StoragePool budget is {budget} bytes: use 0 or more, or None")
        self.device = torch.device(device)
        self.mode: Mode = mode
        self.budget = budget
        super().__init__(Places(self.device, poison, allocation_context or nullcontext))
        self._slot_context = slot_context or nullcontext
        self._slots: list[Place] = []
        self._peak = 0
        self._fallbacks: dict[Key, int] = {}
        self._observing = True

    # -- acquire and release --------------------------------------------------------------------

    def acquire(
        self, key: Key, *, epoch: int | None = None, stamp: int | None = None
    ) -> torch.Tensor:
        """Give the key memory, with undefined content; a live key keeps what it has.

        A key whose slot another live key holds falls back to a storage of its own, until the next
        `plan_slots`: its tensor and epoch change.

        Args:
            key: a registered key.
            epoch: the epoch in which autograd saved views of the key, where it did and no
                relocating `SavedTensorGuard` was active: then the key must come back to that place.
            stamp: number of the content (such as the optimizer step); the guard compares it.

        Returns:
            The key's flat tensor.

        Raises:
            KeyError: no such key.
            PoolExhaustedError: the budget has no room. The key stays released.
            StaleStorageError: the key can't come back to where it was in `epoch`.
        """
        entry = self._entry(key)
        _check_epoch(entry, epoch)
        if not entry.live:
            self._observe(entry)
            if entry.place.owner is not None:
                self._fall_back(entry, epoch)
            self._check_budget(entry)
            self._places.grow(entry.place)
            entry.place.owner = entry.key
            entry.generation += 1
            self._peak = max(self._peak, self.bytes_resident)
        if stamp is not None:
            entry.stamp = stamp
        return entry.tensor

    def release(self, key: Key) -> None:
        """Give the key's memory back; nothing happens where it is not live. Raises KeyError."""
        entry = self._entry(key)
        if entry.live:
            self._places.release(entry.place)

    @contextmanager
    def using(self, key: Key) -> Iterator[torch.Tensor]:
        """`acquire` on entry, `release` on exit."""
        tensor = self.acquire(key)
        try:
            yield tensor
        finally:
            self.release(key)

    def _fall_back(self, entry: Entry, epoch: int | None) -> None:
        if epoch is not None:
            raise StaleStorageError(
                f"{entry.key!r} must come back to its slot, where autograd saved views of it, but "
                f"{entry.place.owner!r} is live there: the order of use differs from the planned "
                "one. Call plan_slots() again between steps, use mode='resize', or run forward "
                "under SavedTensorGuard(pool, relocate=True)"
            )
        self._fallbacks[entry.key] = self._fallbacks.get(entry.key, 0) + 1
        self._move(entry, self._places.make(entry.nbytes, fixed=False))

    @contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """Keys may be live together in here as in no step (to look at a whole model).

        The conflict graph does not learn from it, and a key that found its slot taken goes back to
        it at the end, if it was released by then.
        """
        homes = {key: entry.place for key, entry in self._entries.items() if entry.place.fixed}
        before = self._observing, dict(self._fallbacks)
        self._observing = False
        try:
            yield
        finally:
            self._observing, self._fallbacks = before
            for key, home in homes.items():
                entry = self._entries.get(key)
                away = entry is not None and entry.place is not home and not entry.live
                if entry is not None and away and home in self._slots:
                    self._move(entry, home)

    def _observe(self, entry: Entry) -> None:
        if not self._observing:
            return
        for other in self._entries.values():
            if other.live:
                entry.conflicts.add(other.key)
                other.conflicts.add(entry.key)

    def _check_budget(self, entry: Entry) -> None:
        if not self.fits(entry.key):
            there = max((self.budget or 0) - self.bytes_resident, 0)
            raise PoolExhaustedError(
                f"{entry.key!r} wants {entry.nbytes} bytes, {there} of the budget of {self.budget} "
                f"are there; live: {list(self.live_keys())}, slots: {len(self._slots)}. Release a "
                "unit first, prefetch less, or raise the budget"
            )

    def _move(self, entry: Entry, place: Place) -> None:
        if not entry.place.fixed:
            self._places.discard(entry.place)
        entry.place = place
        entry.tensor = self._places.view(place, entry.numel, entry.dtype)
        entry.epoch += 1

    # -- slots ----------------------------------------------------------------------------------

    def observed_conflicts(self) -> ConflictGraph:
        """Which keys have been live together since they were registered."""
        return {key: set(entry.conflicts) for key, entry in self._entries.items()}

    def plan_slots(
        self,
        conflicts: Mapping[Key, Iterable[Key]] | None = None,
        *,
        max_slots: int | None = None,
        max_bytes: int | None = None,
        dedicated: bool = False,
    ) -> set[Key]:
        """Give keys that are never live together common fixed memory.

        Conflicts that were observed count beside those given. Live keys stay where they are.

        Args:
            conflicts: who may be live with whom (see `conflict_graph`).
            max_slots: at most so many slots (two: one unit computes, one is gathered).
            max_bytes: at most so many bytes of slots, beside the pool's budget.
            dedicated: also give a slot to a key that can share with none (fixed addresses).

        Returns:
            The keys whose tensors are new ones: make their views again.

        Raises:
            ValueError: the pool's mode is `"resize"`.
            RuntimeError: a live key holds a slot.
        """
        if self.mode != "slots":
            raise ValueError("this pool's mode is 'resize': make it with mode='slots'")
        live = {key: entry for key, entry in self._entries.items() if entry.live}
        held = [key for key, entry in live.items() if entry.place.fixed]
        if held:
            raise RuntimeError(f"plan_slots while {held} are live in slots: release them first")
        graph = self.observed_conflicts()
        for key, others in (conflicts or {}).items():
            graph.setdefault(key, set()).update(others)
        if self.budget is not None:
            room = max(self.budget - sum(entry.nbytes for entry in live.values()), 0)
            max_bytes = room if max_bytes is None else min(room, max_bytes)
        plans = color_slots(
            {key: entry.nbytes for key, entry in self._entries.items() if key not in live},
            graph,
            max_slots=max_slots,
            max_bytes=max_bytes,
            dedicated=dedicated,
        )
        return self._rebuild(plans)

    def _rebuild(self, plans: Iterable[SlotPlan]) -> set[Key]:
        """Move keys to their slots; a slot whose size and keys are unchanged stays as it is."""
        kept = [(plan, self._slot_like(plan)) for plan in plans]
        for unused in set(self._slots) - {place for _, place in kept}:
            self._places.discard(unused)
        target: dict[Key, Place] = {}
        self._slots = []
        with nullcontext() if all(place for _, place in kept) else self._slot_context():
            for plan, place in kept:
                self._slots.append(place or self._places.make(plan.nbytes, fixed=True))
                target.update(dict.fromkeys(plan.keys, self._slots[-1]))
        moved = set()
        for key, entry in self._entries.items():
            slot = target.get(key)
            if slot is not entry.place and (slot is not None or entry.place.fixed):
                self._move(entry, slot or self._places.make(entry.nbytes, fixed=False))
                moved.add(key)
        self._fallbacks.clear()
        self._peak = max(self._peak, self.bytes_resident)
        return moved

    def _slot_like(self, plan: SlotPlan) -> Place | None:
        """The slot there is for just these keys, if its size is right."""
        place = self._entries[plan.keys[0]].place
        same = place.nbytes == plan.nbytes and set(self._in_place(place)) == set(plan.keys)
        return place if place.fixed and same else None

    def slot_of(self, key: Key) -> int | None:
        """Index of the key's slot, or None where it has a storage of its own. Raises KeyError."""
        place = self._entry(key).place
        return self._slots.index(place) if place.fixed else None

    @property
    def fallbacks(self) -> dict[Key, int]:
        """How often keys found their slot taken since `plan_slots`: a reason to plan again."""
        return dict(self._fallbacks)

    # -- bytes ----------------------------------------------------------------------------------

    @property
    def bytes_resident(self) -> int:
        """Bytes of all slots and of live keys with storages of their own (poison apart)."""
        own = sum(
            entry.nbytes for entry in self._entries.values() if entry.live and not entry.place.fixed
        )
        return own + sum(place.nbytes for place in self._slots)

    @property
    def bytes_peak(self) -> int:
        """The most `bytes_resident` has been."""
        return self._peak

    def fits(self, key: Key) -> bool:
        """Whether `acquire` of the key would stay within the budget. Raises KeyError."""
        entry = self._entry(key)
        free_slot = entry.place.fixed and entry.place.owner is None
        if entry.live or free_slot or self.budget is None:
            return True
        return self.bytes_resident + entry.nbytes <= self.budget

    def describe(self) -> str:
        """A table: slots with their keys, keys with storages of their own, bytes."""
        lines = [
            f"StoragePool({self.device}, {self.mode}): {self.bytes_resident} bytes resident, peak "
            f"{self._peak}, budget {self.budget}"
        ]
        for at, place in enumerate(self._slots):
            keys = self._in_place(place)
            lines.append(f"  slot {at}: {place.nbytes} bytes, holds {place.owner!r}, for {keys}")
        for key, entry in self._entries.items():
            if not entry.place.fixed:
                state = "live" if entry.live else "released"
                lines.append(f"  own: {key!r} {entry.nbytes} bytes, {state}")
        return "\n".join(lines)


def _check_epoch(entry: Entry, epoch: int | None) -> None:
    if epoch is not None and epoch != entry.epoch:
        raise StaleStorageError(
            f"{entry.key!r}: views were saved in epoch {epoch} and the key has moved since "
            f"(epoch {entry.epoch}): a gather would not reach them. Run forward under "
            "SavedTensorGuard(pool, relocate=True), or plan slots with the whole order of use"
        )
