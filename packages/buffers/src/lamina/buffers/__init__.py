"""Contiguous parameter and gradient buffers for PyTorch: layouts, placements, storage pools."""

from lamina.buffers.flat_buffer import FlatBuffer
from lamina.buffers.layout.granularity import Granularity, TensorSpec
from lamina.buffers.layout.layout import BufferLayout
from lamina.buffers.layout.padding import padding_report
from lamina.buffers.placement import Partial, Placements, Replicate, Shard
from lamina.buffers.pool.pool import StaleStorageError, StoragePool
from lamina.buffers.tensors.sharded_tensor import ShardedTensor

__all__ = [
    "BufferLayout",
    "FlatBuffer",
    "Granularity",
    "Partial",
    "Placements",
    "Replicate",
    "Shard",
    "ShardedTensor",
    "StaleStorageError",
    "StoragePool",
    "TensorSpec",
    "padding_report",
]
