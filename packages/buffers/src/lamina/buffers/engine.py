"""What the layers above build on: axes, spans, regions and the pieces of a storage pool."""

from lamina.buffers.layout.boxes import Box, boxes_of_span
from lamina.buffers.layout.layout import Span
from lamina.buffers.layout.padding import PaddingReport, split_by_row
from lamina.buffers.layout.tensor_region import RegionBox, Run, TensorRegion
from lamina.buffers.placement import Placement
from lamina.buffers.pool.pool import ScratchBuffers
from lamina.buffers.pool.saved_tensors import SavedTensor, SavedTensorGuard
from lamina.buffers.pool.slots import SlotPlan, color_slots
from lamina.buffers.resolve_axes import Axis, PlainAxis, resolve_axes
from lamina.buffers.tensors.span_moves import narrowed
from lamina.buffers.tensors.span_reductions import PNorm, pieces
from lamina.buffers.tensors.span_tensor import SpanCommunicator, SpanSpec
from lamina.buffers.tensors.tensor_part import TensorPart

__all__ = [
    "Axis",
    "Box",
    "PNorm",
    "PaddingReport",
    "Placement",
    "PlainAxis",
    "RegionBox",
    "Run",
    "SavedTensor",
    "SavedTensorGuard",
    "ScratchBuffers",
    "SlotPlan",
    "Span",
    "SpanCommunicator",
    "SpanSpec",
    "TensorPart",
    "TensorRegion",
    "boxes_of_span",
    "color_slots",
    "narrowed",
    "pieces",
    "resolve_axes",
    "split_by_row",
]
