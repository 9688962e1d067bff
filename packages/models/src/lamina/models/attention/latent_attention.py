"""Multi-head latent attention (DeepSeek-V2, 2024): the variant and its module."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lamina.models.attention.attention import Attention, AttentionCore, output_projection
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.rotary import apply_rotary
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.elements import HeadWidths
from lamina.models.base.configs.field_checks import (
    require_at_least,
    require_divides,
    require_positive,
)
from lamina.models.base.mesh_axes import MeshLike, require_divisible
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.invariance.token_sums import TokenCut, share_with_heads
from lamina.models.layers.linear import (
    ColumnParallelLinear,
    Linear,
    for_cut_layers,
    from_residual,
)
from lamina.models.layers.norms import RMSNorm

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class LatentAttention(AttentionVariant):
    """Multi-head latent attention, with sizes by the paper's names.

    Args:
        kv_lora_rank: width of the latent from which keys and values are made.
        q_lora_rank: width of the latent from which queries are made; None makes them directly.
        qk_nope_head_dim: elements of a query or key head that carry no position.
        qk_rope_head_dim: elements of a query or key head turned by RoPE; keys share them.
        v_head_dim: elements of a value head.
        interleaved: whether RoPE turns neighbouring elements in Hugging Face's model; False turns
            elements half a head apart, as Lamina does. Exports read it.
        norm_eps: added to the variance under the root where latents are normalised. DeepSeek's
            code has 1e-6 there, whatever the model's own `norm_eps`.
    """

    huggingface_type: ClassVar[str | None] = "deepseek_v3"
    yarn_scales_scores = True

    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    interleaved: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_at_least(1, self, *_SIZES)
        require_at_least(1, self, "q_lora_rank", optional=True)
        require_positive(self, "norm_eps")
        turned = "RoPE turns pairs of elements"
        require_divides("qk_rope_head_dim", self.qk_rope_head_dim, "2", 2, turned)

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return LatentSelfAttention(config, self, mesh)

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        for name in ("num_kv_heads", "head_dim"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is {getattr(config, name)} beside mla: leave it None")
        if config.qk_norm:
            raise ValueError("qk_norm beside mla: latent attention normalises its latents instead")
        if config.positions != "rope":
            raise ValueError(f"positions is {config.positions!r} beside mla: it must be 'rope'")

    def widths(self, config: TransformerConfig) -> HeadWidths:
        """See `AttentionVariant.widths`."""
        query = self.qk_nope_head_dim + self.qk_rope_head_dim
        return HeadWidths(query, self.v_head_dim, self.qk_rope_head_dim)

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        hidden, heads = config.hidden_size, config.num_heads
        query = heads * config.head_width
        count = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        count += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        count += heads * self.v_head_dim * hidden
        if self.q_lora_rank is None:
            return count + hidden * query
        return count + self.q_lora_rank * (hidden + query)

    def check_huggingface(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check_huggingface`."""
        if config.sliding_window is not None:
            raise ValueError(
                f"sliding_window is {config.sliding_window} beside mla: deepseek_v3 has no window, "
                "and no other Hugging Face architecture known here has latent attention"
            )
        if self.norm_eps != 1e-6:
            raise ValueError(
                f"norm_eps of mla is {self.norm_eps}: deepseek_v3 has 1e-6, whatever its config "
                "says"
            )

    def huggingface_fields(self, config: TransformerConfig) -> dict[str, Any]:
        """See `AttentionVariant.huggingface_fields`."""
        return {
            **{name: getattr(self, name) for name in ("q_lora_rank", *_SIZES)},
            "rope_interleave": self.interleaved,
            "head_dim": self.qk_rope_head_dim,
            # All layers are dense, unless the fields of experts say otherwise.
            "first_k_dense_replace": config.num_layers,
            "num_nextn_predict_layers": 0,
        }

    @classmethod
    def read_huggingface(cls, source: Mapping[str, Any]) -> dict[str, Any]:
        """See `AttentionVariant.read_huggingface`."""
        sizes: dict[str, Any] = {"q_lora_rank": source.get("q_lora_rank")} | {
            n: source[n] for n in _SIZES
        }
        return {"mla": cls(interleaved=source.get("rope_interleave", True), **sizes)}

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        bias = config.attention_bias
        # DeepSeek turns pairs of neighbouring elements, and Lamina pairs of elements that are half
        # a head apart. So the rows that make these elements are permuted; scores are the same.
        turned = [*range(0, self.qk_rope_head_dim, 2), *range(1, self.qk_rope_head_dim, 2)]
        turned = turned if self.interleaved else sorted(turned)
        head = list(range(self.qk_nope_head_dim)) + [self.qk_nope_head_dim + i for i in turned]
        query = [h * len(head) + i for h in range(config.num_heads) for i in head]
        shared = list(range(self.kv_lora_rank)) + [self.kv_lora_rank + i for i in turned]
        if self.q_lora_rank is None:
            yield from linked(f"{ours}.query_up", f"{theirs}.q_proj", order=tuple(query))
        else:
            yield from linked(f"{ours}.query_norm", f"{theirs}.q_a_layernorm")
            yield from linked(f"{ours}.query_down", f"{theirs}.q_a_proj", bias=bias)
            yield from linked(f"{ours}.query_up", f"{theirs}.q_b_proj", order=tuple(query))
        down = f"{theirs}.kv_a_proj_with_mqa"
        yield from linked(f"{ours}.kv_down", down, bias=bias, order=tuple(shared))
        yield from linked(f"{ours}.kv_norm", f"{theirs}.kv_a_layernorm")
        yield from linked(f"{ours}.kv_up", f"{theirs}.kv_b_proj")
        yield from linked(f"{ours}.output", f"{theirs}.o_proj", bias=config.output_bias)


