"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.collectives import copy_to, gather_from
from lamina.models.attention.attention import AttentionCore
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.rotary import apply_rotary
from lamina.models.base.config import LatentAttention, TransformerConfig
from lamina.models.base.cut_weights import require_divisible
from lamina.models.base.mesh_axes import MeshLike, axis_of, context_ranks
from lamina.models.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from lamina.models.layers.norms import RMSNorm

__all__ = ["LatentSelfAttention"]


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention over `[batch, sequence, hidden]`.

    Keys and values of all heads are made from one narrow latent per token; the part of the keys
    that RoPE turns is shared by the heads. Over tensor-parallel ranks each holds a run of the
    heads; the projections down to the latents are whole on every rank.

    Args:
        config: the shape.
        sizes: widths of the latents and of the parts of a head.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Raises:
        ValueError: if the heads are not divisible by the number of ranks.
    """

    def __init__(
        self, config: TransformerConfig, sizes: LatentAttention, mesh: MeshLike = None
    ) -> None:
        super().__init__()
        self.config = config
        self.sizes = sizes
        self.cp = context_ranks(mesh)
        self.axis = axis_of(mesh, "tp")
        self.sequence_parallel = config.sequence_parallel and self.axis is not None
        require_divisible("num_heads", config.num_heads, self.axis)
        query_width = config.num_heads * config.head_width
        if sizes.q_lora_rank is None:
            self.query_down = self.query_norm = None
            self.query_up = self._up(config.hidden_size, query_width)
        else:
            self.query_down = self._down(sizes.q_lora_rank)
            self.query_norm = self._norm(sizes.q_lora_rank)
            self.query_up = self._up(sizes.q_lora_rank, query_width)
        self.kv_down = self._down(sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        self.kv_norm = self._norm(sizes.kv_lora_rank)
        self.kv_up = self._up(
            sizes.kv_lora_rank, config.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        )
        self.core = AttentionCore(config, sharded=self.axis is not None)
        self.output = RowParallelLinear(
            config.num_heads * sizes.v_head_dim,
            config.hidden_size,
            self.axis,
            bias=config.output_bias,
            sequence_parallel=self.sequence_parallel,
            init_std=config.residual_init_std,
            reduction=config.tp_reduction,
        )

    def _down(self, width: int) -> Linear:
        config = self.config
        return Linear(
            config.hidden_size,
            width,
            bias=config.attention_bias,
            init_std=config.init_std,
            partial=self.sequence_parallel,
        )

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.sizes.norm_eps, partial=self.sequence_parallel)

    def _up(self, in_features: int, out_features: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            in_features,
            out_features,
            self.axis,
            sequence_parallel=self.sequence_parallel,
            init_std=self.config.init_std,
            reduction=self.config.tp_reduction,
        )

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each sequence's tokens; see `SelfAttention.forward`."""
        if context is None:
            context = AttentionContext.plain(self.config, x, training=self.training, cp=self.cp)
        context.check(self.config)
        query = self.queries(x, context)
        key, value = self.keys_and_values(x, context)
        mixed = self.core(query, key, value, context)
        mixed = mixed.flatten(2) if x.ndim == 3 else mixed.flatten(0, 1).flatten(1)
        output: Tensor = self.output(mixed)
        return output

    def queries(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Queries `[batch, sequence, heads, nope + rope]`."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        heads = self.query_up(x).view(*context.shape, -1, self.config.head_width)
        widths = (self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim)
        still, turning = heads.split(widths, dim=-1)
        return torch.cat((still, _turn(turning, context)), dim=-1)

    def keys_and_values(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys `[batch, sequence, heads, nope + rope]` and values `[..., v_head_dim]`."""
        sizes = self.sizes
        widths = (sizes.kv_lora_rank, sizes.qk_rope_head_dim)
        latent, turning = self.kv_down(x).split(widths, dim=-1)
        shared = self._for_local_heads(turning).reshape(*context.shape, 1, -1)
        widths = (sizes.qk_nope_head_dim, sizes.v_head_dim)
        heads = self.kv_up(self.kv_norm(latent)).view(*context.shape, -1, sum(widths))
        still, value = heads.split(widths, dim=-1)
        turned = _turn(shared, context).expand(*still.shape[:-1], -1)
        return torch.cat((still, turned), dim=-1), value

    def _for_local_heads(self, x: Tensor) -> Tensor:
        """Enter the heads' region with what all heads share, all tokens of it."""
        if self.axis is None:
            return x
        reduction = self.config.tp_reduction
        if self.sequence_parallel:
            return gather_from(x, self.axis.group, grad="reduce_scatter", reduction=reduction)
        return copy_to(x, self.axis.group, reduction=reduction)


def _turn(x: Tensor, context: AttentionContext) -> Tensor:
    return x if context.rotary is None else apply_rotary(x, *context.rotary)
