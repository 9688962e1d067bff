"""The plain reference of the sum: every rounding written out as one torch operation.

Used by tests as the definition; far too slow and too hungry for training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["reference_sum", "sum_dtype"]


def sum_dtype(wire: torch.dtype) -> torch.dtype:
    """Dtype in which chunks of a wire dtype are summed: float64 for float64, else float32."""
    return torch.float64 if wire == torch.float64 else torch.float32


def _tree(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(chunks) == 1:
        return chunks[0]
    split = 1 << (len(chunks) - 1).bit_length() - 1
    return torch.add(_tree(chunks[:split]), _tree(chunks[split:]))


def reference_sum(
    chunks: Sequence[torch.Tensor],
    output: torch.Tensor,
    factor: float | None = None,
    accumulate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `chunks` in the fixed pairwise tree into `output`.

    Args:
        chunks: one per rank, in rank order, all of one dtype and of `output`'s shape.
        output: overwritten, or added to.
        factor: multiplies the sum, rounded to the dtype of the sum.
        accumulate: add to `output` instead of overwriting it.

    Returns:
        Squared norm (float64) and non-finite flag of the stored output, both without dimensions.
    """
    dtype = sum_dtype(chunks[0].dtype)
    total = _tree([chunk.to(dtype) for chunk in chunks])
    if factor is not None:
        total = torch.mul(total, torch.tensor(factor, dtype=dtype, device=total.device))
    if accumulate:
        total = torch.add(output.to(dtype), total)
    output.copy_(total)
    stored = output.to(torch.float64)
    return stored.square().sum(), output.isfinite().all().logical_not()
