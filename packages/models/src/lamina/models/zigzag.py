"""How sequences are cut over context-parallel ranks.

Causal attention gives late tokens more work than early ones. So a sequence is cut into twice as
many chunks as there are ranks, and rank r of n holds chunks r and 2n - 1 - r: an early and a late
one, the same work for everyone (Brandon et al., Striped Attention, 2023; Llama 3, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.collectives import gather_from
from lamina.models.axes import MeshLike, axis_of


def chunk_order(size: int) -> list[int]:
    """Which chunk lies where when the ranks' pieces are laid end to end."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def cut_sequence(x: Tensor, mesh: MeshLike, dim: int = 1) -> Tensor:
    """Take this rank's two chunks of a sequence, in order.

    Args:
        x: the whole sequence along ``dim``.
        mesh: has an axis ``cp``, or is that axis; None keeps the whole.
        dim: the sequence's dimension.

    Raises:
        ValueError: if the sequence is not divisible by twice the number of ranks.

    """
    axis = axis_of(mesh, "cp")
    if axis is None:
        return x
    chunks = 2 * axis.size
    if x.shape[dim] % chunks:
        raise ValueError(
            f"sequence of {x.shape[dim]} tokens is not divisible by {chunks}, twice {axis.name} "
            f"{axis.size} (remainder {x.shape[dim] % chunks}): pad or cut the sequence"
        )
    parts = x.chunk(chunks, dim=dim)
    return torch.cat((parts[axis.rank], parts[chunks - 1 - axis.rank]), dim=dim)


def in_order(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """Put ranks' pieces laid end to end along ``dim`` back into the sequence's order."""
    chunks = torch.unflatten(x, dim, (2 * size, -1))
    places = torch.tensor(chunk_order(size), device=x.device).argsort()
    return chunks.index_select(dim, places).flatten(dim, dim + 1)


def out_of_order(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """Lay a whole sequence out as ranks' pieces end to end: the inverse of `in_order`."""
    chunks = torch.unflatten(x, dim, (2 * size, -1))
    places = torch.tensor(chunk_order(size), device=x.device)
    return chunks.index_select(dim, places).flatten(dim, dim + 1)


def join_sequence(x: Tensor, mesh: MeshLike, dim: int = 1) -> Tensor:
    """Gather the ranks' chunks and put them in order; gradients are summed over ranks.

    The inverse of `cut_sequence`, with the same arguments.
    """
    axis = axis_of(mesh, "cp")
    if axis is None:
        return x
    return in_order(gather_from(x, axis.group, dim=dim, grad="reduce_scatter"), axis.size, dim)
