"""Cutting sequences over context-parallel ranks, in zigzag order.

Under a causal mask late tokens attend to more keys than early tokens do. To balance the work, a
sequence is cut into twice as many chunks as there are ranks, and rank r of n holds chunks r and
2n - 1 - r, an early and a late one (Brandon et al., Striped Attention, 2023; Llama 3, 2024).
"""

import torch
from torch import Tensor

from lamina.collectives import gather_from
from lamina.mesh.engine import MeshAxis
from lamina.models.base.mesh_axes import MeshLike, axis_of


def check_divisible(length: int, axis: MeshAxis | None) -> None:
    """Raise ValueError unless each rank of an axis can have two chunks of the sequence."""
    chunks = 1 if axis is None else 2 * axis.size
    if axis is not None and length % chunks:
        raise ValueError(
            f"sequence of {length} tokens is not divisible by {chunks}, twice {axis.name} "
            f"{axis.size} (remainder {length % chunks}): pad or cut the sequence"
        )


def cut_sequence(x: Tensor, mesh: MeshLike, dim: int = 1) -> Tensor:
    """Take this rank's two chunks of a sequence, in order.

    Args:
        x: the whole sequence along `dim`.
        mesh: has an axis `cp`, or is that axis; None keeps the whole.
        dim: the sequence's dimension.

    Raises:
        ValueError: if the sequence is not divisible by twice the number of ranks.
    """
    axis = axis_of(mesh, "cp")
    if axis is None:
        return x
    check_divisible(x.shape[dim], axis)
    chunks = 2 * axis.size
    parts = x.chunk(chunks, dim=dim)
    return torch.cat((parts[axis.rank], parts[chunks - 1 - axis.rank]), dim=dim)


def in_order(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """Reorder the concatenated pieces of the ranks along `dim` into the sequence's order."""
    # Computed on the device: copying a list of numbers to it would make the host wait.
    chunk = torch.arange(2 * size, device=x.device)
    return _take(x, torch.where(chunk < size, 2 * chunk, 4 * size - 1 - 2 * chunk), dim)


def out_of_order(x: Tensor, size: int, dim: int = 1) -> Tensor:
    """Reorder a sequence into the concatenated pieces of the ranks: the inverse of `in_order`."""
    slot = torch.arange(2 * size, device=x.device)
    return _take(x, torch.where(slot % 2 == 0, slot // 2, 2 * size - 1 - slot // 2), dim)


def _take(x: Tensor, chunks: Tensor, dim: int) -> Tensor:
    """Cut `dim` into equal chunks and concatenate those of these numbers."""
    cut = torch.unflatten(x, dim, (chunks.numel(), -1))
    return cut.index_select(dim, chunks).flatten(dim, dim + 1)


def join_sequence(x: Tensor, mesh: MeshLike, dim: int = 1) -> Tensor:
    """Gather the ranks' chunks and put them in order; gradients are summed over ranks.

    The inverse of `cut_sequence`, with the same arguments.
    """
    axis = axis_of(mesh, "cp")
    if axis is None:
        return x
    return in_order(gather_from(x, axis.group, dim=dim, grad="reduce_scatter"), axis.size, dim)
