"""Pieces of memory whose bytes come and go while tensors over them stay."""

from collections.abc import Hashable
from ctypes import c_bool
from dataclasses import dataclass

import torch

from lamina.buffers.compat import refusals_of

__all__ = ["MemoryBlock", "MemoryBlocks"]


@dataclass(eq=False)
class MemoryBlock:
    """A piece of memory: one key's own, or a slot (`fixed`) that several keys share.

    Attributes:
        storage: what the keys' tensors view; of `nbytes` bytes, or none while released.
        refusals: switches; while they are True, whoever reads or writes the bytes gets an error.
        owner: the key that is live here.
    """

    storage: torch.UntypedStorage
    nbytes: int
    fixed: bool
    refusals: tuple[c_bool, ...]
    owner: Hashable | None = None


class MemoryBlocks:
    """Makes blocks on one device, fills and empties them, and finds the block of a tensor.

    A block in which nobody lives refuses access. Whoever reads it through a tensor that was kept
    gets an error, and not a crash or what another key has left there.

    Args:
        device: where.
        poison: released bytes become 0xFF and are kept, instead of being given back or refused.
    """

    def __init__(self, device: torch.device, poison: bool) -> None:
        self.device = device
        self.poison = poison
        self._by_storage: dict[int, MemoryBlock] = {}

    def make(self, nbytes: int, released: str, *, fixed: bool) -> MemoryBlock:
        """A new block: a slot with its bytes, or a key's own without any.

        `released` is the error's message for whoever reads it while nobody lives there.
        """
        made = torch.empty(nbytes if fixed else 0, dtype=torch.uint8, device=self.device)
        storage = made.untyped_storage()
        block = MemoryBlock(storage, nbytes, fixed, refusals_of(storage, released))
        self._by_storage[block.storage._cdata] = block
        self.close(block)
        return block

    def grow(self, block: MemoryBlock) -> None:
        """Give a block its bytes. What they hold is undefined (0xFF under poison)."""
        for refusal in block.refusals:
            refusal.value = False
        if block.storage.nbytes() != block.nbytes:
            block.storage.resize_(block.nbytes)
            if self.poison:
                self._fill(block)

    def release(self, block: MemoryBlock) -> None:
        """Nobody lives here any longer: give an own block's bytes back, keep a slot's."""
        block.owner = None
        if self.poison:
            self._fill(block)
            return
        if not block.fixed:
            block.storage.resize_(0)
        for refusal in block.refusals:
            refusal.value = True

    def empty(self, block: MemoryBlock) -> None:
        """Give back the bytes, under poison too."""
        _switch(block, False)
        block.storage.resize_(0)
        _switch(block, True)

    def discard(self, block: MemoryBlock) -> None:
        """Give back the bytes and forget the block."""
        self.empty(block)
        del self._by_storage[block.storage._cdata]

    def view(self, block: MemoryBlock, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a block, with a version counter of its own."""
        # Autograd could never save an inference tensor for backward.
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=self.device)
            held = block.storage.nbytes()
            _switch(block, False)
            made.set_(block.storage, 0, (numel,), (1,))
            if block.storage.nbytes() != held:
                block.storage.resize_(held)  # set_ gives a storage that is too small its bytes
            _switch(block, block.owner is None and not self.poison)
        return made

    def find(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """The block that a tensor views, or None."""
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def close(self, block: MemoryBlock) -> None:
        """Nobody lives here: refuse access, or fill with 0xFF."""
        if self.poison:
            self._fill(block)
        else:
            _switch(block, True)

    def _fill(self, block: MemoryBlock) -> None:
        if block.storage.nbytes():
            self.view(block, block.nbytes, torch.uint8).fill_(0xFF)


def _switch(block: MemoryBlock, refuse: bool) -> None:
    for refusal in block.refusals:
        refusal.value = refuse
