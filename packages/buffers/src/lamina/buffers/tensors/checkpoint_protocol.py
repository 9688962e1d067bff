"""torch.distributed.checkpoint's protocol for spans: boxes from the layout, no collectives.

DCP stores boxes (offsets and sizes). A span is a few boxes (`boxes_of_span`), each of them a
contiguous run of the span, so nothing is copied to write one or to read one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lamina.buffers.layout.boxes import Box, boxes_of_span
from lamina.buffers.tensors.span_spec import SpanSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["chunk_list", "items_of_chunks", "tensor_shard", "write_items"]


def _boxes(spec: SpanSpec) -> tuple[Box, ...]:
    if not spec.numel and spec.start == spec.stop:
        # A tensor without elements still has a name and a shape to store: one box, from every rank.
        return (Box((0,) * len(spec.shape), tuple(spec.shape), 0),)
    return boxes_of_span(spec.shape, spec.start, spec.stop)


def chunk_list(spec: SpanSpec) -> list[ChunkStorageMetadata]:
    """The boxes of this rank's span."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in _boxes(spec)
    ]


def write_items(fqn: str, local: torch.Tensor, spec: SpanSpec) -> list[WriteItem]:
    """One item per box. Replicas give equal items; DCP's planner drops all but one of them."""
    return items_of_chunks(fqn, chunk_list(spec), local, spec.shape)


def items_of_chunks(
    fqn: str, chunks: Sequence[ChunkStorageMetadata], local: torch.Tensor, shape: torch.Size
) -> list[WriteItem]:
    """Items that write boxes of a tensor of `shape` whose elements lie in `local`."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunks
    ]


def tensor_shard(index: MetadataIndex, local: torch.Tensor, spec: SpanSpec) -> torch.Tensor:
    """The box at `index.offset` as a view of the span.

    Raises:
        ValueError: this rank holds no box that starts there.
    """
    for box in _boxes(spec):
        if index.offset is None or torch.Size(box.offsets) == index.offset:
            return local[box.start : box.start + box.numel].view(box.sizes)
    raise ValueError(
        f"{index.fqn}: no box of span {spec.start}..{spec.stop} of shape {list(spec.shape)} starts "
        f"at {index.offset} ({spec.where()})"
    )
