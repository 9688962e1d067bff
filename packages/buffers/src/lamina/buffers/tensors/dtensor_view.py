"""A span as a torch DTensor, where the two cuts agree.

Note [DTensor's rows are torch.chunk's]
DTensor takes a dimension to be cut as torch.chunk cuts it. For other rows its `full_tensor()`
aborts or returns wrong values without an error. So every rank's rows are compared with
torch.chunk's before a DTensor is made.
"""

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lamina.buffers.compat import strided_shard
from lamina.buffers.placement import Cut
from lamina.buffers.tensors.span_tensor import SpanSpec


def to_dtensor(
    local: torch.Tensor, spec: SpanSpec, mesh: DeviceMesh, tp_placements: Sequence[Placement] = ()
) -> DTensor:
    """Wrap a span as a DTensor of the whole tensor's shape: `ShardedTensor.to_dtensor`.

    With `tp_placements` the span's tensor is what one tp rank holds, equal in shape on all of them.
    The tp dimensions cut first, then the data-parallel ones from the inside out, as torch's own
    FSDP2 over tensor parallelism does.

    NotImplementedError: the rows of some rank are not those of torch.chunk. ValueError: the mesh
    does not have those dimensions.
    """
    tp = tuple(tp_placements)
    if mesh.ndim != len(spec.axes) + len(tp):
        raise ValueError(
            f"to_dtensor: a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names} for "
            f"{len(spec.axes)} data-parallel axes ({spec.where()}) and {len(tp)} tp placements"
        )
    sizes = tuple(mesh.size(dim) for dim in range(len(spec.axes)))
    if sizes != tuple(axis.size for axis in spec.axes):
        raise ValueError(f"to_dtensor: mesh sizes {sizes} differ from those of {spec.where()}")
    tp_sizes = tuple(mesh.size(len(sizes) + at) for at in range(len(tp)))
    # See Note [DTensor's rows are torch.chunk's].
    rows = _check_chunks(spec, sizes)
    shape = list(spec.shape)
    # Ways in which tp has cut the rows before data parallelism did.
    first = 1
    for placement, size in zip(tp, tp_sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
            first *= size if placement.dim % max(len(shape), 1) == 0 else 1
    placements = [*_row_placements(spec, sizes, first), *tp]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.view(rows, *spec.shape[1:]) if spec.shape else local.view(()),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _row_placements(spec: SpanSpec, sizes: Sequence[int], first: int) -> list[Placement]:
    """Placements of the data-parallel axes; `first`: ways in which tp has cut the rows already."""
    placements: list[Placement] = []
    for at, size in enumerate(sizes):
        if size == 1:
            placements.append(Replicate())
            continue
        # Inner axes and tp have cut before this one.
        earlier = first * math.prod(sizes[at + 1 :])
        if earlier == 1:
            placements.append(Shard(0))
            continue
        if spec.shape[0] % math.prod(sizes):
            raise NotImplementedError(
                f"to_dtensor: {spec.shape[0]} rows over {tuple(sizes)} ranks are cut unevenly "
                "after another axis, which DTensor gets wrong: keep the ShardedTensor"
            )
        placements.append(strided_shard(0, split_factor=earlier))
    return placements


def _check_chunks(spec: SpanSpec, sizes: Sequence[int]) -> int:
    """Compare every rank's span with torch.chunk's rows; return this rank's number of rows."""
    if not spec.is_cut:
        return spec.shape[0] if spec.shape else 1
    inner = math.prod(spec.shape[1:])
    cut = Cut(tuple(sizes), (True,) * len(sizes))
    mine = tuple(axis.rank for axis in spec.axes)
    # Where other ranks' spans are known they are compared as well: a DTensor that is right on this
    # rank only would hang or mix rows elsewhere.
    known = [(spec.start, spec.stop)] if spec.extents is None else list(spec.extents())
    pieces = [cut.piece(mine)] if spec.extents is None else list(cut.pieces_by_rank())
    for piece, (start, stop) in zip(pieces, known, strict=True):
        low, high = _chunk_rows(spec.shape[0] if spec.shape else 1, piece, sizes)
        if spec.shape == () or (start, stop) != (low * inner, high * inner):
            raise NotImplementedError(
                f"to_dtensor: piece {piece} of shape {list(spec.shape)} over {tuple(sizes)} ranks "
                f"is elements {start}..{stop}, torch.chunk's is rows {low}..{high} "
                f"({low * inner}..{high * inner}): a DTensor would be silently wrong. Keep the "
                "ShardedTensor (DCP takes it), or use .full_tensor()"
            )
    return spec.local_numel // inner if inner else spec.shape[0]


def _chunk_rows(rows: int, piece: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Rows of a piece when torch.chunk cuts for the innermost axis, then for each outer one."""
    low, high = 0, rows
    below = math.prod(sizes)
    for size in reversed(sizes):
        below //= size
        place = piece // below
        piece %= below
        each = -(-(high - low) // size)
        low, high = min(low + place * each, high), min(low + (place + 1) * each, high)
    return low, high
