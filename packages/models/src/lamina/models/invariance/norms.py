"""Norms over the last dimension whose rows and gradients have one order of summation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import start_all_reduce
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied, in_dtype
from lamina.models.invariance.products import cut_blocks, fold, row_sum
from lamina.models.invariance.token_sums import TokenSum, delivered


@dataclass(frozen=True)
class WidthSum:
    """The sum of each row `[..., width]` of a dimension that tp may cut: `[..., 1]`, float32.

    Attributes:
        axis: the ranks, which have a piece each; None is one process with the whole.
        blocks: into which the whole is cut, if ranks may have pieces; 1 is never cut.
    """

    axis: MeshAxis | None = None
    blocks: int = 1

    @classmethod
    def of_cut(cls, width: int, axis: MeshAxis | None) -> "WidthSum":
        """Sums over a width, over all ranks; ValueError if they do not divide its blocks."""
        ranks = 1 if axis is None else axis.size
        return cls(axis, len(cut_blocks((width,), ranks)) * ranks)

    def __call__(self, x: Tensor) -> Tensor:
        """Add each row of float32 numbers."""
        if self.blocks == 1:
            return row_sum(x)
        ranks = 1 if self.axis is None else self.axis.size
        sums = row_sum(torch.unflatten(x, -1, (self.blocks // ranks, -1)))
        total = fold(sums, dim=-2)
        if self.axis is None:
            return total
        return start_all_reduce(total.contiguous(), self.axis.group, async_op=False).wait()


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    size: int,
    eps: float,
    total: TokenSum,
    centred: bool = False,
    plus_one: bool = False,
    over: WidthSum | None = None,
) -> Tensor:
    """`(x - mean) / rms(x - mean) * weight + bias` of each row, in float32.

    Args:
        x: `[..., width]`.
        weight: `[width]`; None is ones.
        bias: `[width]`; None is zeros.
        size: the width over all ranks.
        eps: added to the mean square under the root.
        total: sums the parameters' gradients over tokens.
        centred: subtract the mean; otherwise it counts as zero.
        plus_one: the factor is 1 + weight.
        over: sums of rows that ranks have pieces of; by default rows are whole.

    Returns:
        The shape and dtype of `x`.
    """
    how = _How(size, eps, total, centred, plus_one, over or WidthSum())
    return applied(_Normalise, x, weight, bias, how)


@dataclass(frozen=True)
class _How:
    """What `normalise` is told, beside its tensors."""

    size: int
    eps: float
    total: TokenSum
    centred: bool
    plus_one: bool
    over: WidthSum

    def factor(self, weight: Tensor | None) -> Tensor | float:
        """What multiplies the normalised elements."""
        if weight is None:
            return 1.0
        return weight.float() + 1.0 if self.plus_one else weight.float()

    def mean(self, x: Tensor) -> Tensor:
        """The mean of each row."""
        return self.over(x) / self.size

    def normal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with mean square one, and what they were multiplied by."""
        x = x.float()
        if self.centred:
            x = x - self.mean(x)
        # `rsqrt` is rounded by the place of an element; a root and a quotient are exact.
        scale = 1.0 / (self.mean(x * x) + self.eps).sqrt()
        return x * scale, scale


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: _How
    ) -> Tensor:
        normed, _ = how.normal(x)
        ctx.save_for_backward(x, weight)
        ctx.how = how
        ctx.weight, ctx.bias = (p if p is not None and p.is_leaf else None for p in (weight, bias))
        y = normed * how.factor(weight)
        return in_dtype(y if bias is None else y + bias.float(), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), how = ctx.saved_tensors, ctx.how
        normed, scale = how.normal(x)
        grad = grad.float()
        by_weight = by_bias = None
        if ctx.needs_input_grad[1]:
            by_weight = delivered(ctx.weight, how.total(grad * normed))
        if ctx.needs_input_grad[2]:
            by_bias = delivered(ctx.bias, how.total(grad))
        inner = grad * how.factor(weight)
        grad_x = inner - normed * how.mean(inner * normed)
        if how.centred:
            grad_x = grad_x - how.mean(inner)
        return (grad_x * scale).to(x.dtype), by_weight, by_bias, None
