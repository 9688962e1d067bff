"""One Transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.attention import make_attention
from lamina.models.config import TransformerConfig
from lamina.models.context import AttentionContext
from lamina.models.mlp import MLP
from lamina.models.norms import make_norm


class TransformerBlock(nn.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    With ``config.post_norm`` what attention and MLP return is normalised too, before it is added.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config)
        self.attention_post_norm = make_norm(config) if config.post_norm else None
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_post_norm = make_norm(config) if config.post_norm else None

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """``[batch, sequence, hidden]`` to the same."""
        x = self.add(x, self.attention(self.attention_norm(x), context), self.attention_post_norm)
        return self.add(x, self.mlp(self.mlp_norm(x)), self.mlp_post_norm)

    def add(self, x: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """Add an update to the residual stream, after post-norm and dropout."""
        if norm is not None:
            update = norm(update)
        return x + F.dropout(update, self.dropout, self.training)
