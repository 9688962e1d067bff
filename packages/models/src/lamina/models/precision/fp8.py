"""Numbers of eight bits: how a matrix becomes codes and scales, and the product of two such.

Scales are powers of two. Multiplying by one changes no digit, so a weight that was rounded to FP8
already (a gather of codes) is not rounded again, and results do not depend on the scale as long as
nothing overflows or falls among the subnormal numbers.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "BACKWARD",
    "FORWARD",
    "MULTIPLE",
    "Coded",
    "encode",
    "magnitude",
    "power_of_two",
    "scale_exponent",
    "scaled_product",
    "write_scaled_product",
]


FORWARD = torch.float8_e4m3fn
"""Of activations and weights: three bits of fraction, up to 448."""
BACKWARD = torch.float8_e5m2
"""Of gradients: two bits of fraction, up to 57,344."""
MULTIPLE = 16
"""What the widths of a product must be divisible by on CUDA."""


# torch 2.13 has the operator behind F.scaled_mm on CPUs; where a build has not, the older one's.
_OLDER_ON_CPU = not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


class Coded(NamedTuple):
    """A matrix in eight bits."""

    codes: Tensor
    """`[rows, columns]`, contiguous, float8."""
    decode: Tensor
    """float32, what codes are multiplied by: `[]` for all or `[rows, 1]`."""

    def transposed(self) -> Coded:
        """Copy to `[columns, rows]`; only where all codes share a scale."""
        return Coded(self.codes.t().contiguous(), self.decode)


def magnitude(x: Tensor, *, rows: bool = False) -> Tensor:
    """Largest absolute value in float32: `[]`, or `[rows, 1]` of each row."""
    infinity = float("inf")
    if rows:
        largest: Tensor = torch.linalg.vector_norm(x, ord=infinity, dim=1, keepdim=True)
    else:
        largest = torch.linalg.vector_norm(x, ord=infinity)
    return largest.float()


def scale_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponent of the largest power of two that amax can be multiplied by within `dtype`.

    Args:
        amax: float32, 0 or above, any shape.
        dtype: float8.

    Returns:
        int32, of the same shape, between -120 and 120; for 0 it is 120.
    """
    # A float32's bits are its exponent above its fraction, so the difference of two numbers' bits
    # borrows from the exponents' just where the quotient's mantissa is below one: an exact floor.
    limit = struct.unpack("<i", struct.pack("<f", torch.finfo(dtype).max))[0]
    exponent: Tensor = (limit - amax.view(torch.int32)) >> 23
    return exponent.clamp(-120, 120)


def power_of_two(exponent: Tensor) -> Tensor:
    """`2 ** exponent` in float32 for exponents -126 to 127; exact, as pow need not be."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode(x: Tensor, amax: Tensor, dtype: torch.dtype, *, saturate: bool = False) -> Coded:
    """Quantise a matrix, rounding to nearest even.

    Args:
        x: `[rows, columns]`.
        amax: float32 `[]` or `[rows, 1]`: decides the scale. Where it is infinite or NaN so is
            what is decoded: an overflow must show.
        dtype: float8.
        saturate: `amax` may be less than what is in `x` (delayed scaling): what is too large
            becomes the largest code.
    """
    exponent = scale_exponent(amax, dtype)
    scale = power_of_two(exponent)
    # Exact in bf16, which has float32's exponents; float16 has too few.
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
    """`left @ right.T` of decoded numbers, accumulated in float32.

    Args:
        left: `[rows, inner]`.
        right: `[columns, inner]`, with as many scales per row as `left`: one or all.
        dtype: of the result.
        fast_accumulation: let Hopper's tensor cores keep fewer digits of partial sums.
        into: `[rows, columns]` in `dtype`, what to write to; the kernel itself does where it
            can.

    Returns:
        `[rows, columns]` in `dtype`, or `into`.

    Raises:
        RuntimeError: on a GPU without FP8.
    """
    if not torch.compiler.is_compiling():
        require_float8(left.codes.device)
    rowwise = left.decode.ndim > 0
    kind = F.ScalingType.RowWise if rowwise else F.ScalingType.TensorWise
    out = dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
    if rowwise and left.codes.is_cuda:
        out = torch.bfloat16  # all that torch's rowwise kernel writes
    left, right = _padded(left, right)
    if into is not None and out == dtype:
        return _written(left, right, kind, into)
    if _OLDER_ON_CPU and not left.codes.is_cuda:
        product = _older_product(left, right, out)
    else:
        product = F.scaled_mm(
            left.codes, right.codes.t(), left.decode, kind, right.decode.t(), kind,
            output_dtype=out, use_fast_accum=fast_accumulation,
        )  # fmt: skip
    return product.to(dtype) if into is None else into.copy_(product)


def _older_product(
    left: Coded, right: Coded, out: torch.dtype, into: Tensor | None = None
) -> Tensor:
    product: Tensor = torch._scaled_mm(
        left.codes, right.codes.t(), left.decode, right.decode.t(), out_dtype=out, out=into
    )
    return product


def _written(left: Coded, right: Coded, kind: F.ScalingType, into: Tensor) -> Tensor:
    """`F.scaled_mm` has no `out`; the operator behind it has."""
    if _OLDER_ON_CPU and not left.codes.is_cuda:
        return _older_product(left, right, into.dtype, into)
    recipe = [kind.value]
    product: Tensor = torch._scaled_mm_v2(
        left.codes, right.codes.t(), [left.decode], recipe, [], [right.decode.t()], recipe, [],
        None, into.dtype, out=into,
    )  # fmt: skip
    return product


def write_scaled_product(left: Coded, right: Coded, total: Tensor, accumulate: bool) -> None:
    """`total = left @ right.T`, or `total += left @ right.T`.

    The kernels add to nothing, so a sum takes a temporary.
    """
    if accumulate:
        total.add_(scaled_product(left, right, total.dtype))
    else:
        scaled_product(left, right, total.dtype, into=total)


def _padded(left: Coded, right: Coded) -> tuple[Coded, Coded]:
    """Fill the inner dimension (tokens, in a weight's gradient) with zeros to what CUDA takes."""
    missing = -left.codes.shape[1] % MULTIPLE
    if not missing or not left.codes.is_cuda:
        return left, right
    # The bits of zero are zeros; torch.nn.functional.pad knows no float8.
    widened = [
        Coded(F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype), decode)
        for codes, decode in (left, right)
    ]
    return widened[0], widened[1]


@functools.cache
def require_float8(device: torch.device) -> None:
    """Raise RuntimeError on a GPU whose tensor cores know no FP8."""
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
