"""Checks that a view of pooled storage is still valid when autograd unpacks it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lamina.buffers.pool.pool import StaleStorageError, StoragePool

__all__ = ["SavedTensorGuard"]


@dataclass(frozen=True)
class _SavedView:
    """A saved view of a key: in what state, and the tensor or how to make it again."""

    key: Hashable
    epoch: int
    generation: int
    stamp: int
    tensor: torch.Tensor | None
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: tuple[int, ...]
    stride: tuple[int, ...]


class SavedTensorGuard(torch.autograd.graph.saved_tensors_hooks):
    """Watches over views of pooled storage that autograd saves. Use it around forward.

    When backward unpacks such a view, its key must be live, in the same place, and hold content
    with the same stamp; otherwise gradients would be computed from another unit's weights without
    any error. Other tensors pass through untouched.

    Args:
        pool: whose storage is watched.
        relocate: save which part of which key a view was instead of the view, and make it again
            from the key's tensor of that time: right wherever the key has moved to. Costs a few
            microseconds per saved view.

    Raises:
        StaleStorageError: on pack or unpack. Names the key, what it holds and what to do.
    """

    def __init__(self, pool: StoragePool, *, relocate: bool = False) -> None:
        self.pool = pool
        self.relocate = relocate
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        key = self.pool.owner_of(tensor)
        if key is None:
            return tensor
        pool = self.pool
        return _SavedView(
            key,
            pool.epoch(key),
            pool.generation(key),
            pool.stamp(key),
            None if self.relocate else tensor,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            result: torch.Tensor = saved
            return result
        pool, key = self.pool, saved.key
        pool.check(key)
        if pool.stamp(key) != saved.stamp:
            raise StaleStorageError(
                f"{key!r} was saved with content {saved.stamp} and holds content "
                f"{pool.stamp(key)}: its weights changed between forward and backward"
            )
        if saved.tensor is not None:
            if pool.epoch(key) != saved.epoch:
                raise StaleStorageError(
                    f"{key!r} was saved in epoch {saved.epoch} (generation {saved.generation}) "
                    f"and has moved since (epoch {pool.epoch(key)}, generation "
                    f"{pool.generation(key)}): "
                    "use SavedTensorGuard(pool, relocate=True), or plan slots with the whole order"
                )
            return saved.tensor
        base = pool.tensor(key)
        if base.dtype != saved.dtype:
            base = base.view(saved.dtype)
        return base.as_strided(saved.size, saved.stride, saved.offset)
