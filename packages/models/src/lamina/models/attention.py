"""Multi-head, grouped-query and multi-query self-attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.config import TransformerConfig
from lamina.models.linear import Linear
from lamina.models.masking import AttentionContext
from lamina.models.norms import RMSNorm
from lamina.models.rotary import apply_rotary


class SelfAttention(nn.Module):
    """Causal self-attention over ``[batch, sequence, hidden]``.

    The projections of queries, keys and values are one weight ``qkv.weight``
    ``[(heads + 2 * kv_heads) * head_width, hidden]``: all query heads, then key heads, then value
    heads.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_width = config.head_width
        hidden, width = config.hidden_size, config.head_width
        self.qkv = Linear(
            hidden,
            (self.heads + 2 * self.kv_heads) * width,
            bias=config.attention_bias,
            init_std=config.init_std,
        )
        self.output = Linear(
            self.heads * width, hidden, bias=config.output_bias, init_std=config.residual_init_std
        )
        self.query_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """``[batch, sequence, hidden]`` to the same; without a context positions count from 0."""
        if context is None:
            context = AttentionContext.build(self.config, x.shape[1], x.device)
        query, key, value = self.project(x, context)
        mixed = self.attend(query, key, value, context)
        output: Tensor = self.output(mixed.flatten(2))
        return output

    def project(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch, sequence, heads, head_width]``, normed and turned."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width))
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None:
            query, key = apply_rotary(query, *context.rotary), apply_rotary(key, *context.rotary)
        return query, key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
    ) -> Tensor:
        """Mix values by softmax(query . key); ``[batch, sequence, heads, head_width]``."""
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=context.mask,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=context.mask is None,
            enable_gqa=self.kv_heads != self.heads,
        )
        return mixed.transpose(1, 2)
