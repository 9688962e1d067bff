"""Checks that a view of pooled storage is still valid when autograd unpacks it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lamina.buffers.pool.pool import StaleStorageError, StoragePool

__all__ = ["SavedTensorGuard"]


@dataclass(frozen=True)
class _SavedView:
    """A saved view of a key, and where the key was at that time."""

    key: Hashable
    epoch: int
    generation: int
    tensor: torch.Tensor


class SavedTensorGuard(torch.autograd.graph.saved_tensors_hooks):
    """Watches over views of pooled storage that autograd saves. Use it around forward.

    When backward unpacks such a view, its key must be live and in the same place; otherwise
    gradients would be computed from another unit's weights without any error. Other tensors pass
    through untouched.

    Args:
        pool: whose storage is watched.

    Raises:
        StaleStorageError: on pack or unpack. Names the key, what it holds and what to do.
    """

    def __init__(self, pool: StoragePool) -> None:
        self.pool = pool
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        key = self.pool.owner_of(tensor)
        if key is None:
            return tensor
        return _SavedView(key, self.pool.epoch(key), self.pool.generation(key), tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            result: torch.Tensor = saved
            return result
        pool, key = self.pool, saved.key
        pool.check(key)
        if pool.epoch(key) != saved.epoch:
            raise StaleStorageError(
                f"{key!r} was saved in epoch {saved.epoch} (generation {saved.generation}) and has "
                f"moved since (epoch {pool.epoch(key)}, generation {pool.generation(key)}): plan "
                "slots with the whole order of use"
            )
        return saved.tensor
