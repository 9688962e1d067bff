"""Rotary position embedding (Su et al., 2021), in the half-split form of GPT-NeoX and Llama."""

import math

import torch
from torch import Tensor

from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.rope import RopeScaling


def rotary_rates(config: TransformerConfig, device: torch.device) -> Tensor:
    """Angles per position of the pairs of elements, scaled: float32 `[rotary_width / 2]`."""
    width = config.rotary_width
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    rates = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return rates
    if scaling.kind == "linear":
        return rates / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_rates(rates, scaling)
    return _yarn_rates(rates, scaling, config.rope_theta)


def _llama3_rates(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep short wavelengths, stretch long ones, interpolate between (Llama 3.1)."""
    turns = scaling.original_length * rates / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return rates * kept + rates / scaling.factor * (1.0 - kept)


def _yarn_rates(rates: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Interpolate by the turns of a pair within the original length (Peng et al., 2023, 3.2)."""
    pairs = rates.numel()

    def pair_that_turns(times: float) -> float:
        # Solves original_length * theta^(-pair / pairs) = 2 pi * times for the pair's index.
        return pairs * math.log(scaling.original_length / (times * 2 * math.pi)) / math.log(theta)

    first, last = map(pair_that_turns, (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    index = torch.arange(pairs, dtype=torch.float32, device=rates.device)
    stretched = ((index - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return rates / scaling.factor * stretched + rates * (1.0 - stretched)


def rotary_tables(config: TransformerConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions.

    They are computed in each forward, once for all blocks. They are not buffers, because a buffer
    would be lost on the meta device and rounded by `model.to(torch.bfloat16)`.

    Args:
        config: gives the width that turns, the wavelengths and their scaling.
        positions: int64 `[sequence]` or `[batch, sequence]`.

    Returns:
        Two float32 tensors `[..., sequence, rotary_width / 2]`.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * rotary_rates(config, positions.device)
    magnitude = 1.0 if config.rope_scaling is None else config.rope_scaling.magnitude
    if magnitude == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * magnitude, angles.sin() * magnitude


def query_factors(config: TransformerConfig, positions: Tensor) -> Tensor | None:
    """The factors of queries at integer positions, float32 like `positions`; None is 1."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.query_beta:
        return None
    lengths = positions // scaling.original_length
    return 1.0 + scaling.query_beta * torch.log1p(lengths.to(torch.float32))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + width / 2) of every head by its position's angles.

    Args:
        x: `[batch, sequence, heads, width]`.
        cos: float32 `[sequence, width / 2]` or `[batch, sequence, width / 2]`; of less than half
            the width, only the start of each head is turned.
        sin: like `cos`.

    Returns:
        The same shape and dtype as `x`; the arithmetic is in float32 (float64 for float64).
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    width = 2 * cos.shape[-1]
    turning = x if width == x.shape[-1] else x[..., :width]
    first, second = turning.chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    parts = turned if turning is x else [*turned, x[..., width:]]
    return torch.cat(parts, dim=-1).to(x.dtype)
