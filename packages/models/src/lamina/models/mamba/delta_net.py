"""Gated delta nets in the place of attention (Qwen3-Next, OLMo Hybrid)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import derive_seed, mark
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import AttentionContext, TokenCache
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.field_checks import (
    require_at_least,
    require_divides,
    require_in_order,
    require_positive,
)
from lamina.models.base.initialise import fill, uniform
from lamina.models.base.mesh_axes import MeshLike, axis_of, require_divisible
from lamina.models.base.weight_link import WeightLink
from lamina.models.layers.linear import from_residual, into_residual
from lamina.models.mamba.block import before_softplus
from lamina.models.mamba.convolution import CausalConvolution
from lamina.models.mamba.delta_rule import chunked_delta_rule, delta_step


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(AttentionVariant):
    """A recurrence whose state forgets, and is corrected by each token.

    It costs the same for each token, however many there were before. Give it to most layers, and
    attention to the others: `layers=(LayerSpec(attention=GatedDeltaNet(...)), LayerSpec(), ...)`.
    The config's heads, norms of queries and keys, and positions are those of attention, and are not
    read.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.

    Args:
        key_heads: heads of queries and keys. Over tensor-parallel ranks each holds a run of them.
        value_heads: heads of values and of the state, a multiple of `key_heads`.
        key_width: elements of a query or key head.
        value_width: elements of a value head.
        taps: tokens that the convolution before the recurrence sees, the token itself among them.
        negative: a token may move the state beyond its value (steps up to 2, and not 1), so that
            eigenvalues may be negative (Grazzi et al., 2024).
        chunk_size: tokens that are multiplied as a matrix; results do not depend on it.
        norm_eps: of the norm of the results; that of the config, if None.
        dt_min: the smallest initial step of decay.
        dt_max: the largest; steps are drawn uniformly on a log scale.
        decay_range: bounds of the initial decay rates, which are drawn uniformly.

    Raises:
        ValueError: for sizes below 1, ranges that are empty, or heads that do not fit together.

    Examples:
        >>> net = GatedDeltaNet(key_heads=2, value_heads=4, key_width=16, value_width=16)
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            attention=net)
    """

    key_heads: int = 16
    value_heads: int = 32
    key_width: int = 128
    value_width: int = 128
    taps: int = 4
    negative: bool = False
    chunk_size: int = 64
    norm_eps: float | None = None
    dt_min: float = 0.001
    dt_max: float = 0.1
    decay_range: tuple[float, float] = (1.0, 16.0)
    context_parallel = ()
    reads_documents = True

    def __post_init__(self) -> None:
        heads = ("key_heads", "value_heads", "key_width", "value_width")
        require_at_least(1, self, *heads, "taps", "chunk_size")
        if self.norm_eps is not None:
            require_positive(self, "norm_eps")
        require_in_order("dt_min and dt_max", self.dt_min, self.dt_max)
        require_in_order("decay_range", *self.decay_range)
        require_divides(
            "value_heads", self.value_heads, "key_heads", self.key_heads,
            "each key head serves equally many",
        )  # fmt: skip

    @property
    def widths_of_rows(self) -> dict[str, int]:
        """Rows of the first projection: queries, keys, values, gates, steps and decays."""
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        heads = self.value_heads
        return {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return GatedDeltaMixer(config, self, mesh)

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        if config.invariant:
            raise ValueError(
                "invariant=True beside GatedDeltaNet, whose triangular systems are solved in a "
                "kernel's order: leave one of them out"
            )

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        rows = self.widths_of_rows
        projections = config.hidden_size * (sum(rows.values()) + rows["v"])
        return projections + self.taps * (2 * rows["k"] + rows["v"])

    def products_per_pair(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.products_per_pair`."""
        return 0

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """See `LayerPart.products_per_token`."""
        # The recurrence has three products per element of the state: two reads and an update.
        return 3.0 * self.value_heads * self.key_width * self.value_width

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        rows = self.widths_of_rows
        names = tuple(f"{theirs}.in_proj_{each}.weight" for each in rows)
        yield WeightLink(f"{ours}.input.weight", names, rows=tuple(rows.values()))
        names = tuple(f"{theirs}.conv1d_{each}.weight" for each in "qkv")
        yield WeightLink(f"{ours}.conv.weight", names, rows=tuple(rows[each] for each in "qkv"))
        kinds = {
            "rule.A_log": "A_log",
            "rule.dt_bias": "dt_bias",
            "norm.weight": "delta_norm.weight",
            "output.weight": "delta_out.weight",
        }
        for name, other in kinds.items():
            yield WeightLink(f"{ours}.{name}", (f"{theirs}.{other}",))


