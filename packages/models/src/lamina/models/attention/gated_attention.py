"""Multi-head attention whose results are multiplied by a gate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from lamina.models.attention.attention import MultiHeadAttention, SelfAttention
from lamina.models.attention.context import AttentionContext
from lamina.models.base.config import TransformerConfig
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.invariance.token_sums import in_float32, sigmoid
from lamina.models.layers.linear import from_residual


@dataclass(frozen=True, kw_only=True)
class GatedAttention(MultiHeadAttention):
    """Multi-head attention, multiplied by the sigmoid of a product with the token.

    Source: Qiu et al., Gated Attention for Large Language Models, arXiv:2505.06708.

    Args:
        each: what has a gate of its own: an `element` of a head, or a `head`.
        in_queries: rows of the gate are among those of `qkv`, after each head's query (Qwen3-Next).
            Otherwise the gate is a projection of its own.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            attention=GatedAttention())
    """

    each: Literal["element", "head"] = "element"
    in_queries: bool = False

    def __post_init__(self) -> None:
        if self.in_queries and self.each == "head":
            raise ValueError(
                "in_queries=True with each='head': a gate that stands with a query has its width; "
                "take each='element', or leave in_queries out"
            )

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        if self.in_queries:
            return QueryGatedSelfAttention(config, mesh)
        return GatedSelfAttention(config, mesh, self.gates(config))

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        if config.invariant and self.each == "head":
            raise ValueError(
                "invariant=True beside GatedAttention(each='head'), whose gradient is a sum over a "
                "head's elements in a kernel's order: take each='element', or leave one out"
            )

    def gates(self, config: TransformerConfig) -> int:
        """The number of gates of a token."""
        return config.num_heads * (config.head_width if self.each == "element" else 1)

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        return super().parameters(config) + config.hidden_size * self.gates(config)

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        for link in super().huggingface_links(config, ours, theirs):
            if self.in_queries and link.rows is not None:
                yield replace(link, rows=(2 * link.rows[0], *link.rows[1:]))
            else:
                yield link
        if not self.in_queries:
            yield from linked(f"{ours}.gate", f"{theirs}.gate_proj")


class GatedSelfAttention(SelfAttention):
    """The module of `GatedAttention`. Over tensor-parallel ranks each has the gates of its heads.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process.
        gates: the number of gates of a token, over all ranks.
    """

    caches = True  # a token's gates are made from that token alone

    def __init__(self, config: TransformerConfig, mesh: MeshLike, gates: int) -> None:
        super().__init__(config, mesh)
        self.gate = from_residual(config, (gates,), self.axis, bias=False)

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `Attention.mix`."""
        mixed = super().mix(x, context)
        gate: Tensor = self.gate(x)
        return mixed * _sigmoid(self, gate).view(*context.shape, mixed.shape[2], -1)


class QueryGatedSelfAttention(SelfAttention):
    """The module of `GatedAttention(in_queries=True)`: `qkv` has each head's query, then its gate.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process.
    """

    caches = True

    def query_rows(self, config: TransformerConfig) -> int:
        """See `SelfAttention.query_rows`."""
        return 2 * super().query_rows(config)

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `Attention.mix`."""
        queries, keys, _ = self.head_counts
        rows = self.qkv(x).view(*context.shape, -1, self.head_width)
        gated, others = rows.split_with_sizes((2 * queries, 2 * keys), dim=-2)
        query, gate = gated[..., 0::2, :], gated[..., 1::2, :]
        mixed = self.mix_heads(torch.cat((query, others), dim=-2), context)
        return mixed * _sigmoid(self, gate)


def _sigmoid(attention: SelfAttention, gate: Tensor) -> Tensor:
    return gate.sigmoid() if attention.tokens is None else in_float32(sigmoid, gate)
