"""The sum of a reduce-scatter: one function, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lamina.collectives.reduction.cpu_sum import fused_sum
from lamina.collectives.reduction.reference import reference_sum, sum_dtype

if TYPE_CHECKING:
    from lamina.collectives.call.handles import Statistics
    from lamina.collectives.transport.gloo_exchange import Chunk
    from lamina.collectives.transport.scratch_pool import SumBuffers

__all__ = ["sum_chunks"]


def sum_chunks(
    chunks: Sequence[Chunk],
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    statistics: Statistics | None = None,
    buffers: SumBuffers | None = None,
) -> None:
    """Sum `chunks` into `output` in the fixed tree and fill in `statistics`.

    All implementations give the same bits: Triton on CUDA, blocks of torch operations on CPU,
    which may use `buffers` kept from an earlier sum.
    """
    if output.device.type == "meta":
        return
    if output.device.type == "cpu":
        found = fused_sum(chunks, output, factor, accumulate, statistics is not None, buffers)
        if statistics is not None and found is not None:
            statistics.squared_norm.copy_(found[0])
            statistics.nonfinite.copy_(found[1])
        return
    tensors = [chunk for chunk in chunks if isinstance(chunk, torch.Tensor)]
    if sum_dtype(tensors[0].dtype) == torch.float64:
        _sum_in_float64(tensors, output, factor, accumulate, statistics)
        return
    wanted = None if statistics is None else (statistics.squared_norm, statistics.nonfinite)
    _triton_sum()(tensors, output, factor, accumulate, wanted)


def _sum_in_float64(
    chunks: list[torch.Tensor],
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    statistics: Statistics | None,
) -> None:
    """float64 on a GPU serves comparisons, not training: plain operations are fast enough."""
    squared_norm, nonfinite = reference_sum(chunks, output, factor, accumulate)
    if statistics is not None:
        statistics.squared_norm.copy_(squared_norm)
        statistics.nonfinite.copy_(nonfinite)


def _triton_sum() -> Callable[..., None]:
    """Import the kernel when it is first needed: CPU users need not have Triton.

    Raises:
        ImportError: it is missing.
    """
    try:
        from lamina.collectives.reduction.triton_sum import fused_sum as triton_fused_sum
    except ImportError as error:
        raise ImportError(
            "sums of gradients on a GPU need Triton, which could not be imported; install "
            "`lamina-collectives[triton]` (CUDA builds of torch bring it along)"
        ) from error
    return triton_fused_sum