class DeltaRule(nn.Module):
    """The recurrence and its parameters: a rate of decay, and a bias of its step, for each head.

    The names are those of checkpoints: `g = -exp(A_log) softplus(a + dt_bias)`. The heads are those
    of values, over all ranks of the axis.
    """

    casts_itself = True  # wrappers that cast inputs of modules in fp32 read this

    def __init__(self, sizes: GatedDeltaNet, axis: MeshAxis | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.axis = axis
        self.init_seed: int | None = None
        heads = require_divisible("value_heads", sizes.value_heads, axis)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates uniformly, and steps uniformly on a log scale; mark roles."""
        limits = math.log(self.sizes.dt_min), math.log(self.sizes.dt_max)
        draws = {"A_log": uniform(*self.sizes.decay_range, then=torch.log),
                 "dt_bias": uniform(*limits, then=before_softplus)}  # fmt: skip
        for name, draw in draws.items():
            parameter = self.get_parameter(name)
            mark(parameter, tp_shard_dim=None if self.axis is None else 0)
            seed = None if self.init_seed is None else derive_seed(self.init_seed, name)
            fill(parameter, draw, seed, self.axis)

    def operands(
        self, query: Tensor, key: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys of length 1, decays and steps, in float32 or wider."""
        wide = torch.promote_types(a.dtype, torch.float32)
        query, key = (
            x.to(wide) * (x.to(wide).square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
            for x in (query, key)
        )
        decay = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        step = b.sigmoid() * (2.0 if self.sizes.negative else 1.0)
        return query * self.sizes.key_width**-0.5, key, decay, step

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        runs: Tensor | None = None,
    ) -> Tensor:
        """Run the rule over sequences; shapes as of `chunked_delta_rule`, in the dtype of value."""
        return self.with_state(query, key, value, a, b, runs)[0]

    def with_state(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        runs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and the state after the last token."""
        query, key, decay, step = self.operands(query, key, a, b)
        chunk = self.sizes.chunk_size
        y, state = chunked_delta_rule(query, key, value, decay, step, chunk=chunk, runs=runs)
        return y.to(value.dtype), state

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute one token; shapes as of `delta_step`."""
        query, key, decay, step = self.operands(query, key, a, b)
        y, state = delta_step(query, key, value, decay, step, state)
        return y.to(value.dtype), state


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head, times a weight that all heads share, times `silu(gate)`."""

    def __init__(self, width: int, eps: float, axis: MeshAxis | None) -> None:
        super().__init__()
        self.eps = eps
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones; mark its role: each rank sees its own heads."""
        mark(self.weight, tp_grad=None if self.axis is None else "sum")
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`[..., heads, width]` to the same, with statistics in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        spread = x.to(wide)
        normed = spread * (spread.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (self.weight * normed.to(x.dtype) * F.silu(gate.to(wide))).to(x.dtype)


@dataclass(frozen=True)
class DeltaState:
    """The state of a layer between tokens. Its size does not depend on their number.

    Attributes:
        window: the last inputs of the convolution, `[batch, taps - 1, channels]`.
        state: `[batch, value_heads, key_width, value_width]`, float32 or wider.
    """

    window: Tensor
    state: Tensor


class GatedDeltaMixer(nn.Module):
    """The module of `GatedDeltaNet`, over `[batch, sequence, hidden]`.

    `input.weight` fuses, in this order, the rows of queries, keys, values, gates, steps and decays.
    Over tensor-parallel ranks each holds a run of the key heads and the value heads that they
    serve, so nothing is sent between the two projections.

    Args:
        config: the shape.
        sizes: of the layer.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Raises:
        ValueError: if heads are not divisible by the number of ranks.
    """

    caches = True

    def __init__(
        self, config: TransformerConfig, sizes: GatedDeltaNet, mesh: MeshLike = None
    ) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        self.sizes = sizes
        require_divisible("key_heads", sizes.key_heads, axis)
        blocks = tuple(sizes.widths_of_rows.values())
        ranks = 1 if axis is None else axis.size
        self.widths = tuple(rows // ranks for rows in blocks)
        self.input = from_residual(config, blocks, axis, bias=False)
        self.conv = CausalConvolution(blocks[:3], sizes.taps, axis, bias=False)
        self.rule = DeltaRule(sizes, axis)
        eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        self.norm = GatedHeadNorm(sizes.value_width, eps, axis)
        self.output = into_residual(config, blocks[3], axis, bias=False)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each token with those before it in its document.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism `[tokens / tp, hidden]`,
                which needs a context.
            context: has the shape and the documents; by default each row is one document.

        Returns:
            The same shape as `x`.
        """
        shape = x.shape[:2] if context is None else context.shape
        projected = self.input(x).view(*shape, -1)
        mixed, gate, b, a = projected.split((sum(self.widths[:3]), *self.widths[3:]), dim=-1)
        if context is not None and context.cache is not None:
            y = self._continued(mixed, a, b, context.cache)
        else:
            runs = None if context is None else context.runs
            y = self.rule(*self._heads(self.conv(mixed, runs)), a, b, runs)
        y = self.norm(y, gate.unflatten(-1, (-1, self.sizes.value_width))).flatten(-2)
        output: Tensor = self.output(y if x.ndim == 3 else y.flatten(0, 1))
        return output

    def _continued(self, mixed: Tensor, a: Tensor, b: Tensor, cache: TokenCache) -> Tensor:
        """The rule's results, after the tokens before these, whose state is in a cache."""
        before: DeltaState | None = cache.before()
        if before is None:
            y, state = self.rule.with_state(*self._heads(self.conv(mixed)), a, b)
            window = F.pad(mixed, (0, 0, self.sizes.taps - 1, 0))[:, mixed.shape[1] :]
        else:
            convolved, window = self.conv.step(mixed[:, 0], before.window)
            heads = self._heads(convolved)
            y, state = self.rule.step(*heads, a[:, 0], b[:, 0], before.state)
            y = y[:, None]
        cache.keep(DeltaState(window, state))
        return y

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = torch.split(mixed, list(self.widths[:3]), dim=-1)
        widths = self.sizes.key_width, self.sizes.key_width, self.sizes.value_width
        q, k, v = (
            torch.unflatten(each, -1, (-1, width))
            for each, width in zip((query, key, value), widths, strict=True)
        )
        return q, k, v
