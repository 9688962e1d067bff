"""Linear layers whose initial weights depend on the seed and their name only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.initialise import fill_normal


class Linear(nn.Module):
    """``x @ weight.T + bias``.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is a bias (it starts at zero).
        init_std: standard deviation of the initial weight.

    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.init_std = init_std
        self.init_seed: int | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2), set the bias to zero."""
        fill_normal(self.weight, self.init_std, self.init_seed)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
