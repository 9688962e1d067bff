"""Gathers whole tensors, or pieces of them, from parts that lie on the ranks in any way.

A tensor's own `full_tensor()` gathers pieces padded to the longest, and a flat shard may hold all
of a small tensor: on many ranks that is many times its size. Here each rank writes its boxes into
an otherwise empty tensor, and the backend sums these in place. Adding -0.0 changes no number, not
even a zero's sign, so the sum has the parts' bits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from lamina.buffers.engine import narrowed
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.state.cut_tensors import is_cut
from lamina.collectives.engine import all_reduce_small, broadcast, reduction_class

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model, of which this rank holds all, boxes, or nothing.

    It is gathered on `device`. `everywhere` says that every rank holds something of it (with
    pipeline stages, not so). The name is for messages.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    everywhere: bool


def gathered(
    whole: Whole, part: Tensor | None, boxes: Sequence[Box], ranks: Ranks
) -> Iterator[Tensor]:
    """Yield boxes of a whole tensor, right at least on the first rank (collective).

    Each is made when it is asked for, in the memory of the one before if that has its shape: what
    is to be kept must be copied. The boxes are the same on all ranks. Of this rank's `part`, a
    plain tensor is whole on every rank that has it; a `ShardedTensor`, `TensorPart` or DTensor
    holds boxes; None is nothing.
    """
    if whole.everywhere and part is not None and not is_cut(part):
        yield from (narrowed(part, *box) for box in boxes)
        return
    views = {} if part is None else boxes_of(part)
    owners = _owners(list(views), whole.shape, ranks)
    alone = all(owner == 0 for owner in owners.values())  # the first rank holds all of it
    if not alone and not (whole.dtype.is_floating_point and whole.dtype.itemsize > 1):
        full = _broadcast(whole, part, min(owners.values()), ranks)
        yield from (narrowed(full, *box) for box in boxes)
        return
    mine = {box: view for box, view in views.items() if owners[box] == ranks.rank}
    # Copies of a tied weight on two stages may be cut at other places: the lowest rank's counts.
    lower = [box for box, owner in owners.items() if owner < ranks.rank]
    others = [common for box in mine for other in lower if (common := meet(box, other))]
    made: Tensor | None = None
    for box in boxes:
        if made is not None and made.shape != box[1]:
            made = None  # let go of before the next is made
        # Used again, for a backend may hold a tensor a moment longer than its collective takes.
        if made is None:
            made = torch.empty(box[1], dtype=whole.dtype, device=whole.device)
        _sum(made, box, mine, others, None if alone else ranks)
        yield made


def _sum(
    made: Tensor, box: Box, mine: dict[Box, Tensor], others: list[Box], ranks: Ranks | None
) -> None:
    """Fill in one box of the whole; `ranks` is None where nobody else is needed."""
    made.fill_(-0.0)
    for own_box, view in mine.items():
        if (common := meet(own_box, box)) is not None:
            narrowed(made, *_within(common, box)).copy_(narrowed(view, *_within(common, own_box)))
    for other in others:
        if (common := meet(other, box)) is not None:
            narrowed(made, *_within(common, box)).fill_(-0.0)
    if ranks is not None:
        flat = made.view(-1)
        total = reduction_class("native")(flat, flat, ranks.group, scatter=False)
        total.start(flat, flat, statistics=False).wait()


def _broadcast(whole: Whole, part: Tensor | None, source: int, ranks: Ranks) -> Tensor:
    """Whole tensors of dtypes that are not summed: from those that hold all, to the others."""
    if part is None:
        full = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
    else:
        full = part.full_tensor() if is_cut(part) else part  # type: ignore[attr-defined]
    if not whole.everywhere:
        full = full.contiguous()
        broadcast(full.view(torch.uint8) if full.ndim else full, ranks.group, src=source).wait()
    return full


def boxes_of(part: Tensor) -> dict[Box, Tensor]:
    """Return the boxes of the whole that a tensor holds, each as a view of its memory."""
    detached = part.detach()
    if not is_cut(part):
        return {((0,) * part.ndim, tuple(part.shape)): detached}
    views = {}
    for chunk in part.__create_chunk_list__():  # type: ignore[attr-defined]
        if chunk.sizes.numel() or not part.numel():
            box = tuple(chunk.offsets), tuple(chunk.sizes)
            view = part.__get_tensor_shard__(MetadataIndex("", chunk.offsets))  # type: ignore[attr-defined]
            views[box] = view.detach()
    return views


def _owners(mine: list[Box], shape: tuple[int, ...], ranks: Ranks) -> dict[Box, int]:
    """Return, for this rank's boxes and all others, the lowest rank that holds each."""
    dims = len(shape)
    counts = torch.zeros(ranks.size, dtype=torch.int64, device="cpu")
    counts[ranks.rank] = len(mine)
    all_reduce_small([counts], ranks.group, op="max")
    size = ranks.size, int(counts.max()), 2, max(1, dims)
    table = torch.full(size, -1, dtype=torch.int64, device="cpu")
    for number, (offsets, sizes) in enumerate(mine):
        if dims:
            table[ranks.rank, number] = torch.tensor(
                [offsets, sizes], dtype=torch.int64, device="cpu"
            )
    all_reduce_small([table], ranks.group, op="max")
    owners: dict[Box, int] = {}
    for rank, (boxes, count) in enumerate(zip(table.tolist(), counts.tolist(), strict=True)):
        for offsets, sizes in boxes[:count]:
            owners.setdefault((tuple(offsets[:dims]), tuple(sizes[:dims])), rank)
    covered = sum(math.prod(sizes) for _, sizes in owners)
    if covered < math.prod(shape):
        raise RuntimeError(f"the ranks hold {covered} of {math.prod(shape)} elements: {owners}")
    return owners


def meet(box: Box, other: Box) -> Box | None:
    """Return what two boxes have in common."""
    starts = tuple(map(max, box[0], other[0]))
    stops = (min(a + n, b + m) for a, n, b, m in zip(*box, *other, strict=True))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _within(box: Box, outer: Box) -> Box:
    """Return a box's place in a box around it."""
    return tuple(a - b for a, b in zip(box[0], outer[0], strict=True)), box[1]


def fill(part: Tensor, box: Box, values: Tensor) -> None:
    """Copy a box of a whole tensor into what a tensor, cut in any way, holds of it."""
    for own_box, view in boxes_of(part).items():
        if (common := meet(own_box, box)) is not None:
            narrowed(view, *_within(common, own_box)).copy_(narrowed(values, *_within(common, box)))
