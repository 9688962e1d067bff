"""Self-attention: the module, and what every kind of attention has in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lamina.mesh import mark
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.kernels import DrawnPattern, PerHeadPattern
from lamina.models.attention.rotary import apply_rotary
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.elements import NormPart
from lamina.models.base.initialise import fill, normal
from lamina.models.base.mesh_axes import MeshLike, axis_of, context_ranks, require_divisible
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.random_keys import PairDraws
from lamina.models.invariance.token_sums import TokenCut
from lamina.models.layers.dropout import dropout_stream
from lamina.models.layers.linear import RowParallelLinear, from_residual, into_residual
from lamina.models.layers.norms import NORMS, CutRMSNorm, LayerNorm, RMSNorm, norm_of


class AttentionCore(nn.Module):
    """RoPE, scores, softmax and mixing of values, without parameters.

    This is a module of its own so that selective recomputation can find it.

    Args:
        config: the shape.
        axis: ranks that have other heads each; None is one process.
    """

    def __init__(self, config: TransformerConfig, axis: MeshAxis | None = None) -> None:
        super().__init__()
        self.scale = config.score_scale
        self.rate = config.attention_dropout
        self.window = config.sliding_window
        self.axis = axis
        self.init_seed: int | None = None

    @property
    def sharded(self) -> bool:
        """Whether each tensor-parallel rank has other heads."""
        return self.axis is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttentionContext,
        rotary: tuple[Tensor, Tensor] | None = None,
        per_head: Tensor | None = None,
    ) -> Tensor:
        """`[batch, sequence, heads, width]` to `[batch, sequence, heads, value_width]`.

        Queries and keys are turned by `rotary` in here rather than by the caller, so that
        selective recomputation need not keep the turned ones.
        """
        if rotary is not None:
            query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
        query = context.scaled(query)
        if context.cache is not None:
            key, value = context.cache.extended((key, value), self.window)
        rate = self.rate if self.training else 0.0
        pattern = context.pattern
        if per_head is not None:
            pattern = cast(PerHeadPattern, pattern).with_heads(per_head)
        if rate > 0.0 and context.token_keys is not None:
            heads = query.shape[2]
            first = 0 if self.axis is None else self.axis.rank * heads
            draws = PairDraws.of(rate, context.token_keys, self.init_seed or 0, first, heads)
            return cast(DrawnPattern, pattern).with_draws(draws)(
                query, key, value, scale=self.scale, dropout=rate
            )
        with dropout_stream(rate, self.sharded):
            return pattern(query, key, value, scale=self.scale, dropout=rate)


class Attention(FixedSums, nn.Module, ABC):
    """Attention over `[batch, sequence, hidden]`: the base class of the variants' modules.

    A subclass makes its projections, then `core` and `output`, and implements `mix`.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process. Over an axis `cp` the module
            needs a context.
    """

    core: AttentionCore
    output: nn.Module
    caches: ClassVar[bool] = False
    """Whether this class itself keeps all that later tokens need in `context.cache`."""

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__()
        self.config = config
        self.cp = context_ranks(mesh)
        self.axis = axis_of(mesh, "tp")

    @abstractmethod
    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Mix the tokens of each sequence.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism `[tokens / tp, hidden]`.
            context: what the blocks of a forward share.

        Returns:
            `[batch, sequence, heads, value_width]` of this rank's heads.
        """

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each sequence's tokens.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism
                `[tokens / tp, hidden]`, which needs a context, because that has the batch's shape.
            context: what the blocks of a forward share; by default plain causal attention with
                positions counted from 0.

        Returns:
            The same shape as `x`.

        Raises:
            ValueError: without a context, if `x` is not `[batch, sequence, hidden]` or ranks share
                a sequence.
        """
        if context is None:
            if self.cp > 1:
                raise ValueError(
                    f"without a context attention sees this rank's tokens only, and cp {self.cp} "
                    "cuts the sequence: pass AttentionContext.build(config, tokens, dtype, "
                    "mesh=mesh) with the whole tokens"
                )
            if x.ndim != 3:
                raise ValueError(
                    f"x has shape {tuple(x.shape)}: without a context it must be [batch, sequence, "
                    "hidden]; under sequence parallelism pass AttentionContext.build(...)"
                )
            context = AttentionContext.build(self.config, x, x.dtype, training=self.training)
        context = context.of_layer(self.config)
        mixed = self.mix(x, context)
        mixed = mixed.flatten(2) if x.ndim == 3 else mixed.flatten(0, 1).flatten(1)
        return cast(Tensor, self.output(mixed))


def output_projection(config: TransformerConfig, mesh: MeshLike = None) -> RowParallelLinear:
    """Build the projection of the heads' values back into the residual stream."""
    width = config.num_heads * config.value_width
    return into_residual(config, width, mesh, bias=config.output_bias)


