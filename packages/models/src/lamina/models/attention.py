"""Self-attention: multi-head, grouped-query, multi-query, and multi-head latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.models.config import LatentAttention, TransformerConfig
from lamina.models.context import AttentionContext
from lamina.models.linear import Linear
from lamina.models.norms import RMSNorm
from lamina.models.rotary import apply_rotary


class AttentionCore(nn.Module):
    """Scores, softmax and mixing of values, without parameters.

    A module of its own so that recomputation can name it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = config.score_scale
        self.dropout = config.attention_dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
    ) -> Tensor:
        """``[batch, sequence, heads, width]`` to ``[batch, sequence, heads, value_width]``."""
        dropout = self.dropout if self.training else 0.0
        return context.pattern(query, key, value, scale=self.scale, dropout=dropout)


class SelfAttention(nn.Module):
    """Causal self-attention over ``[batch, sequence, hidden]``.

    The projections of queries, keys and values are one weight ``qkv.weight``
    ``[(heads + 2 * kv_heads) * head_width, hidden]``: all query heads, then key heads, then value
    heads.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.head_width = config.head_width
        self.head_counts = (config.num_heads, config.kv_heads, config.kv_heads)
        self.qkv = Linear(
            config.hidden_size,
            sum(self.head_counts) * config.head_width,
            bias=config.attention_bias,
            init_std=config.init_std,
        )
        self.query_norm = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.core = AttentionCore(config)
        self.output = Linear(
            config.num_heads * config.head_width,
            config.hidden_size,
            bias=config.output_bias,
            init_std=config.residual_init_std,
        )

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """``[batch, sequence, hidden]`` to the same; without a context positions count from 0."""
        if context is None:
            context = AttentionContext.build(self.config, x, x.dtype, training=self.training)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width))
        query, key, value = heads.split(self.head_counts, dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary is not None:
            query, key = apply_rotary(query, *context.rotary), apply_rotary(key, *context.rotary)
        mixed = self.core(query, key, value, context)
        output: Tensor = self.output(mixed.flatten(2))
        return output


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024) over ``[batch, sequence, hidden]``.

    Keys and values of all heads are made from one narrow latent per token; the part of the keys
    that RoPE turns is shared by the heads.
    """

    def __init__(self, config: TransformerConfig, sizes: LatentAttention) -> None:
        super().__init__()
        self.config = config
        self.sizes = sizes
        hidden, heads, std = config.hidden_size, config.num_heads, config.init_std
        query_width = heads * config.head_width
        if sizes.q_lora_rank is None:
            self.query_down = self.query_norm = None
            self.query_up = Linear(hidden, query_width, init_std=std)
        else:
            self.query_down = Linear(
                hidden, sizes.q_lora_rank, bias=config.attention_bias, init_std=std
            )
            self.query_norm = RMSNorm(sizes.q_lora_rank, config.norm_eps)
            self.query_up = Linear(sizes.q_lora_rank, query_width, init_std=std)
        self.kv_down = Linear(
            hidden,
            sizes.kv_lora_rank + sizes.qk_rope_head_dim,
            bias=config.attention_bias,
            init_std=std,
        )
        self.kv_norm = RMSNorm(sizes.kv_lora_rank, config.norm_eps)
        self.kv_up = Linear(
            sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), init_std=std
        )
        self.core = AttentionCore(config)
        self.output = Linear(
            heads * sizes.v_head_dim,
            hidden,
            bias=config.output_bias,
            init_std=config.residual_init_std,
        )

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """``[batch, sequence, hidden]`` to the same; without a context positions count from 0."""
        if context is None:
            context = AttentionContext.build(self.config, x, x.dtype, training=self.training)
        query = self.queries(x, context)
        key, value = self.keys_and_values(x, context)
        mixed = self.core(query, key, value, context)
        output: Tensor = self.output(mixed.flatten(2))
        return output

    def queries(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries ``[batch, sequence, heads, nope + rope]``."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        heads = self.query_up(x).unflatten(-1, (-1, self.config.head_width))
        still, turning = heads.split(
            (self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim), dim=-1
        )
        return torch.cat((still, self.turn(turning, context)), dim=-1)

    def keys_and_values(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys ``[batch, sequence, heads, nope + rope]`` and values ``[..., v_head_dim]``."""
        sizes = self.sizes
        latent, turning = self.kv_down(x).split(
            (sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1
        )
        turned = self.turn(turning.unsqueeze(-2), context)
        heads = self.kv_up(self.kv_norm(latent)).unflatten(
            -1, (-1, sizes.qk_nope_head_dim + sizes.v_head_dim)
        )
        still, value = heads.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        shared = turned.expand(*still.shape[:-1], -1)
        return torch.cat((still, shared), dim=-1), value

    def turn(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Apply RoPE."""
        return x if context.rotary is None else apply_rotary(x, *context.rotary)


def make_attention(config: TransformerConfig) -> SelfAttention | LatentSelfAttention:
    """Build the attention that the config names."""
    return SelfAttention(config) if config.mla is None else LatentSelfAttention(config, config.mla)
