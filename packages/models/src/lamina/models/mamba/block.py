"""The Mamba-2 mixer: projection, short convolution, selective scan, gated norm, projection."""

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
from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.base.initialise import fill, uniform
from lamina.models.base.mesh_axes import MeshLike, axis_of, require_divisible
from lamina.models.base.weight_link import WeightLink
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.products import row_sum
from lamina.models.invariance.row_functions import scale_rows, softplus, times_vector
from lamina.models.invariance.token_sums import ACTIVATIONS, TokenSum, add_vector
from lamina.models.layers.linear import from_residual, into_residual
from lamina.models.mamba.convolution import CausalConvolution
from lamina.models.mamba.scan import (
    choose_path,
    chunked_scan,
    fixed_scan,
    kernel_scan,
    scan_step,
)

_silu = ACTIVATIONS["silu"]
"""`F.silu`, for sums in the order of the model."""


class StateSpaceScan(FixedSums, nn.Module):
    """The recurrence and its parameters: a decay rate, a bias of the step and a skip per head.

    The names are those of the paper and of checkpoints: `A = -exp(A_log)`, `dt = softplus(dt +
    dt_bias)`, `y += D x`. The number of heads is that over all ranks of the axis.
    """

    casts_itself = True  # wrappers that cast inputs of modules in fp32 read this

    def __init__(self, sizes: MambaConfig, heads: int, axis: MeshAxis | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.axis = axis
        self.init_seed: int | None = None
        local_heads = require_divisible("Mamba heads", heads, axis)
        self.A_log = nn.Parameter(torch.empty(local_heads))
        self.dt_bias = nn.Parameter(torch.empty(local_heads))
        self.D = nn.Parameter(torch.empty(local_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates uniformly, and steps uniformly on a log scale; set D to ones; mark roles."""
        if self.axis is not None:
            for parameter in (self.A_log, self.dt_bias, self.D):
                mark(parameter, tp_shard_dim=0)
        seeds = [
            None if self.init_seed is None else derive_seed(self.init_seed, name)
            for name in ("A_log", "dt_bias")
        ]
        rates = uniform(*self.sizes.decay_range, then=torch.log)
        fill(self.A_log, rates, seeds[0], self.axis)
        limits = math.log(self.sizes.dt_min), math.log(self.sizes.dt_max)
        fill(self.dt_bias, uniform(*limits, then=before_softplus), seeds[1], self.axis)
        nn.init.ones_(self.D)

    def steps(self, dt: Tensor) -> Tensor:
        """Step sizes `[..., heads]` in float32 or wider."""
        wide = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        return dt if self.sizes.dt_limit == (0.0, math.inf) else dt.clamp(*self.sizes.dt_limit)

    @property
    def rate(self) -> Tensor:
        """A: negative, `[heads]`, in float32 or wider."""
        return -self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32)).exp()

    def forward(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, runs: Tensor | None = None
    ) -> Tensor:
        """Run the scan; shapes as of `chunked_scan`, the result in the dtype of x."""
        if self.tokens is not None:
            return self._in_order(x, dt, b, c, runs, TokenSum(self.tokens.of(x)))
        path = choose_path(self.sizes.path, x.device, x.dtype)
        steps = self.steps(dt)
        if path == "fla":
            y = kernel_scan(x, steps, self.rate, b, c, runs=runs)
        else:
            chunk = self.sizes.chunk_size
            y, _ = chunked_scan(x, steps, self.rate, b, c, chunk=chunk, runs=runs)
        return self.skip(y, x)

    def skip(self, y: Tensor, x: Tensor) -> Tensor:
        """The scan's result with the inputs' share, in the dtype of the inputs."""
        return (y + self.D.unsqueeze(-1) * x).to(x.dtype)

    def _in_order(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        runs: Tensor | None,
        total: TokenSum,
    ) -> Tensor:
        """`forward` in the order of the model."""
        steps = softplus(add_vector(dt.float(), self.dt_bias, total))
        if self.sizes.dt_limit != (0.0, math.inf):
            steps = steps.clamp(*self.sizes.dt_limit)
        decay = times_vector(steps, self.A_log, total, negative_exponential=True)
        y = fixed_scan(x, steps, decay, b, c, chunk=self.sizes.chunk_size, runs=runs)
        return (y + times_vector(x, self.D, total, rows=True)).to(x.dtype)

    def step(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute one token; shapes as of `scan_step`."""
        y, state = scan_step(x, self.steps(dt), self.rate, b, c, state)
        return self.skip(y, x), state


def before_softplus(log_dt: Tensor) -> Tensor:
    """The bias whose softplus is `exp(log_dt)`."""
    dt = log_dt.exp()
    return dt + torch.log(-torch.expm1(-dt))


class GatedNorm(FixedSums, nn.Module):
    """RMSNorm of `x * silu(gate)`, separately over each group of channels.

    A group is on one rank as a whole, so tensor-parallel ranks exchange no statistics (0682).
    Numbers of channels and groups are those over all ranks of the axis.
    """

    def __init__(self, channels: int, groups: int, eps: float, axis: MeshAxis | None) -> None:
        super().__init__()
        self.axis = axis
        self.eps = eps
        self.width = channels // groups
        self.weight = nn.Parameter(torch.empty(require_divisible("channels", channels, axis)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones; mark its role."""
        if self.axis is not None:
            mark(self.weight, tp_shard_dim=0)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`[..., channels]` to the same, with statistics in float32 or wider."""
        if self.tokens is not None:
            gated = torch.unflatten(x.float() * _silu(gate.float()), -1, (-1, self.width))
            mean = row_sum(gated.square()).squeeze(-1) / self.width
            normed = scale_rows(gated, 1.0 / (mean + self.eps).sqrt()).flatten(-2)
            return times_vector(normed, self.weight, TokenSum(self.tokens.of(x))).to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = torch.unflatten(x.to(wide) * F.silu(gate.to(wide)), -1, (-1, self.width))
        scale = (gated.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        normed = (gated * scale).flatten(-2).to(x.dtype)
        return normed * self.weight


@dataclass(frozen=True)
class MambaState:
    """The state of a Mamba layer between tokens. Its size does not depend on their number.

    Attributes:
        window: the last inputs of the convolution, `[batch, conv_kernel - 1, channels]`.
        state: `[batch, heads, head_dim, state_size]`, float32 or wider.
    """

    window: Tensor
    state: Tensor


class MambaMixer(nn.Module):
    """Mamba-2 (Dao and Gu, 2024) in place of attention, over `[batch, sequence, hidden]`.

    `input.weight` fuses, in this order, the rows of gate, x, B, C and dt. Over tensor-parallel
    ranks each holds a run of the heads and the groups of these heads, so nothing is sent between
    the two projections.

    Args:
        config: the shape; its `mamba` has the sizes of the layer.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Raises:
        ValueError: if the config has no `mamba`, or heads or groups are not divisible by the
            number of ranks.
    """

    caches = True

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        self.sizes = sizes = sizes_of(config)
        heads = sizes.heads(config.hidden_size)
        inner, shared = heads * sizes.head_dim, sizes.groups * sizes.state_size
        self.heads = require_divisible("Mamba heads", heads, axis)
        self.groups = require_divisible("Mamba groups", sizes.groups, axis)
        ranks = 1 if axis is None else axis.size
        self.widths = (inner // ranks, (inner + 2 * shared) // ranks, self.heads)
        self.channels = (inner // ranks, shared // ranks, shared // ranks)
        # Nothing is sent between the two projections, and what is sent outside is summed in order.
        blocks = (inner, inner, shared, shared, heads)
        self.input = from_residual(config, blocks, axis, bias=sizes.bias, reduction="ordered")
        self.conv = CausalConvolution(
            (inner, shared, shared), sizes.conv_kernel, axis, bias=sizes.conv_bias
        )
        self.scan = StateSpaceScan(sizes, heads, axis)
        self.norm = GatedNorm(inner, sizes.groups, config.norm_eps, axis)
        self.output = into_residual(config, inner, axis, bias=sizes.bias, reduction="ordered")

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Mix each token with those before it in its sequence.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism
                `[tokens / tp, hidden]`, which needs a context.
            context: has the shape and the documents; by default each row is one document.

        Returns:
            The same shape as `x`.
        """
        shape = x.shape[:2] if context is None else context.shape
        runs = None if context is None else context.runs
        gate, mixed, dt = self.input(x).view(*shape, -1).split(self.widths, dim=-1)
        if context is not None and context.cache is not None:
            y = self._continued(mixed, dt, context.cache)
        else:
            inputs, b, c = self._separate(self.conv(mixed, runs))
            y = self.scan(inputs, dt, b, c, runs)
        y = self.norm(y.flatten(-2), gate)
        output: Tensor = self.output(y if x.ndim == 3 else y.flatten(0, 1))
        return output

    def _continued(self, mixed: Tensor, dt: Tensor, cache: TokenCache) -> Tensor:
        """The scan's output, after the tokens before these, whose state is in a cache."""
        before: MambaState | None = cache.before()
        if before is None:
            inputs, b, c = self._separate(self.conv(mixed))
            steps, rate = self.scan.steps(dt), self.scan.rate
            y, state = chunked_scan(inputs, steps, rate, b, c, chunk=self.sizes.chunk_size)
            taps = self.sizes.conv_kernel - 1
            window = F.pad(mixed, (0, 0, taps, 0))[:, mixed.shape[1] :]
            cache.keep(MambaState(window, state))
            return self.scan.skip(y, inputs)
        convolved, window = self.conv.step(mixed[:, 0], before.window)
        inputs, b, c = self._separate(convolved)
        y, state = self.scan.step(inputs, dt[:, 0], b, c, before.state)
        cache.keep(MambaState(window, state))
        return y[:, None]

    def _separate(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, b, c = torch.split(mixed, list(self.channels), dim=-1)
        size = self.sizes.state_size
        return (
            torch.unflatten(x, -1, (self.heads, self.sizes.head_dim)),
            torch.unflatten(b, -1, (self.groups, size)),
            torch.unflatten(c, -1, (self.groups, size)),
        )

    def initial_state(self, batch: int) -> MambaState:
        """The state before the first token, which is zero."""
        weight = self.conv.weight
        window = weight.new_zeros(batch, self.sizes.conv_kernel - 1, weight.shape[0])
        shape = (batch, self.heads, self.sizes.head_dim, self.sizes.state_size)
        wide = torch.promote_types(weight.dtype, torch.float32)
        return MambaState(window, weight.new_zeros(shape, dtype=wide))

    def step(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        """Compute one token as `forward` does, at a cost that does not depend on its position.

        Args:
            x: `[batch, hidden]`.
            state: the state after the previous token.

        Returns:
            `[batch, hidden]`, and the next state.

        Raises:
            ValueError: under sequence parallelism, which cannot cut a single token.
        """
        if self.input.sequence_parallel:
            raise ValueError(
                "step() under sequence parallelism: build the model with sequence_parallel=False"
            )
        gate, mixed, dt = self.input(x).split(self.widths, dim=-1)
        convolved, window = self.conv.step(mixed, state.window)
        inputs, b, c = self._separate(convolved)
        y, scanned = self.scan.step(inputs, dt, b, c, state.state)
        y = self.norm(y.flatten(-2), gate)
        output: Tensor = self.output(y)
        return output, MambaState(window, scanned)


@dataclass(frozen=True, kw_only=True)
class Mamba2(AttentionVariant):
    """The mixer that the config's `mamba` describes.

    A layer of letter `M` is the mixer alone. To have it in the place of attention, with an MLP
    after it, give it to some layers: `layers=(LayerSpec(attention=Mamba2()), LayerSpec(), ...)`.

    Source: Dao and Gu, Transformers are SSMs, arXiv:2405.21060.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            attention=Mamba2(), mamba=MambaConfig(head_dim=16))
    """

    context_parallel = ()
    reads_documents = True
    reads_mamba = True

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        sizes_of(config)

    def products_per_pair(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.products_per_pair`."""
        return 0

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `LayerPart.make`."""
        return MambaMixer(config, mesh)

    def parameters(self, config: TransformerConfig) -> int:
        """See `LayerPart.parameters`."""
        sizes = sizes_of(config)
        heads = sizes.heads(config.hidden_size)
        inner, shared = heads * sizes.head_dim, sizes.groups * sizes.state_size
        projections = config.hidden_size * (3 * inner + 2 * shared + heads)
        return projections + sizes.conv_kernel * (inner + 2 * shared)

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """See `LayerPart.products_per_token`."""
        # The recurrence has two products per element of the state: its update and its output.
        sizes = sizes_of(config)
        return 2.0 * sizes.head_dim * sizes.state_size * sizes.heads(config.hidden_size)

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `LayerPart.huggingface_links`."""
        sizes = sizes_of(config)
        projections = ("weight", "bias") if sizes.bias else ("weight",)
        kinds = {
            "input": ("in_proj", projections),
            "conv": ("conv1d", ("weight", "bias") if sizes.conv_bias else ("weight",)),
            "scan": ("", ("A_log", "D", "dt_bias")),
            "norm": ("norm", ("weight",)),
            "output": ("out_proj", projections),
        }
        for part, (module, names) in kinds.items():
            for name in names:
                path = ".".join(filter(None, (theirs, module, name)))
                yield WeightLink(f"{ours}.{part}.{name}", (path,))


def sizes_of(config: TransformerConfig) -> MambaConfig:
    """The config's `mamba`; ValueError if it has none."""
    if config.mamba is None:
        raise ValueError("the config has no mamba: give mamba=MambaConfig(...)")
    return config.mamba
