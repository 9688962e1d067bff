"""Rotary position embedding (Su et al., 2021), in the half-split form of GPT-NeoX and Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.models.config import TransformerConfig


def inverse_wavelengths(width: int, theta: float, device: torch.device) -> Tensor:
    """Angles per position of the ``width / 2`` pairs, float32 ``[width / 2]``."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    return 1.0 / theta**exponents


def rotary_tables(config: TransformerConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions.

    They are computed anew in each forward, once for all blocks: a buffer would be lost on the meta
    device and rounded by ``model.to(torch.bfloat16)``.

    Args:
        config: gives the head width and the wavelengths.
        positions: int64 ``[sequence]`` or ``[batch, sequence]``.

    Returns:
        Two float32 tensors ``[..., sequence, head_width / 2]``.

    """
    rates = inverse_wavelengths(config.head_width, config.rope_theta, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * rates
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + width / 2) of every head by its position's angles.

    Args:
        x: ``[batch, sequence, heads, width]``.
        cos: float32 ``[sequence, width / 2]`` or ``[batch, sequence, width / 2]``.
        sin: like ``cos``.

    Returns:
        The same shape and dtype as ``x``; the arithmetic is in float32 (float64 for float64).

    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
