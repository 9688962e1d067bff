"""The norm of `invariant=True`: squares are added as integers, so no order changes the sum.

Note [Squares by exponents]
An fp32 number is an integer m below 2^24 times a power of two. Numbers of one exponent have squares
that are integers m^2 times the same power, and integers are exact in any order. An int64 overflows
after 2^15 such squares. So the upper and the lower 24 bits of m^2 are added apart, which leaves
room for 2^39 elements. Ranks add these sums, which are 514 integers, in the message of the norm.
Only then does every rank round, and all of them round the same integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lamina.buffers.engine import PNorm, pieces
from lamina.ddp.inspect.inspection import HasGroups

_HALF = 24
"""Bits of a square that are added together."""
_BIAS = 150
"""An integer m of the biased exponent e stands for m * 2^(e - 150)."""
_INFINITE, _NAN = 255, 256
"""Places of what is not finite. Those before are biased exponents."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExactSquares(PNorm):
    """The 2-norm, with shares that are exact: int64, [2, 257], of halves and exponents."""

    order: float = 2.0

    def empty(self, device: torch.device) -> torch.Tensor:
        """The share of no elements: zeros."""
        return torch.zeros(2, _NAN + 1, dtype=torch.int64, device=device)

    def share(self, local: torch.Tensor) -> torch.Tensor:
        """The share of a plain tensor of any shape, in fp32, bf16 or fp16.

        ValueError: another dtype, of which the squares are not exact.
        """
        if local.dtype not in _NARROW:
            raise ValueError(
                f"clip_grad_norm of gradients in {local.dtype} under invariant=True: squares are "
                "exact for fp32, bf16 and fp16 alone; keep main weights in fp32, or wrap with "
                "reproducible=True"
            )
        total = self.empty(local.device)
        for run in pieces(local.detach().reshape(-1)):
            bits = run.float().view(torch.int32) & 0x7FFFFFFF
            exponents = bits >> 23
            # Normal numbers have a bit that is not stored. The others have the exponent of 1.
            integers = (bits & 0x7FFFFF) | ((exponents > 0).int() << 23)
            places = exponents.clamp_(min=1) + run.isnan()
            squares = integers.long().square_()
            total[0].index_add_(0, places, squares >> _HALF)
            total[1].index_add_(0, places, squares & ((1 << _HALF) - 1))
        return total

    def root(self, total: torch.Tensor) -> torch.Tensor:
        """The norm of the share of everything: fp64, the same bits for the same integers."""
        upper, lower = total.double()
        exponents = torch.arange(_INFINITE, device=total.device)
        # 2^(2(e - 150)), from the bits of an fp64 number: exponential functions may round.
        powers = (1023 + 2 * (exponents - _BIAS) << 52).view(torch.float64)
        sums = upper * 2**_HALF + lower
        norm = (sums[:_INFINITE] * powers).sum().sqrt()
        norm = torch.where(total[0, _INFINITE] > 0, torch.inf, norm)
        return torch.where(total[0, _NAN] > 0, torch.nan, norm)


def norm_of(items: Sequence[nn.Module | torch.Tensor], order: float) -> PNorm:
    """How the norm is added: exactly, if these modules were wrapped with `invariant=True`."""
    wrapped = (item for item in items if isinstance(item, HasGroups))
    groups = (group for item in wrapped for group in item.parameter_groups())
    exact = order == 2 and any(group.settings.exact_norm for group in groups)
    return ExactSquares() if exact else PNorm(order)
