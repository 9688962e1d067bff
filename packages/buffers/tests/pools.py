"""Pools to test with."""

from __future__ import annotations

import torch

from lamina.buffers import StoragePool
from lamina.buffers.engine import conflict_graph


def pool_of(keys="abcd", numel=100, **options):
    pool = StoragePool(**options)
    for key in keys:
        pool.register(key, numel, torch.float32)
    return pool


def slotted(keys="abcd", **options):
    pool = pool_of(keys, mode="slots", **options)
    pool.plan_slots(conflict_graph(keys))
    return pool
