"""Lamina's test bed: multi-rank tests, meters, delay injection and oracles.

Importing this package imports no torch, because the pytest plugin lives in it; the names that
need torch are loaded on first use.
"""

from __future__ import annotations

from lamina_testing.ranks import Ranks

__all__ = ["Ranks"]
