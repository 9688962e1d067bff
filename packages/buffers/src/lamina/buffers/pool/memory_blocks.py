"""Pieces of memory whose bytes come and go while tensors over them stay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Place", "Places"]


@dataclass(eq=False)
class Place:
    """A piece of memory: one key's own, or a slot (`fixed`) that several keys share.

    Attributes:
        storage: what the keys' tensors view; of `nbytes` bytes, or none while released.
        raw: the same bytes as uint8, with a version counter of its own.
        owner: the key that is live here.
    """

    storage: torch.UntypedStorage
    raw: torch.Tensor
    nbytes: int
    fixed: bool
    owner: Hashable | None = None


class Places:
    """Makes places on one device, fills and empties them, and finds the place of a tensor.

    Args:
        device: where.
        poison: released bytes become 0xFF and are kept, instead of being given back.
        context: entered around every allocation and release.
    """

    def __init__(
        self,
        device: torch.device,
        poison: bool,
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.device = device
        self.poison = poison
        self._context = context
        self._by_storage: dict[int, Place] = {}

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Outside inference mode: an inference tensor could never be saved for backward."""
        with torch.inference_mode(False), torch.no_grad(), self._context():
            yield

    def make(self, nbytes: int, *, fixed: bool) -> Place:
        """A new place: a slot with its bytes, or a key's own without any."""
        with self.allocating():
            raw = torch.empty(nbytes if fixed else 0, dtype=torch.uint8, device=self.device)
        place = Place(raw.untyped_storage(), raw, nbytes, fixed)
        self._by_storage[place.storage._cdata] = place
        if fixed:
            self._fill(place)
        return place

    def grow(self, place: Place) -> None:
        """Give a place its bytes. What they hold is undefined (0xFF under poison)."""
        if place.storage.nbytes() == place.nbytes:
            return
        with self.allocating():
            place.storage.resize_(place.nbytes)
            raw = torch.empty(0, dtype=torch.uint8, device=self.device)
            place.raw = raw.set_(place.storage, 0, (place.nbytes,), (1,))
        self._fill(place)

    def release(self, place: Place) -> None:
        """Nobody lives here any longer: give an own place's bytes back, keep a slot's."""
        place.owner = None
        if self.poison:
            self._fill(place)
        elif not place.fixed:
            self.empty(place)

    def empty(self, place: Place) -> None:
        """Give back the bytes."""
        with self.allocating():
            place.storage.resize_(0)

    def discard(self, place: Place) -> None:
        """Give back the bytes and forget the place."""
        self.empty(place)
        del self._by_storage[place.storage._cdata]

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a place, with a version counter of its own."""
        with self.allocating():
            made = torch.empty(0, dtype=dtype, device=self.device)
            held = place.storage.nbytes()
            made.set_(place.storage, 0, (numel,), (1,))
            if place.storage.nbytes() != held:
                place.storage.resize_(held)  # set_ gives a storage that is too small its bytes
        return made

    def find(self, tensor: torch.Tensor) -> Place | None:
        """The place a tensor views, or None."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def _fill(self, place: Place) -> None:
        if self.poison:
            with torch.inference_mode(False), torch.no_grad():
                place.raw.fill_(0xFF)
