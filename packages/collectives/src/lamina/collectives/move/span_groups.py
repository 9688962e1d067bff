"""How a `lamina.buffers.ShardedTensor` reaches the other ranks that hold its spans."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.move.all_gather import all_gather_into
from lamina.collectives.move.small import all_reduce_small
from lamina.collectives.transport.groups import group_size

__all__ = ["SpanGroups"]


class SpanGroups:
    """The ranks of the product of some axes; meets `lamina.buffers.engine.SpanCommunicator`.

    Args:
        groups: one process group per axis that cuts the tensor, outer axis first; None for an axis
            of one rank.
    """

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        self._groups = tuple(groups)

    def __eq__(self, other: object) -> bool:
        """Whether two communicators reach the same ranks over the same groups."""
        return isinstance(other, SpanGroups) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(self._groups)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(group_size(group) for group in self._groups)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max", "min"]) -> torch.Tensor:
        """Reduce a small tensor in place, inner axis first; integers and float64 as such."""
        for group in reversed(self._groups):
            all_reduce_small([tensor], group, op=op)
        return tensor

    def all_gather(self, local: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' flat tensors, of `numels[rank]` elements, in rank order.

        Pieces travel padded to the longest, so that one equal-sized gather per axis serves.
        """
        width = max(numels)
        piece = torch.zeros(width, dtype=local.dtype, device=local.device)
        piece[: local.numel()].copy_(local.detach())
        for group in reversed(self._groups):
            size = group_size(group)
            if size > 1:
                whole = torch.empty(size * piece.numel(), dtype=piece.dtype, device=piece.device)
                all_gather_into(whole, piece, group)
                piece = whole
        rows = piece.view(len(numels), width)
        return torch.cat([row[:numel] for row, numel in zip(rows, numels, strict=True)])
