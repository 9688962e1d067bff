"""A causal convolution of each channel whose gradients have one order of summation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.invariance.token_sums import TokenSum, delivered


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