class LatentSelfAttention(Attention):
    """Multi-head latent attention over `[batch, sequence, hidden]`.

    The keys and values of all heads are made from one narrow latent per token. The part of the keys
    that RoPE turns is shared by the heads. Over tensor-parallel ranks each holds a run of the
    heads, and the projections down to the latents are whole on every rank.

    Args:
        config: the shape.
        sizes: widths of the latents and of the parts of a head.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Raises:
        ValueError: if the heads are not divisible by the number of ranks.
    """

    caches = True

    def __init__(
        self, config: TransformerConfig, sizes: LatentAttention, mesh: MeshLike = None
    ) -> None:
        super().__init__(config, mesh)
        self.sizes = sizes
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
        self.core = AttentionCore(config, self.axis)
        self.output = output_projection(config, self.axis)

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
        return from_residual(self.config, (out_features,), self.axis, bias=False, width=in_features)

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `Attention.mix`."""
        query = self.queries(self.query_latent(x), context)
        return self.attend(query, *self.keys_and_values(x, context), context)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
    ) -> Tensor:
        """Mix values by the context's pattern, with the cache's unless that keeps latents."""
        kept = replace(context, cache=None) if self._keeps_latents(context) else context
        return cast(Tensor, self.core(query, key, value, kept))

    def _keeps_latents(self, context: AttentionContext) -> bool:
        # Under sequence parallelism a rank has the latents of its own tokens, so its core caches.
        # So it does with `invariant=True`, where heads share the turned part one by one.
        return context.cache is not None and not self.sequence_parallel and self.tokens is None

    def query_latent(self, x: Tensor) -> Tensor:
        """What queries are made from: the normalised latent, or the tokens where there is none."""
        if self.query_down is None or self.query_norm is None:
            return x
        return cast(Tensor, self.query_norm(self.query_down(x)))

    def queries(self, latent: Tensor, context: AttentionContext) -> Tensor:
        """Queries `[batch, sequence, heads, nope + rope]`."""
        heads = self.query_up(latent).view(*context.shape, -1, self.config.head_width)
        widths = (self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim)
        still, turning = heads.split(widths, dim=-1)
        return torch.cat((still, _turn(turning, context)), dim=-1)

    def keys_and_values(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Keys `[batch, sequence, heads, nope + rope]` and values `[..., v_head_dim]`."""
        sizes = self.sizes
        widths = (sizes.kv_lora_rank, sizes.qk_rope_head_dim)
        latent, turning = self.kv_down(x).split(widths, dim=-1)
        if self.tokens is not None:
            return self._fixed_keys_and_values(latent, turning, context, self.tokens)
        shared = for_cut_layers(turning, self.config, self.axis)
        latent, turned = self.kv_norm(latent), _turn(shared.reshape(*context.shape, 1, -1), context)
        if context.cache is not None and self._keeps_latents(context):
            window = self.config.sliding_window
            latent, turned = context.cache.extended((latent, turned), window)
        still, value = self._up_heads(latent, turned.shape[:2])
        return torch.cat((still, turned.expand(*still.shape[:-1], -1)), dim=-1), value

    def _fixed_keys_and_values(
        self, latent: Tensor, turning: Tensor, context: AttentionContext, tokens: TokenCut
    ) -> tuple[Tensor, Tensor]:
        still, value = self._up_heads(self.kv_norm(latent), context.shape)
        shared = share_with_heads(turning, context.shape, still.shape[2], tokens)
        return torch.cat((still, _turn(shared, context)), dim=-1), value

    def _up_heads(self, latent: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        widths = (self.sizes.qk_nope_head_dim, self.sizes.v_head_dim)
        still, value = self.kv_up(latent).view(*shape, -1, sum(widths)).split(widths, dim=-1)
        return still, value


def _turn(x: Tensor, context: AttentionContext) -> Tensor:
    return x if context.rotary is None else apply_rotary(x, *context.rotary)
