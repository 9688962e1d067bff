"""Tensors as every rank's spans of them, all in one process, and put together again."""

from __future__ import annotations

import itertools

import torch

from lamina.buffers import BufferLayout, FlatBuffer, Shard, TensorSpec
from lamina.buffers.engine import PlainAxis

SHAPES = {"matrix": (13, 8), "scalar": (), "empty": (0, 3), "vector": (17,), "cube": (5, 3, 4)}
WORLDS = (1, 3)


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spans(full, world, dtype=torch.float32):
    """Every rank's spans of every tensor: [{name: ShardedTensor}, ...]."""
    specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in full.items()]
    layout = BufferLayout.plan(specs, world, alignment=4)
    found = []
    for rank in range(world):
        buffer = FlatBuffer(layout, Shard(), dtype, mesh=PlainAxis("dp", world, rank))
        buffer.load_all(full)
        found.append(buffer.sharded())
    return found


def pasted(parts):
    """Oracle: the whole, put together from the ranks' spans."""
    whole = torch.cat([part.to_local() for part in parts])
    assert all(left.stop == right.start for left, right in itertools.pairwise(parts))
    return whole.view(parts[0].shape)
