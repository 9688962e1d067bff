"""The codec by which `fully_shard` keeps and gathers weights in FP8."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.models.precision.fp8 import FORWARD, magnitude, power_of_two, scale_exponent

__all__ = ["Float8Codec"]

_BIAS = 127
_NAN = 255


@dataclass(frozen=True)
class Float8Codec:
    """A `lamina.fsdp.WeightCodec`: e4m3 codes, and a power of two per block of elements.

    The exponent of a block is one byte, as in the OCP microscaling format's e8m0, so a weight takes
    `1 + 1/block` bytes. Decoded weights are exact in bf16. An FP8 product quantises them again
    without rounding, unless they are below 2^-13 of the largest of their tensor.

    Args:
        block: elements that share a scale; a divisor of 128.
    """

    block: int = 128
    dtype: torch.dtype = FORWARD
    side_dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        if self.block < 1 or 128 % self.block:
            raise ValueError(f"block is {self.block}: it must be a divisor of 128")

    def encode(self, weights: Tensor, codes: Tensor, side: Tensor) -> None:
        """Write codes `[blocks, block]` and exponents uint8 `[blocks]` of weights."""
        amax = magnitude(weights, rows=True)
        exponent = scale_exponent(amax, self.dtype)
        codes.copy_(weights * power_of_two(exponent))
        biased = torch.where(torch.isfinite(amax), _BIAS - exponent, _NAN)
        side.copy_(biased.squeeze(1))

    def decode(self, codes: Tensor, side: Tensor, weights: Tensor) -> None:
        """Write weights `[blocks, block]` from codes and exponents."""
        exponent = side.to(torch.int32) - _BIAS
        scale = torch.where(side == _NAN, torch.nan, power_of_two(exponent))
        # Exact in bf16 and float32: the factors have few digits, and both have the same exponents.
        weights.copy_(codes)
        weights.mul_(scale.to(weights.dtype)[:, None])
