"""Mamba-1 in the place of attention (Mamba, Falcon Mamba)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import derive_seed, mark
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import AttentionContext, TokenCache
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
    require_in_order,
    require_positive,
)
from lamina.models.base.initialise import fill, uniform
from lamina.models.base.mesh_axes import MeshLike, axis_of, require_divisible
from lamina.models.base.weight_link import WeightLink
from lamina.models.layers.linear import (
    RowParallelLinear,
    for_cut_layers,
    from_residual,
    into_residual,
)
from lamina.models.layers.norms import RMSNorm
from lamina.models.mamba.block import before_softplus
from lamina.models.mamba.convolution import CausalConvolution
from lamina.models.mamba.selective_scan import selective_scan

_MADE = ("dt", "b", "c")
"""What is made from all channels of a token: the source of its steps, B and C."""


@dataclass(frozen=True, kw_only=True)
class Mamba1(AttentionVariant):
    """The first Mamba: the elements of each channel's state decay at rates of their own.

    It costs the same for each token, however many there were before. A model of it alone has
    `layer_pattern="*" * num_layers` and `positions="none"`; other layers of a stack may have
    attention, as `LayerSpec(attention=Mamba1(...))` gives it to some. The config's heads and
    positions are not read.

    Source: Gu and Dao, Mamba, arXiv:2312.00752.

    Args:
        channels: width of what is scanned; twice the hidden size, if None. Over tensor-parallel
            ranks each holds a run of the channels.
        state_size: elements of a channel's state (N).
        step_rank: width from which the steps of all channels are made; `hidden_size / 16`, rounded
            up, if None.
        taps: tokens that the convolution before the scan sees, the token itself among them.
        conv_bias: whether the convolution has a bias.
        bias: whether the first and the last projection have biases.
        norms: what steps are made from, B and C are normalised: `weighted` by RMSNorms (Jamba),
            `plain` by RMSNorms without weights (Falcon Mamba). `none` leaves them as they are.
        norm_eps: added to the mean square under the root of these norms; that of the config, if
            None.
        chunk_size: tokens whose states are in memory at once; results do not depend on it.
        dt_min: the smallest initial step.
        dt_max: the largest; steps are drawn uniformly on a log scale.

    Raises:
        ValueError: for sizes below 1, a range that is empty, or `norm_eps` without `norms`.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            positions="none", layer_pattern="**", attention=Mamba1())
    """

    channels: int | None = None
    state_size: int = 16
    step_rank: int | None = None
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["none", "plain", "weighted"] = "none"
    norm_eps: float | None = None
    chunk_size: int = 64
    dt_min: float = 0.001
    dt_max: float = 0.1
    context_parallel = ()
    reads_documents = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "state_size", "taps", "chunk_size")
        require_at_least(1, self, "channels", "step_rank", optional=True)
        require_choices(self, Mamba1)
        if self.norm_eps is not None:
            require_positive(self, "norm_eps")
        if self.norms == "none":
            refuse_unread(self, ("norm_eps",), "norms is 'none'")
        require_in_order("dt_min and dt_max", self.dt_min, self.dt_max)

    def sizes(self, config: TransformerConfig) -> tuple[int, int]:
        """Channels over all ranks, and the width from which steps are made."""
        hidden = config.hidden_size
        return self.channels or 2 * hidden, self.step_rank or -(-hidden // 16)

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return SelectiveMixer(config, self, mesh)

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        if config.invariant:
            raise ValueError(
                "invariant=True beside Mamba1, whose states are products in an order that depends "
                "on the length of a chunk: leave one of them out"
            )

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        channels, rank = self.sizes(config)
        projections = 3 * config.hidden_size + 2 * rank + 2 * self.state_size
        return channels * (projections + self.taps)

    def products_per_pair(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.products_per_pair`."""
        return 0

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """See `LayerPart.products_per_token`."""
        # Each element of the state is multiplied with its decay, added to, and read.
        return 3.0 * self.sizes(config)[0] * self.state_size

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        names = {
            "input.weight": "in_proj.weight",
            "conv.weight": "conv1d.weight",
            "low.weight": "x_proj.weight",
            "scan.dt_weight": "dt_proj.weight",
            "scan.dt_bias": "dt_proj.bias",
            "scan.A_log": "A_log",
            "scan.D": "D",
            "output.weight": "out_proj.weight",
        }
        if self.conv_bias:
            names["conv.bias"] = "conv1d.bias"
        if self.bias:
            names |= {"input.bias": "in_proj.bias", "output.bias": "out_proj.bias"}
        if self.norms == "weighted":
            names |= {f"norms.{each}.weight": f"{each}_layernorm.weight" for each in _MADE}
        for name, other in names.items():
            yield WeightLink(f"{ours}.{name}", (f"{theirs}.{other}",))


