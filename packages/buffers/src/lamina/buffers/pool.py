"""`StoragePool`: memory that unsharded units are gathered into and that is given back after use.

Two kinds of place. A key of the `resize` kind has a storage of its own whose bytes come and go while
the tensor and its views stay: always right, at the price of an allocation each time. A key in a
`slot` shares fixed memory with keys that are never live at the same time: no allocation, the same
address each time. Autograd's saved views of a released key are valid again once the key is back in
the same place with the same content; `SavedTensorGuard` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from .slots import ConflictGraph, color_slots

__all__ = ["PoolExhaustedError", "StaleStorageError", "StoragePool"]

Key: TypeAlias = Hashable
Mode: TypeAlias = Literal["resize", "slots"]


class PoolExhaustedError(RuntimeError):
    """The pool's byte budget is spent: says the bytes wanted and the bytes there."""


class StaleStorageError(RuntimeError):
    """A view of pooled storage is used while its place does not hold its key's content."""


@dataclass(eq=False)
class _Place:
    """A piece of memory: one key's own (`fixed` False), or a slot that several keys share."""

    storage: torch.UntypedStorage
    raw: torch.Tensor  # the same bytes as uint8, with a version counter of its own
    nbytes: int
    fixed: bool
    owner: Key | None = None


@dataclass(eq=False)
class _Entry:
    key: Key
    numel: int
    dtype: torch.dtype
    place: _Place
    tensor: torch.Tensor
    generation: int = 0
    epoch: int = 0
    stamp: int = 0
    conflicts: set[Key] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def live(self) -> bool:
        return self.place.owner == self.key


