"""The sum of a reduce-scatter: one function, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .handles import Statistics
from .reference import reference_sum

__all__ = ["sum_chunks"]


def sum_chunks(
    chunks: Sequence[torch.Tensor],
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    statistics: Statistics | None = None,
) -> None:
    """Sum `chunks` into `output` in the fixed tree and fill in `statistics`."""
    squared_norm, nonfinite = reference_sum(chunks, output, factor, accumulate)
    if statistics is not None:
        statistics.squared_norm.copy_(squared_norm)
        statistics.nonfinite.copy_(nonfinite)
