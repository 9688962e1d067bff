"""One whole tensor from parts that lie on the ranks in any way, in the memory of one tensor.

A tensor's own `full_tensor()` gathers pieces padded to the longest, and a flat shard may hold all
of a small tensor: on many ranks that is many times its size. Here each rank writes its boxes into
an otherwise empty tensor, and the backend sums these in place. Adding -0.0 changes no number, not
even a zero's sign, so the sum has the parts' bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lamina.checkpoint.together import Ranks
from lamina.collectives import all_reduce_native, all_reduce_small

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def whole_tensor(name: str, part: Tensor, ranks: Ranks) -> Tensor:
    """Return the whole of a tensor, at least on the first rank (collective).

    Args:
        name: for messages.
        part: this rank's: a plain tensor is whole on every rank; a `ShardedTensor`, `TensorPart` or
            DTensor holds boxes.
        ranks: all that hold a part.

    """
    chunks = getattr(part, "__create_chunk_list__", None)
    if chunks is None:
        return part
    mine = [_box(chunk) for chunk in chunks() if chunk.sizes.numel() or not part.numel()]
    owners = _owners(mine, part.shape, ranks)
    if all(owner == 0 for owner in owners.values()):
        ranks_needed = False  # the first rank holds all of it
    elif part.is_floating_point() and part.dtype.itemsize > 1:
        ranks_needed = True
    else:
        full: Tensor = part.full_tensor()  # type: ignore[attr-defined]
        return full
    whole = torch.full(part.shape, -0.0, dtype=part.dtype, device=part.device)
    for box in mine:
        if owners[box] == ranks.rank:
            view = part.__get_tensor_shard__(MetadataIndex(name, torch.Size(box[0])))  # type: ignore[attr-defined]
            narrow(whole, *box).copy_(view.detach())
    if ranks_needed:
        flat = whole.view(-1)
        all_reduce_native(flat, flat, ranks.group, statistics=False).wait()
    return whole


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _owners(mine: list[Box], shape: torch.Size, ranks: Ranks) -> dict[Box, int]:
    """Return, for this rank's boxes and all others, the lowest rank that holds each."""
    dims = len(shape)
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = len(mine)
    all_reduce_small([counts], ranks.group, op="max")
    table = torch.full((ranks.size, int(counts.max()), 2, max(1, dims)), -1, dtype=torch.int64)
    for number, (offsets, sizes) in enumerate(mine):
        if dims:
            table[ranks.rank, number] = torch.tensor([offsets, sizes], dtype=torch.int64)
    all_reduce_small([table], ranks.group, op="max")
    owners: dict[Box, int] = {}
    for rank, (boxes, count) in enumerate(zip(table.tolist(), counts.tolist(), strict=True)):
        for offsets, sizes in boxes[:count]:
            owners.setdefault((tuple(offsets[:dims]), tuple(sizes[:dims])), rank)
    covered = sum(math.prod(sizes) for _, sizes in owners)
    if covered != math.prod(shape):
        raise RuntimeError(f"the ranks hold {covered} of {math.prod(shape)} elements: {owners}")
    return owners


def narrow(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a box of a tensor as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor
