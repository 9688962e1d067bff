"""The keys of a storage pool: which there are, what they view, who lives where."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lamina.buffers.layout.layout import BufferLayout
from lamina.buffers.pool.memory_blocks import Place, Places

__all__ = ["Entry", "Key", "PoolKeys", "StaleStorageError"]

Key: TypeAlias = Hashable


class StaleStorageError(RuntimeError):
    """A view of pooled storage is used while its place does not hold its key's content."""


@dataclass(eq=False)
class Entry:
    """One key: its tensor, the place the tensor views, and its history."""

    key: Key
    numel: int
    dtype: torch.dtype
    place: Place
    tensor: torch.Tensor
    generation: int = 0
    epoch: int = 0
    stamp: int = 0
    conflicts: set[Key] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of the key's tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def live(self) -> bool:
        """Whether the key holds its place now."""
        return self.place.owner is self.key


class PoolKeys:
    """What may be asked of a pool's keys at any time; `StoragePool` adds whose turn it is.

    Args:
        places: makes the memory.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._entries: dict[Key, Entry] = {}

    def register(self, key: Key, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a key's flat tensor of `numel` elements, without memory until `acquire`.

        Raises:
            ValueError: the key is None or registered already, or `numel` is negative.
        """
        if key is None or key in self._entries or numel < 0:
            raise ValueError(
                f"cannot register {key!r} with {numel} elements: keys are not None, are registered "
                "once (unregister first), and have 0 or more elements"
            )
        place = self._places.make(numel * dtype.itemsize, fixed=False)
        tensor = self._places.view(place, numel, dtype)
        self._entries[key] = Entry(key, numel, dtype, place, tensor)
        return tensor

    def unregister(self, key: Key) -> None:
        """Forget a key and free its memory. Views of it must not be read again.

        Raises:
            KeyError: no such key.
        """
        entry = self._entry(key)
        if entry.live:
            self._places.release(entry.place)
        del self._entries[key]
        for other in self._entries.values():
            other.conflicts.discard(key)
        if not entry.place.fixed:
            self._places.discard(entry.place)

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
        return self._places.view(entry.place, entry.numel, entry.dtype)

    @contextmanager
    def viewing(self, key: Key) -> Iterator[torch.Tensor]:
        """The key's flat tensor with memory behind it for the time of the block.

        torch refuses to slice a tensor whose storage holds no bytes, so views of a released key are
        made in here; they stay valid as objects afterwards. The content is undefined. Not counted
        against the budget: nothing is read or written, and on CPU no page is touched.

        Raises:
            KeyError: no such key.
        """
        entry = self._entry(key)
        place, released = entry.place, not entry.place.storage.nbytes()
        self._places.grow(place)
        try:
            yield entry.tensor
        finally:
            if released and not entry.live:
                self._places.empty(place)

    def views(self, key: Key, layout: BufferLayout) -> dict[str, torch.Tensor]:
        """Every tensor of `layout` with its shape, as views of the key's flat tensor.

        Raises:
            KeyError: no such key.
            ValueError: the layout has another number of elements than the key.
        """
        entry = self._entry(key)
        if layout.size != entry.numel:
            raise ValueError(f"{key!r} has {entry.numel} elements, the layout {layout.size}")
        with self.viewing(key) as flat, torch.inference_mode(False), torch.no_grad():
            return {
                spec.name: flat[offset : offset + spec.numel].view(spec.shape)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            }

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

    def stamp(self, key: Key) -> int:
        """The number of the content last given to `acquire`. Raises KeyError."""
        return self._entry(key).stamp

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

    def owner_of(self, tensor: torch.Tensor) -> Key | None:
        """The key that lives in the memory a tensor views; None where it is none of the pool's.

        Raises:
            StaleStorageError: the memory is the pool's and nobody lives in it.
        """
        place = self._places.find(tensor)
        if place is None:
            return None
        if place.owner is None:
            raise StaleStorageError(
                f"a view of released storage of {self._in_place(place)} is used: acquire the key "
                "and gather into it first"
            )
        return place.owner

    def _entry(self, key: Key) -> Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise KeyError(
                f"{key!r} is not registered with this pool ({len(self._entries)} keys)"
            ) from None

    def _in_place(self, place: Place) -> list[Key]:
        return [key for key, entry in self._entries.items() if entry.place is place]