class SelfAttention(Attention):
    """Causal self-attention: multi-head, grouped-query or multi-query.

    The projections of queries, keys and values are one weight `qkv.weight`
    `[(heads + 2 * kv_heads) * head_width, hidden]`: all query heads, then key heads, then value
    heads. Over tensor-parallel ranks each holds a run of the heads of each kind.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process. Over an axis `cp` the module
            needs a context.

    Raises:
        ValueError: if query or key heads are not divisible by the number of ranks.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> attention = SelfAttention(config)
    """

    caches = True  # its core does

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__(config, mesh)
        axis = self.axis
        self.head_width = width = config.head_width
        sharded = axis is not None
        queries = require_divisible("num_heads", config.num_heads, axis)
        keys = require_divisible("num_kv_heads", config.kv_heads, axis)
        self.head_counts = (queries, keys, keys)
        blocks = (self.query_rows(config), config.kv_heads * width, config.kv_heads * width)
        self.qkv = from_residual(config, blocks, axis, bias=config.attention_bias)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        self.whole_norm = config.qk_norm == "whole"
        self.norm_last = config.qk_norm == "after_rope"
        self.init_std = config.init_std
        self.init_seed: int | None = None
        self.sinks: nn.Parameter | None = None
        if config.scores is not None and config.scores.sinks:
            self.sinks = nn.Parameter(torch.empty(queries))
            self.reset_parameters()
        if self.whole_norm:
            self.query_norm = CutRMSNorm(config.num_heads * width, config.norm_eps, axis)
            self.key_norm = CutRMSNorm(config.kv_heads * width, config.norm_eps, axis)
        elif config.qk_norm:
            norm = _head_norm(config)
            self.query_norm = norm.make(width, config.norm_eps, partial=sharded)
            self.key_norm = norm.make(width, config.norm_eps, partial=sharded)
        self.core = AttentionCore(config, self.axis)
        self.output = output_projection(config, axis)

    def query_rows(self, config: TransformerConfig) -> int:
        """The rows of the first projection that are of queries, over all ranks."""
        return config.num_heads * config.head_width

    def reset_parameters(self) -> None:
        """Draw the heads' sinks, and mark their role; projections draw their own weights."""
        if self.sinks is not None:
            mark(self.sinks, tp_shard_dim=None if self.axis is None else 0)
            fill(self.sinks, normal(self.init_std), self.init_seed, self.axis)

    def fix_sums(self, tokens: TokenCut) -> None:
        """See `FixedSums`."""
        super().fix_sums(tokens)
        for norm in (self.query_norm, self.key_norm):
            if isinstance(norm, RMSNorm | LayerNorm):
                norm.per_head = True

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `Attention.mix`."""
        return self.mix_heads(self.qkv(x).view(*context.shape, -1, self.head_width), context)

    def mix_heads(self, heads: Tensor, context: AttentionContext) -> Tensor:
        """`mix`, given `[batch, sequence, heads, width]` of all queries, keys and values."""
        query, key, value = heads.split_with_sizes(self.head_counts, dim=-2)
        rotary = context.rotary
        if rotary is not None and self.query_norm is None and not torch.is_grad_enabled():
            # One turn of both takes half as long for one token. With gradients the core turns
            # them, so that selective recomputation need not keep the turned ones.
            both = apply_rotary(heads.narrow(-2, 0, sum(self.head_counts[:2])), *rotary)
            query, key = both.split_with_sizes(self.head_counts[:2], dim=-2)
            rotary = None
        if self.norm_last and rotary is not None:
            query, key, rotary = apply_rotary(query, *rotary), apply_rotary(key, *rotary), None
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
        return cast(Tensor, self.core(query, key, value, context, rotary, self._per_head(query)))

    def _per_head(self, like: Tensor) -> Tensor | None:
        """What `AttentionScores` has of each of this rank's heads: its slope, and its sink."""
        if self.config.scores is None:
            return None
        slopes = self.config.scores.slopes(self.config.num_heads, like.device)
        slopes = slopes.to(torch.promote_types(like.dtype, torch.float32))
        if self.axis is not None:
            slopes = slopes.chunk(self.axis.size)[self.axis.rank]
        columns = [slopes] if self.sinks is None else [slopes, self.sinks.to(slopes.dtype)]
        return torch.stack(columns, dim=1)

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:
        normed: Tensor = norm(heads.flatten(-2) if self.whole_norm else heads)
        return normed.view(heads.shape)


def _head_norm(config: TransformerConfig) -> NormPart:
    """The norm of each head of queries and keys."""
    if config.qk_norm == "layernorm":
        return NORMS["layernorm"]
    return norm_of(replace(config, norm="rmsnorm") if config.norm == "layernorm" else config)


@dataclass(frozen=True, kw_only=True)
class MultiHeadAttention(AttentionVariant):
    """Multi-head, grouped-query or multi-query attention with the heads of the config.

    This is what `TransformerConfig(attention=None)` means. A variant that differs from it in the
    module alone can inherit the rest from here.
    """

    takes_scores = True

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return SelfAttention(config, mesh)

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        heads = 2 * config.num_heads + 2 * config.kv_heads
        return config.hidden_size * config.head_width * heads

    @classmethod
    def read_huggingface(cls, source: Mapping[str, Any]) -> dict[str, Any]:
        """See `AttentionVariant.read_huggingface`."""
        return {**super().read_huggingface(source), "attention": None}

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        width = config.head_width
        rows = (config.num_heads * width, config.kv_heads * width, config.kv_heads * width)
        names = [f"{theirs}.{part}_proj" for part in "qkv"]
        yield from linked(f"{ours}.qkv", *names, bias=config.attention_bias, rows=rows)
        yield from linked(f"{ours}.output", f"{theirs}.o_proj", bias=config.output_bias)
        of_norm = ("weight",) if config.qk_norm == "whole" else _head_norm(config).names
        for name in of_norm if config.qk_norm else ():
            yield WeightLink(f"{ours}.query_norm.{name}", (f"{theirs}.q_norm.{name}",))
            yield WeightLink(f"{ours}.key_norm.{name}", (f"{theirs}.k_norm.{name}",))
        if config.scores is not None and config.scores.sinks:
            yield WeightLink(f"{ours}.sinks", (f"{theirs}.sinks",))


def variant_of(config: TransformerConfig) -> AttentionVariant:
    """The config's kind of attention."""
    return config.attention_variant or MultiHeadAttention()
