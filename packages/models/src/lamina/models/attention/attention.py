"""Self-attention: multi-head, grouped-query and multi-query."""

from __future__ import annotations

from torch import Tensor, nn

from lamina.models.attention.context import AttentionContext
from lamina.models.attention.rotary import apply_rotary
from lamina.models.base.config import TransformerConfig
from lamina.models.base.cut_weights import require_divisible
from lamina.models.base.mesh_axes import MeshLike, axis_of, context_ranks
from lamina.models.layers.dropout import dropout_stream
from lamina.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lamina.models.layers.norms import RMSNorm

__all__ = ["AttentionCore", "SelfAttention"]


class AttentionCore(nn.Module):
    """RoPE, scores, softmax and mixing of values, without parameters.

    A module of its own so that recomputation can name it.

    Args:
        config: the shape.
        sharded: each tensor-parallel rank has other heads.
    """

    def __init__(self, config: TransformerConfig, *, sharded: bool = False) -> None:
        super().__init__()
        self.scale = config.score_scale
        self.rate = config.attention_dropout
        self.sharded = sharded

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttentionContext,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`[batch, sequence, heads, width]` to `[batch, sequence, heads, value_width]`.

        `rotary` turns queries and keys first: here, so that recomputation need not keep them.
        """
        if rotary is not None:
            query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        rate = self.rate if self.training else 0.0
        with dropout_stream(rate, self.sharded):
            return context.pattern(query, key, value, scale=self.scale, dropout=rate)


class SelfAttention(nn.Module):
    """Causal self-attention over `[batch, sequence, hidden]`.

    The projections of queries, keys and values are one weight `qkv.weight`
    `[(heads + 2 * kv_heads) * head_width, hidden]`: all query heads, then key heads, then value
    heads. Over tensor-parallel ranks each holds a run of the heads of each kind.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process. Over an axis `cp` it needs
            a context.

    Raises:
        ValueError: if query or key heads are not divisible by the number of ranks.
    """

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        self.config = config
        self.cp = context_ranks(mesh)
        self.head_width = width = config.head_width
        sharded = axis is not None
        queries = require_divisible("num_heads", config.num_heads, axis)
        keys = require_divisible("num_kv_heads", config.kv_heads, axis)
        self.head_counts = (queries, keys, keys)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (config.num_heads + 2 * config.kv_heads) * width,
            axis,
            bias=config.attention_bias,
            blocks=(config.num_heads * width, config.kv_heads * width, config.kv_heads * width),
            sequence_parallel=config.sequence_parallel,
            init_std=config.init_std,
            reduction=config.tp_reduction,
        )
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(width, config.norm_eps, partial=sharded)
            self.key_norm = RMSNorm(width, config.norm_eps, partial=sharded)
        self.core = AttentionCore(config, sharded=sharded)
        self.output = RowParallelLinear(
            config.num_heads * width,
            config.hidden_size,
            axis,
            bias=config.output_bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.residual_init_std,
            reduction=config.tp_reduction,
        )

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each sequence's tokens.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism
                `[tokens / tp, hidden]`, which needs a context, for that knows the batch's shape.
            context: what the blocks of a forward share; by default plain causal attention with
                positions counted from 0.

        Returns:
            The same shape as `x`.
        """
        if context is None:
            context = AttentionContext.plain(self.config, x, training=self.training, cp=self.cp)
        context.check(self.config)
        heads = self.qkv(x).view(*context.shape, -1, self.head_width)
        query, key, value = heads.split(self.head_counts, dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = self.core(query, key, value, context, context.rotary)
        mixed = mixed.flatten(2) if x.ndim == 3 else mixed.flatten(0, 1).flatten(1)
        output: Tensor = self.output(mixed)
        return output