class StoragePool:
    """Key-addressed storage for unsharded units.

    A key's tensor exists from `register` on, and so may views of it; its bytes exist only between
    `acquire` and `release`. Under `slots`, `plan_slots` moves keys to shared fixed memory: the tensors
    of the keys it returns are new ones, and the caller makes its views of them again.

    Whoever gathers writes through `destination(key)`, which has a version counter of its own, so
    that autograd does not take a repeated gather for a modification of what it saved. Code that
    writes through the tensor or its views does it under
    ``torch.autograd._unsafe_preserve_version_counter``. On CUDA, acquire and release on one stream
    (or give `allocation_context`), and let that stream wait for the last use before `release`.

    Args:
        device: where the memory lies.
        mode: ``"resize"``, or ``"slots"`` once `plan_slots` has been called (keys that fit no free
            slot take `resize`).
        budget: bytes of slots and live keys together, or None for no limit.
        poison: fill released memory with 0xFF bytes (NaN in every IEEE dtype, bf16 and fp8's OCP
            formats) and keep it, so that whoever reads it sees NaN instead of old values.
        allocation_context: entered around every allocation and release, such as
            ``lambda: torch.cuda.stream(s)`` or ``lambda: torch.cuda.use_mem_pool(pool)``.

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
    ) -> None:
        if mode not in ("resize", "slots"):
            raise ValueError(f"StoragePool mode is {mode!r}: use 'resize' or 'slots'")
        if budget is not None and budget < 0:
            raise ValueError(f"StoragePool budget is {budget} bytes: use 0 or more, or None")
        self.device = torch.device(device)
        self.mode: Mode = mode
        self.budget = budget
        self.poison = poison
        self._context = allocation_context or nullcontext
        self._entries: dict[Key, _Entry] = {}
        self._slots: list[_Place] = []
        self._places: dict[int, _Place] = {}
        self._peak = 0
        self._fallbacks: dict[Key, int] = {}

    # -- keys -----------------------------------------------------------------------------------

    def register(self, key: Key, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a key's flat tensor of `numel` elements, without memory until `acquire`.

        Raises:
            ValueError: the key is registered already, or `numel` is negative.
        """
        if key in self._entries:
            raise ValueError(f"{key!r} is registered already: unregister it first")
        if numel < 0:
            raise ValueError(f"{key!r}: {numel} elements")
        place = self._own_place(numel * dtype.itemsize)
        entry = _Entry(key, numel, dtype, place, self._view(place, numel, dtype))
        self._entries[key] = entry
        return entry.tensor

    def unregister(self, key: Key) -> None:
        """Forget a key and free its memory. Views of it must not be read again.

        Raises:
            KeyError: no such key.
        """
        self.release(key)
        entry = self._entries.pop(key)
        for other in self._entries.values():
            other.conflicts.discard(key)
        if not entry.place.fixed:
            self._forget(entry.place)

    def tensor(self, key: Key) -> torch.Tensor:
        """The key's flat tensor, live or not. Raises KeyError."""
        return self._entry(key).tensor

    def destination(self, key: Key) -> torch.Tensor:
        """The same flat memory with a version counter of its own: what a gather writes into.

        Raises:
            KeyError: no such key.
            StaleStorageError: the key is not live.
        """
        entry = self._entry(key)
        self.check(key)
        return self._view(entry.place, entry.numel, entry.dtype)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def keys(self) -> tuple[Key, ...]:
        """All keys, in order of registration."""
        return tuple(self._entries)

    def live_keys(self) -> tuple[Key, ...]:
        """Keys that hold memory now, in order of registration."""
        return tuple(key for key, entry in self._entries.items() if entry.live)

    def is_live(self, key: Key) -> bool:
        """Whether the key holds memory now. Raises KeyError."""
        return self._entry(key).live

    def generation(self, key: Key) -> int:
        """How many times the key has been acquired. Raises KeyError."""
        return self._entry(key).generation

    def epoch(self, key: Key) -> int:
        """How many times the key's tensor has moved to another place. Raises KeyError.

        Views must be made again when it changes, and views that autograd saved earlier are lost:
        pass the epoch they were made in to `acquire`.
        """
        return self._entry(key).epoch

    def slot_of(self, key: Key) -> int | None:
        """Index of the key's slot, or None where it has a storage of its own. Raises KeyError."""
        place = self._entry(key).place
        return self._slots.index(place) if place.fixed else None

    def _entry(self, key: Key) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise KeyError(
                f"{key!r} is not registered with this pool ({len(self._entries)} keys)"
            ) from None

    # -- acquire and release --------------------------------------------------------------------

    def acquire(
        self, key: Key, *, epoch: int | None = None, stamp: int | None = None
    ) -> torch.Tensor:
        """Give the key memory, with undefined content; nothing happens where it is live already.

        A key whose slot another live key holds falls back to a storage of its own, for good (until
        the next `plan_slots`): its tensor and epoch change.

        Args:
            key: a registered key.
            epoch: the epoch in which autograd saved views of the key, where it did and no
                relocating `SavedTensorGuard` was active: then the key must come back to that place.
            stamp: number of the content (such as the optimizer step); the guard compares it.

        Returns:
            The key's flat tensor.

        Raises:
            KeyError: no such key.
            PoolExhaustedError: the budget has no room. Nothing changes.
            StaleStorageError: the key can't come back to where it was in `epoch`.
        """
        entry = self._entry(key)
        if stamp is not None:
            entry.stamp = stamp
        if not entry.live:
            self._observe(entry)
            if entry.place.owner is not None:
                self._fall_back(entry, epoch)
            self._check_epoch(entry, epoch)
            if not entry.place.fixed:
                self._grow(entry)
            entry.place.owner = key
            entry.generation += 1
            self._peak = max(self._peak, self.bytes_resident)
        self._check_epoch(entry, epoch)
        return entry.tensor

    def release(self, key: Key) -> None:
        """Give the key's memory back; nothing happens where it is not live. Raises KeyError."""
        entry = self._entry(key)
        if not entry.live:
            return
        place = entry.place
        place.owner = None
        if self.poison:
            place.raw.fill_(0xFF)
        elif not place.fixed:
            with self._allocating():
                place.storage.resize_(0)

    @contextmanager
    def using(self, key: Key) -> Iterator[torch.Tensor]:
        """`acquire` on entry, `release` on exit."""
        try:
            yield self.acquire(key)
        finally:
            self.release(key)

    def check(self, key: Key) -> None:
        """Raise StaleStorageError unless the key is live."""
        entry = self._entry(key)
        if not entry.live:
            holder = entry.place.owner
            raise StaleStorageError(
                f"{key!r} (generation {entry.generation}) is not live"
                + (f": its slot holds {holder!r}" if holder is not None else "")
                + "; acquire it and gather into it before use"
            )

    def _check_epoch(self, entry: _Entry, epoch: int | None) -> None:
        if epoch is not None and epoch != entry.epoch:
            raise StaleStorageError(
                f"{entry.key!r}: views were saved in epoch {epoch} and the key has moved since "
                f"(epoch {entry.epoch}): a gather would not reach them. Run forward under "
                "SavedTensorGuard(pool, relocate=True), or plan slots with the whole order of use"
            )

    def _fall_back(self, entry: _Entry, epoch: int | None) -> None:
        if epoch is not None:
            raise StaleStorageError(
                f"{entry.key!r} must come back to its slot, where autograd saved views of it, but "
                f"{entry.place.owner!r} is live there: the order of use differs from the planned "
                "one. Call plan_slots() again between steps, use mode='resize', or run forward "
                "under SavedTensorGuard(pool, relocate=True)"
            )
        self._fallbacks[entry.key] = self._fallbacks.get(entry.key, 0) + 1
        self._move(entry, self._own_place(entry.nbytes))

    def _observe(self, entry: _Entry) -> None:
        for other in self._entries.values():
            if other.live and other is not entry:
                entry.conflicts.add(other.key)
                other.conflicts.add(entry.key)

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
            ValueError: the pool's mode is ``"resize"``.
            RuntimeError: a live key holds a slot.
        """
        if self.mode != "slots":
            raise ValueError("this pool's mode is 'resize': make it with mode='slots'")
        held = [key for key, entry in self._entries.items() if entry.live and entry.place.fixed]
        if held:
            raise RuntimeError(f"plan_slots while {held} are live in slots: release them first")
        graph = self.observed_conflicts()
        for key, others in (conflicts or {}).items():
            graph.setdefault(key, set()).update(others)
        plans = color_slots(
            {key: entry.nbytes for key, entry in self._entries.items() if not entry.live},
            graph,
            max_slots=max_slots,
            max_bytes=self._slot_bytes(max_bytes),
            dedicated=dedicated,
        )
        return self._rebuild([(plan.nbytes, plan.keys) for plan in plans])

    def _slot_bytes(self, max_bytes: int | None) -> int | None:
        if self.budget is None:
            return max_bytes
        live = sum(entry.nbytes for entry in self._entries.values() if entry.live)
        room = max(self.budget - live, 0)
        return room if max_bytes is None else min(room, max_bytes)

    def _rebuild(self, plans: list[tuple[int, tuple[Key, ...]]]) -> set[Key]:
        """Move keys to their slots. A slot whose keys and size stay the same stays where it is."""
        old = {(place.nbytes, frozenset(self._in_place(place))): place for place in self._slots}
        placed: dict[Key, _Place] = {}
        slots = []
        for nbytes, keys in plans:
            place = old.pop((nbytes, frozenset(keys)), None)
            slots.append((place, nbytes, keys))
        for place in old.values():
            self._free_slot(place)
        self._slots = []
        for place, nbytes, keys in slots:
            made = place or self._make_slot(nbytes)
            self._slots.append(made)
            placed.update(dict.fromkeys(keys, made))
        moved = set()
        for key, entry in self._entries.items():
            target = placed.get(key)
            if target is entry.place or (target is None and not entry.place.fixed):
                continue
            self._move(entry, target or self._own_place(entry.nbytes))
            moved.add(key)
        self._peak = max(self._peak, self.bytes_resident)
        return moved

    def _in_place(self, place: _Place) -> list[Key]:
        return [key for key, entry in self._entries.items() if entry.place is place]

    def _make_slot(self, nbytes: int) -> _Place:
        place = self._own_place(nbytes)
        place.fixed = True
        with self._allocating():
            place.storage.resize_(nbytes)
        place.raw = self._raw(place.storage, nbytes)
        if self.poison:
            place.raw.fill_(0xFF)
        return place

    def _free_slot(self, place: _Place) -> None:
        with self._allocating():
            place.storage.resize_(0)
        self._forget(place)

    # -- memory ---------------------------------------------------------------------------------

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

    @property
    def fallbacks(self) -> dict[Key, int]:
        """How often each key found its slot taken: a reason to plan slots again."""
        return dict(self._fallbacks)

    def _grow(self, entry: _Entry) -> None:
        if not self.fits(entry.key):
            there = max((self.budget or 0) - self.bytes_resident, 0)
            raise PoolExhaustedError(
                f"{entry.key!r} wants {entry.nbytes} bytes, {there} of the budget of {self.budget} "
                f"are there; live: {list(self.live_keys())}, slots: {len(self._slots)}. Release a "
                "unit first, prefetch less, or raise the budget"
            )
        place = entry.place
        if place.storage.nbytes() != place.nbytes:
            with self._allocating():
                place.storage.resize_(place.nbytes)
            place.raw = self._raw(place.storage, place.nbytes)
            if self.poison:
                place.raw.fill_(0xFF)

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        # An inference tensor could never be saved for backward, whoever asked for it first.
        with torch.inference_mode(False), torch.no_grad(), self._context():
            yield

    def _own_place(self, nbytes: int) -> _Place:
        with self._allocating():
            raw = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            storage = raw.untyped_storage()
            storage.resize_(0)
        place = _Place(storage, raw, nbytes, fixed=False)
        self._places[storage._cdata] = place
        return place

    def _forget(self, place: _Place) -> None:
        with self._allocating():
            place.storage.resize_(0)
        self._places.pop(place.storage._cdata, None)

    def _raw(self, storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
        with self._allocating():
            made = torch.empty(0, dtype=torch.uint8, device=self.device)
            return made.set_(storage, 0, (nbytes,), (1,))

    def _view(self, place: _Place, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._allocating():
            made = torch.empty(0, dtype=dtype, device=self.device)
            # set_ grows a storage that is too small: give back what it took of a released one.
            held = place.storage.nbytes()
            made.set_(place.storage, 0, (numel,), (1,))
            if place.storage.nbytes() != held:
                place.storage.resize_(held)
            return made

    def _move(self, entry: _Entry, place: _Place) -> None:
        if not entry.place.fixed:
            self._forget(entry.place)
        entry.place = place
        entry.tensor = self._view(place, entry.numel, entry.dtype)
        entry.epoch += 1

    def owner_of(self, tensor: torch.Tensor) -> Key | None:
        """The key that lives in the memory a tensor views; None where it is none of the pool's.

        Raises:
            StaleStorageError: the memory is the pool's and nobody lives in it.
        """
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return None
        if place.owner is None:
            raise StaleStorageError(
                f"a view of released storage of {self._in_place(place)} is used: acquire the key "
                "and gather into it first"
            )
        return place.owner

    def stamp(self, key: Key) -> int:
        """The number of the content last given to `acquire`. Raises KeyError."""
        return self._entry(key).stamp

    def describe(self) -> str:
        """A table: slots with their keys, keys with storages of their own, bytes."""
        lines = [
            f"StoragePool({self.device}, {self.mode}): {self.bytes_resident} bytes resident, peak "
            f"{self._peak}, budget {self.budget}"
        ]
        for at, place in enumerate(self._slots):
            lines.append(
                f"  slot {at}: {place.nbytes} bytes, holds {place.owner!r}, for "
                f"{self._in_place(place)}"
            )
        for key, entry in self._entries.items():
            if not entry.place.fixed:
                state = "live" if entry.live else "released"
                lines.append(f"  own: {key!r} {entry.nbytes} bytes, {state}")
        return "\n".join(lines)
