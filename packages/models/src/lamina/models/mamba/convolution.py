"""A causal convolution of each channel over the last few tokens, and one with fixed sums."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.mesh import mark
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.initialise import fill, uniform
from lamina.models.base.mesh_axes import require_divisible
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.token_sums import ACTIVATIONS, TokenSum, add_vector, delivered
from lamina.models.layers.matmul_products import under_autocast

_silu = ACTIVATIONS["silu"]
"""`F.silu`, for sums in the order of the model."""


class CausalConvolution(FixedSums, nn.Module):
    """A causal convolution of each channel over the last `taps` tokens, then SiLU if `activated`.

    `weight` is `[channels, 1, taps]` as in `nn.Conv1d`; the last tap is that of the token itself.
    `blocks` are the numbers of channels, over all ranks of the axis, of x, B and C, each of which
    is cut separately.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        taps: int,
        axis: MeshAxis | None,
        *,
        bias: bool,
        activated: bool = True,
    ) -> None:
        super().__init__()
        self.activated = activated
        self.axis = axis
        self.blocks = blocks
        self.init_seed: int | None = None
        channels = sum(require_divisible("channels", block, axis) for block in blocks)
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Conv1d` does, set the bias to zero; mark their roles."""
        if self.axis is not None:
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    mark(parameter, tp_shard_dim=0, tp_blocks=self.blocks)
        bound = 1.0 / math.sqrt(self.weight.shape[-1])
        draw = uniform(-bound, bound)
        fill(self.weight, draw, self.init_seed, self.axis, blocks=self.blocks)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """`[batch, sequence, channels]` to the same, within each document of `runs`."""
        if self.tokens is not None:
            total = TokenSum(self.tokens.of(x))
            y = fixed_convolution(x, self.weight, runs, total)
            return _silu(y if self.bias is None else add_vector(y, self.bias, total)).to(x.dtype)
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        taps, length = weight.shape[-1], x.shape[1]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        y = x * weight[:, 0, -1]
        for tap in range(taps - 1):
            term = padded[:, tap : tap + length] * weight[:, 0, tap]
            if runs is not None:
                term = term * _same_document(runs, taps - 1 - tap)
            y = y + term
        y = y if bias is None else y + bias
        return F.silu(y) if self.activated else y

    def step(self, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one token `[batch, channels]`, given `window [batch, taps - 1, channels]`."""
        inputs = torch.cat((window, x.unsqueeze(1)), dim=1)
        y = (inputs * self.weight[:, 0].t()).sum(dim=1)
        y = y if self.bias is None else y + self.bias
        return F.silu(y) if self.activated else y, inputs[:, 1:]


def fixed_convolution(x: Tensor, weight: Tensor, runs: Tensor | None, total: TokenSum) -> Tensor:
    """Each channel with its taps over the last tokens, in float32.

    Args:
        x: `[batch, sequence, channels]`.
        weight: `[channels, 1, taps]`; the last tap is that of the token itself.
        runs: int64 `[batch, sequence]`: each token's document; None is one per sequence.
        total: sums the weight's gradient over tokens.
    """
    return applied(_Convolve, x, weight, runs, total)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, runs: Tensor | None, total: TokenSum
    ) -> Tensor:
        ctx.parameter, ctx.total = weight if weight.is_leaf else None, total
        ctx.save_for_backward(x, weight, runs)
        taps = weight.shape[-1]
        y = x.float() * weight[:, 0, -1].float()
        for tap in range(taps - 1):
            y = y + _shifted(x, runs, taps - 1 - tap) * weight[:, 0, tap].float()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, runs = ctx.saved_tensors
        taps, length = weight.shape[-1], x.shape[1]
        by_x = grad * weight[:, 0, -1].float()
        sums = []
        for tap in range(taps):
            back = taps - 1 - tap
            if ctx.needs_input_grad[1]:
                sums.append(ctx.total(grad * _shifted(x, runs, back)))
            if back:
                part = grad * weight[:, 0, tap].float()
                if runs is not None:
                    part = part * _same_document(runs, back)
                by_x += F.pad(part[:, back:], (0, 0, 0, min(back, length)))
        by_weight = None
        if sums:
            by_weight = delivered(ctx.parameter, torch.stack(sums, dim=-1).unsqueeze(1))
        return by_x.to(x.dtype), by_weight, None, None


def _shifted(x: Tensor, runs: Tensor | None, back: int) -> Tensor:
    """What each token sees so many tokens back, in its document; float32."""
    length = x.shape[1]
    moved = F.pad(x.float(), (0, 0, back, 0))[:, :length]
    return moved if runs is None else moved * _same_document(runs, back)


def _same_document(runs: Tensor, back: int) -> Tensor:
    """Whether the token so many tokens back is of the same document: `[batch, sequence, 1]`."""
    before = F.pad(runs, (back, 0), value=-1)[:, : runs.shape[1]]
    return (before == runs).unsqueeze(-1)
