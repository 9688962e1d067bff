"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.config import TransformerConfig


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        size: width of the last dimension.
        eps: added to the mean square under the root.

    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]`` with statistics in float32 or wider; keeps x's dtype."""
        return F.rms_norm(x, (self.size,), self.weight, self.eps)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.size}, eps={self.eps}"


class LayerNorm(nn.Module):
    """``(x - mean) / std * weight + bias`` over the last dimension (Ba et al., 2016).

    Args:
        size: width of the last dimension.
        eps: added to the variance under the root.

    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``; the result has x's dtype."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.size}, eps={self.eps}"


def make_norm(config: TransformerConfig, size: int | None = None) -> RMSNorm | LayerNorm:
    """Build the norm that the config names, over ``size`` (by default the hidden size)."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size if size is None else size, config.norm_eps)
