"""Lamina's test bed: multi-rank tests, meters, delay injection and oracles.

Importing this package imports no torch, because the pytest plugin lives in it; the names that
need torch are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lamina_testing.ranks import Ranks, device_type

if TYPE_CHECKING:
    from lamina_testing import oracles
    from lamina_testing.delays import delayed_collectives
    from lamina_testing.meter import Meter, bytes_at_rest, live_bytes, live_storages, not_freed
    from lamina_testing.oracles import bit_oracle, whole_batch_oracle

__all__ = [
    "Meter",
    "Ranks",
    "bit_oracle",
    "bytes_at_rest",
    "delayed_collectives",
    "device_type",
    "live_bytes",
    "live_storages",
    "not_freed",
    "oracles",
    "whole_batch_oracle",
]

_HOME = {
    "Meter": "meter",
    "bytes_at_rest": "meter",
    "live_bytes": "meter",
    "live_storages": "meter",
    "not_freed": "meter",
    "bit_oracle": "oracles",
    "whole_batch_oracle": "oracles",
    "delayed_collectives": "delays",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"lamina_testing.{_HOME[name]}"), name)
    if name == "oracles":
        return importlib.import_module("lamina_testing.oracles")
    raise AttributeError(f"module 'lamina_testing' has no attribute {name!r}")
