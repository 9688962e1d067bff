"""Pools to test with, and who is live together in a run."""

from __future__ import annotations

import torch

from lamina.buffers import StoragePool


def live_sets(order, prefetch=1, nesting=None):
    """Walk through a run and yield who is live at every step.

    `nesting` maps a child to the unit around it, which stays live while the child runs.
    """
    nesting = nesting or {}
    for place, key in enumerate(order):
        live = set(order[place : place + 1 + prefetch])
        while key in nesting:
            key = nesting[key]
            live.add(key)
        yield live


def conflicts_of(order, prefetch=1, nesting=None):
    """Return for every key those that it is live with."""
    graph = {key: set() for key in order}
    for live in live_sets(order, prefetch, nesting):
        for key in live:
            graph.setdefault(key, set()).update(live - {key})
    return graph


def pool_of(keys="abcd", numel=100, **options):
    pool = StoragePool(**options)
    for key in keys:
        pool.register(key, numel, torch.float32)
    return pool


def slotted(keys="abcd", **options):
    pool = pool_of(keys, mode="slots", **options)
    pool.plan_slots(conflicts_of(keys))
    return pool


def address(pool, key):
    """Where the key's memory lies: equal for keys that share a slot."""
    return pool.tensor(key).untyped_storage()._cdata


def has_own_block(pool, key):
    """Whether the key has storage of its own, and no slot."""
    return f"  own: {key!r} " in pool.describe()
