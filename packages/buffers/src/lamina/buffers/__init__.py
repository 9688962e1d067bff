"""Contiguous parameter and gradient buffers for PyTorch: layouts, placements, storage pools."""

from .axes import Axis, PlainAxis, resolve_axes
from .boxes import Box, boxes_of_span
from .casting import cast_in_place
from .flat_buffer import FlatBuffer
from .granularity import Granularity, TensorSpec
from .guard import SavedTensorGuard
from .layout import BufferLayout, Span
from .padding import PaddingReport, padding_report, split_by_row
from .placement import Partial, Placement, Placements, Replicate, Shard
from .pool import PoolExhaustedError, StaleStorageError, StoragePool
from .region import Region, RegionBox, Run
from .sharded_tensor import ShardedTensor
from .slots import SlotPlan, color_slots, conflict_graph
from .span_spec import SpanCommunicator, SpanSpec
from .tensor_part import TensorPart
from .tying import CollectedSpecs, collect_specs

__all__ = [
    "Axis",
    "Box",
    "BufferLayout",
    "CollectedSpecs",
    "FlatBuffer",
    "Granularity",
    "PaddingReport",
    "Partial",
    "Placement",
    "Placements",
    "PlainAxis",
    "PoolExhaustedError",
    "Region",
    "RegionBox",
    "Replicate",
    "Run",
    "SavedTensorGuard",
    "Shard",
    "ShardedTensor",
    "SlotPlan",
    "Span",
    "SpanCommunicator",
    "SpanSpec",
    "StaleStorageError",
    "StoragePool",
    "TensorPart",
    "TensorSpec",
    "boxes_of_span",
    "cast_in_place",
    "collect_specs",
    "color_slots",
    "conflict_graph",
    "padding_report",
    "resolve_axes",
    "split_by_row",
]
