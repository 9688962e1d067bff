"""FP8: quantising a matrix to codes and scales, products of codes, and the codec of gathers.

Scales are powers of two, and multiplying by a power of two changes no digit. So a weight that was
rounded to FP8 before, by a gather of codes, is not rounded again. Results do not depend on the
scale unless numbers overflow or become subnormal (decision 0660).
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models.compat import HAS_SCALED_MM_V2_ON_CPU, scaled_mm, scaled_mm_v2

FORWARD = torch.float8_e4m3fn
"""The dtype of activations and weights: three bits of fraction, up to 448."""
BACKWARD = torch.float8_e5m2
"""The dtype of gradients: two bits of fraction, up to 57,344."""
MULTIPLE = 16
"""The widths of a product must be divisible by this on CUDA."""

_OLDER_ON_CPU = not HAS_SCALED_MM_V2_ON_CPU
_TENSORWISE, _ROWWISE = F.ScalingType.TensorWise.value, F.ScalingType.RowWise.value


class Coded(NamedTuple):
    """A matrix in FP8."""

    codes: Tensor
    """`[rows, columns]`, contiguous, float8."""
    decode: Tensor
    """float32, the factor of the codes: `[]` for all, or `[rows, 1]`."""

    def transposed(self) -> Coded:
        """Copy to `[columns, rows]`; only if all codes share a scale."""
        return Coded(self.codes.t().contiguous(), self.decode)


def magnitude(x: Tensor, *, rows: bool = False) -> Tensor:
    """Largest absolute value in float32: `[]`, or `[rows, 1]` of each row."""
    dim = 1 if rows else None
    largest: Tensor = torch.linalg.vector_norm(x, ord=float("inf"), dim=dim, keepdim=rows)
    return largest.float()


def scale_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponent of the largest power of two that amax can be multiplied by within `dtype`.

    `amax` is float32, 0 or above, of any shape. The result is int32 between -120 and 120; for 0 it
    is 120.
    """
    # The bits of a positive float32 are its exponent followed by its fraction. If the fraction of
    # the limit is below that of amax, the difference of the bits borrows from the exponent, which
    # rounds the quotient's exponent down. So this is the exact floor of the logarithm.
    limit = struct.unpack("<i", struct.pack("<f", torch.finfo(dtype).max))[0]
    exponent: Tensor = (limit - amax.view(torch.int32)) >> 23
    return exponent.clamp(-120, 120)


def power_of_two(exponent: Tensor) -> Tensor:
    """`2 ** exponent` in float32 for exponents -126 to 127; exact, which pow need not be."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode(x: Tensor, amax: Tensor, dtype: torch.dtype, *, saturate: bool = False) -> Coded:
    """Quantise a matrix `[rows, columns]`, rounding to nearest even.

    `amax`, float32 `[]` or `[rows, 1]`, decides the scale. If it is infinite or NaN, the decoded
    numbers are NaN, so that an overflow is visible. With `saturate` it may be below the largest
    magnitude of `x` (delayed scaling), and numbers that are too large become the largest code.
    """
    exponent = scale_exponent(amax, dtype)
    scale = power_of_two(exponent)
    # This is exact in bf16, which has float32's range of exponents; float16 has a smaller one.
    wide = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
    scaled = wide * scale.to(wide.dtype)
    if saturate:
        limit = torch.finfo(dtype).max
        scaled = scaled.clamp_(-limit, limit)
    decode = torch.where(torch.isfinite(amax), power_of_two(-exponent), torch.nan)
    return Coded(scaled.to(dtype).contiguous(), decode)


def scaled_product(
    left: Coded,
    right: Coded,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
    into: Tensor | None = None,
) -> Tensor:
    """`left @ right.T` of decoded numbers, accumulated in float32; RuntimeError on older GPUs.

    Both have as many scales per row: one, or one for all. `fast_accumulation` allows Hopper's
    tensor cores to keep fewer digits of partial sums. `into` `[rows, columns]` in `dtype` receives
    the result, without a temporary if the kernel supports it.
    """
    if not torch.compiler.is_compiling():
        require_float8(left.codes.device)
    rowwise = left.decode.ndim > 0
    out = dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
    if rowwise and left.codes.is_cuda:
        out = torch.bfloat16  # the only dtype that torch's rowwise kernel writes
    left, right = _padded(left, right)
    target = into if out == dtype else None
    codes, scales = (left.codes, right.codes.t()), (left.decode, right.decode.t())
    if _OLDER_ON_CPU and not left.codes.is_cuda:
        if rowwise:  # in torch 2.11 it has no scales for rows
            unscaled = scales[0].new_ones(())
            product: Tensor = scaled_mm(*codes, unscaled, unscaled, out_dtype=torch.float32)
            product, target = product.mul_(scales[0]).mul_(scales[1]).to(out), None
        else:
            product = scaled_mm(*codes, *scales, out_dtype=out, out=target)
    else:
        # The operator behind F.scaled_mm, which has no `out` and which torch 2.12 cannot compile.
        recipe = [_ROWWISE if rowwise else _TENSORWISE]
        options: Any = {} if target is None else {"out": target}
        left_scale, right_scale = [scales[0]], [scales[1]]
        product = scaled_mm_v2(
            *codes, left_scale, recipe, [], right_scale, recipe, [], None, out, [],
            fast_accumulation, **options,
        )  # fmt: skip
    if into is None:
        return product.to(dtype)
    return product if target is not None else into.copy_(product)


def _padded(left: Coded, right: Coded) -> tuple[Coded, Coded]:
    """Pad the inner dimension with zeros to the multiple that CUDA needs."""
    missing = -left.codes.shape[1] % MULTIPLE
    if not missing or not left.codes.is_cuda:
        return left, right
    # Padded as bytes, as torch.nn.functional.pad has no float8 and the bits of zero are zeros.
    widened = [
        Coded(F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype), decode)
        for codes, decode in (left, right)
    ]
    return widened[0], widened[1]


@functools.cache
def require_float8(device: torch.device) -> None:
    """Raise RuntimeError on a GPU without FP8 tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"backend 'torch-fp8' on {device} ({name}, compute capability "
            f"{capability[0]}.{capability[1]}): FP8 products need 8.9 or above; use "
            "Precision(backend='torch')"
        )


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

    Examples:
        >>> codec = Float8Codec(block=128)
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
