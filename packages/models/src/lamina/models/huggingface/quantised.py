"""Hugging Face's weights that are codes with scales: what they are as numbers.

Two formats are read: blockwise FP8 (DeepSeek-V3: `weight` in float8 and `weight_scale_inv`, one
float32 factor for each 128 x 128 elements) and MXFP4 (GPT-OSS: `..._blocks`, two codes of four bits
in a byte, and `..._scales`, one power of two for each 32 elements; OCP Microscaling Formats 1.0).
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns that share a factor of FP8."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; 8 to 15 are their negatives."""


def coded_weights(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Of each quantised weight the names of its codes and scales, by the weight's own name."""
    weights = {}
    for name in names:
        if name.endswith("_scale_inv") and (codes := name.removesuffix("_scale_inv")) in names:
            weights[codes] = codes, name
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in names:
            weight = name.removesuffix("_scales")
            weights[weight] = f"{weight}_blocks", name
    return weights


def dequantised(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 numbers of a weight, in the shape that unquantised files give it.

    Codes of FP8 are `[rows, columns]`, with scales `[rows / 128, columns / 128]` rounded up. Codes
    of MXFP4 are uint8 `[experts, rows, groups, 16]` with scales `[experts, rows, groups]`, and the
    weight is `[experts, 32 groups, rows]`: GPT-OSS multiplies by it from the right.

    ValueError: shapes or dtypes that do not belong together.
    """
    if not belong_together(codes, scales):
        raise ValueError(
            f"{name} has codes {codes.dtype} {list(codes.shape)} and scales {list(scales.shape)}: "
            f"read are float8 with one scale for each {BLOCK} x {BLOCK}, and MXFP4"
        )
    if codes.dtype is not torch.uint8:
        return codes.float() * spread(scales.float(), codes.shape)
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values[pairs.int()], exponents).flatten(-2).mT.contiguous()


def belong_together(codes: Tensor, scales: Tensor) -> bool:
    """Whether codes and scales have the dtypes and shapes of a format that is read."""
    if codes.dtype is torch.uint8:
        return codes.ndim == 4 and codes.shape[:-1] == scales.shape
    is_float8 = codes.dtype.itemsize == 1 and codes.dtype.is_floating_point
    grid = tuple(math.ceil(size / BLOCK) for size in codes.shape)
    return is_float8 and codes.ndim == 2 and tuple(scales.shape) == grid


def spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Each block's factor at each of its elements, for a weight of this shape."""
    rows, columns = shape
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return whole[:rows, :columns]