class SelectiveScan(nn.Module):
    """The recurrence and its parameters, for this rank's channels.

    The names are those of the paper and of checkpoints: `A = -exp(A_log)` for each element of a
    channel's state, `dt = softplus(dt_weight low + dt_bias)`, `y += D x`.
    """

    casts_itself = True  # wrappers that cast inputs of modules in fp32 read this

    def __init__(self, sizes: Mamba1, config: TransformerConfig, axis: MeshAxis | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.axis = axis
        self.init_seed: int | None = None
        channels, rank = sizes.sizes(config)
        local = require_divisible("Mamba channels", channels, axis)
        self.A_log = nn.Parameter(torch.empty(local, sizes.state_size))
        self.dt_weight = nn.Parameter(torch.empty(local, rank))
        self.dt_bias = nn.Parameter(torch.empty(local))
        self.D = nn.Parameter(torch.empty(local))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set rates to 1, 2, 3, ... and D to ones, draw steps as the paper does; mark roles."""
        for parameter in self.parameters(recurse=False):
            mark(parameter, tp_shard_dim=None if self.axis is None else 0)
        bound = self.dt_weight.shape[1] ** -0.5
        limits = math.log(self.sizes.dt_min), math.log(self.sizes.dt_max)
        draws = {"dt_weight": uniform(-bound, bound),
                 "dt_bias": uniform(*limits, then=before_softplus)}  # fmt: skip
        for name, draw in draws.items():
            seed = None if self.init_seed is None else derive_seed(self.init_seed, name)
            fill(self.get_parameter(name), draw, seed, self.axis)
        with torch.no_grad():
            rates = torch.arange(1, self.sizes.state_size + 1, device=self.A_log.device)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, low: Tensor, b: Tensor, c: Tensor, runs: Tensor | None = None
    ) -> Tensor:
        """Run the scan over sequences; arguments as of `with_state`, the result like `x`."""
        return self.with_state(x, low, b, c, runs)[0]

    def with_state(
        self,
        x: Tensor,
        low: Tensor,
        b: Tensor,
        c: Tensor,
        runs: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The results in the dtype of x, and the state after the last token.

        Args:
            x: `[batch, sequence, channels]`.
            low: what steps are made from, `[batch, sequence, step_rank]`.
            b: `[batch, sequence, state_size]`.
            c: as `b`.
            runs: see `selective_scan`.
            state: see `selective_scan`.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = F.linear(low, self.dt_weight.to(low.dtype)).to(wide) + self.dt_bias.to(wide)
        rate = -self.A_log.to(wide).exp()
        y, state = selective_scan(
            x, F.softplus(steps), rate, b, c,
            chunk=self.sizes.chunk_size, runs=runs, state=state,
        )  # fmt: skip
        return (y + self.D * x).to(x.dtype), state


@dataclass(frozen=True)
class SelectiveState:
    """The state of a layer between tokens. Its size does not depend on their number.

    Attributes:
        window: the last inputs of the convolution, `[batch, taps - 1, channels]`.
        state: `[batch, channels, state_size]`, float32 or wider.
    """

    window: Tensor
    state: Tensor


class SelectiveMixer(nn.Module):
    """The module of `Mamba1`, over `[batch, sequence, hidden]`.

    `input.weight` fuses the rows of x and of the gate. Over tensor-parallel ranks each holds a run
    of the channels. Steps, B and C are made from all channels, so that one sum over ranks, a few
    hundred elements for each token, is between the two projections.

    Args:
        config: the shape.
        sizes: of the layer.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Raises:
        ValueError: if the channels are not divisible by the number of ranks.
    """

    caches = True

    def __init__(self, config: TransformerConfig, sizes: Mamba1, mesh: MeshLike = None) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        self.axis = axis = axis_of(mesh, "tp")
        channels, rank = sizes.sizes(config)
        self.widths = [rank, sizes.state_size, sizes.state_size]
        self.input = from_residual(config, (channels, channels), axis, bias=sizes.bias)
        self.conv = CausalConvolution((channels,), sizes.taps, axis, bias=sizes.conv_bias)
        self.low = RowParallelLinear(
            channels, sum(self.widths), axis, sequence_parallel=config.sequence_parallel,
            init_std=config.init_std, reduction=config.tp_reduction,
        )  # fmt: skip
        eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        weights = ("weight",) if sizes.norms == "weighted" else ()
        cut, normed = self.low.sequence_parallel, self.widths if sizes.norms != "none" else ()
        self.norms = nn.ModuleDict(
            {
                n: RMSNorm(w, eps, partial=cut, names=weights)
                for n, w in zip(_MADE, normed, strict=False)
            }
        )
        self.scan = SelectiveScan(sizes, config, axis)
        self.output = into_residual(config, channels, axis, bias=sizes.bias)

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
        inputs, gate = self.input(x).view(*shape, -1).chunk(2, dim=-1)
        if context is not None and context.cache is not None:
            y = self._continued(inputs, context.cache)
        else:
            runs = None if context is None else context.runs
            convolved = self.conv(inputs, runs)
            y = self.scan(convolved, *self._made_from(convolved), runs)
        y = y * F.silu(gate)
        output: Tensor = self.output(y if x.ndim == 3 else y.flatten(0, 1))
        return output

    def _made_from(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The source of steps, B and C, from the convolved `[batch, tokens, channels]`."""
        # Under sequence parallelism the sum over ranks comes in pieces of the tokens.
        low = self.low(x.flatten(0, 1) if self.low.sequence_parallel else x)
        if self.norms:
            parts = zip(self.norms.values(), torch.split(low, self.widths, dim=-1), strict=True)
            low = torch.cat([norm(part) for norm, part in parts], dim=-1)
        low = for_cut_layers(low, self.config, self.axis).view(*x.shape[:2], -1)
        source, b, c = torch.split(low, self.widths, dim=-1)
        return source, b, c

    def _continued(self, inputs: Tensor, cache: TokenCache) -> Tensor:
        """The scan's results, after the tokens before these, whose state is in a cache."""
        before: SelectiveState | None = cache.before()
        if before is None:
            convolved, state = self.conv(inputs), None
            window = F.pad(inputs, (0, 0, self.sizes.taps - 1, 0))[:, inputs.shape[1] :]
        else:
            token, window = self.conv.step(inputs[:, 0], before.window)
            convolved, state = token[:, None], before.state
        made = self._made_from(convolved)
        y, after = self.scan.with_state(convolved, *made, state=state)
        cache.keep(SelectiveState(window, after))
        return y
