"""The feed-forward half of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.config import TransformerConfig
from lamina.models.linear import Linear


class MLP(nn.Module):
    """Up, an activation, down; with SwiGLU the gate and up projections are one weight.

    ``up.weight`` is ``[ffn, hidden]``, or ``[2 * ffn, hidden]`` with SwiGLU: gate rows first.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        hidden, ffn = config.hidden_size, config.ffn_width
        rows = 2 * ffn if config.activation == "swiglu" else ffn
        self.up = Linear(hidden, rows, bias=config.mlp_bias, init_std=config.init_std)
        self.down = Linear(ffn, hidden, bias=config.mlp_bias, init_std=config.residual_init_std)

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation to what ``up`` returns."""
        if self.activation == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self.activation == "relu2":
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        down: Tensor = self.down(self.activate(self.up(x)))
        return down
