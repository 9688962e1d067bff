"""The sum of a reduce-scatter: one function, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .fused_cpu import fused_sum
from .reference import reference_sum

if TYPE_CHECKING:
    import torch

    from .handles import Statistics
    from .swap import Chunk

__all__ = ["sum_chunks"]


def sum_chunks(
    chunks: Sequence[Chunk],
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    statistics: Statistics | None = None,
) -> None:
    """Sum `chunks` into `output` in the fixed tree and fill in `statistics`.

    All implementations give the same bits: Triton on CUDA, blocks of torch operations on CPU.
    """
    if output.device.type == "meta":
        return
    if output.device.type == "cpu":
        found = fused_sum(chunks, output, factor, accumulate, statistics is not None)
    else:
        found = reference_sum(chunks, output, factor, accumulate)
    if statistics is not None and found is not None:
        statistics.squared_norm.copy_(found[0])
        statistics.nonfinite.copy_(found[1])
