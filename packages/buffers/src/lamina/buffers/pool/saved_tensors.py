"""What hooks keep of the tensors that autograd saves, and a guard over those of pooled storage."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lamina.buffers.pool.pool import StaleStorageError, StoragePool


# Note [What a hook for saved tensors loses]
# exp, sigmoid or softmax save their own results. A hook that gives back the tensor that it was
# given makes a cycle: the node holds what the hook gave back, and that tensor holds its node. torch
# lets go of it when backward visits the node. A node that no backward visits is never freed, and
# Python's garbage collector does not see it. So it is in a forward for evaluation with gradients
# on, and in each step where a result is not used (the state after the last token of Mamba's scan).
# Besides, torch looks at the version of a saved tensor only where there is no hook. So a tensor
# that was written to since would give wrong gradients, and no error.
@dataclass(frozen=True)
class SavedTensor:
    """A tensor as a hook keeps it. See Note [What a hook for saved tensors loses].

    Attributes:
        tensor: without its graph, which autograd adds again.
        version: counts the writes to the tensor until it was saved.

    Examples:
        >>> hooks = torch.autograd.graph.saved_tensors_hooks(SavedTensor.of, SavedTensor.unpacked)
        >>> with hooks:
        ...     torch.ones(3, requires_grad=True).exp().sum().backward()
    """

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> SavedTensor:
        """Keep a tensor."""
        apart = tensor if tensor.grad_fn is None else tensor.detach()
        return SavedTensor(apart, tensor._version)

    def unpacked(self) -> torch.Tensor:
        """The tensor; RuntimeError if it was written to since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a {self.tensor.dtype} tensor of shape {tuple(self.tensor.shape)} that backward "
                "needs was written to in place after forward had saved it (it is at version "
                f"{self.tensor._version}, and was saved at {self.version}): write to a copy of it"
            )
        return self.tensor


@dataclass(frozen=True)
class _SavedView:
    """A saved view of a key, and where the key was at that time."""

    key: Hashable
    epoch: int
    generation: int
    saved: SavedTensor


class SavedTensorGuard(torch.autograd.graph.saved_tensors_hooks):
    """Watches over views of pooled storage that autograd saves. Use it around forward.

    When backward unpacks such a view, its key must be live and in the same place; otherwise
    gradients would be computed from another unit's weights without any error. Other tensors pass
    through untouched.

    StaleStorageError, on pack or unpack, names the key, what it holds and what to do.
    """

    def __init__(self, pool: StoragePool) -> None:
        self.pool = pool
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        # A subclass may have no storage of its own, and a sparse tensor has several.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return SavedTensor.of(tensor)
        key, saved = self.pool.owner_of(tensor), SavedTensor.of(tensor)
        if key is None:
            return saved
        return _SavedView(key, self.pool.epoch(key), self.pool.generation(key), saved)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            result: torch.Tensor = saved.unpacked()
            return result
        pool, key = self.pool, saved.key
        pool.check(key)
        if pool.epoch(key) != saved.epoch:
            raise StaleStorageError(
                f"{key!r} was saved in epoch {saved.epoch} (generation {saved.generation}) and has "
                f"moved since (epoch {pool.epoch(key)}, generation {pool.generation(key)}): plan "
                "slots with the whole order of use"
            )
        return saved.saved.unpacked()
