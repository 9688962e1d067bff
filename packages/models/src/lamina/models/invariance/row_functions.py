"""Functions of rows and matrices whose gradients have one order of summation.

torch's own operators add the gradients of what they broadcast in an order that depends on shapes,
and so on the batch and the ranks. These add each row by itself, and matrices by `product`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.invariance.products import fold, product, row_sum
from lamina.models.invariance.token_sums import TokenSum, delivered


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """`[..., width]` with each row multiplied by one of `[...]`."""
    return applied(_ScaleRows, x, factors)


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors)
        return x * factors.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, factors = ctx.saved_tensors
        return grad * factors.unsqueeze(-1), row_sum(grad * x).squeeze(-1)


def row_softmax(x: Tensor) -> Tensor:
    """The softmax of each row of float32 `[..., width]`.

    On a CPU torch adds each row by itself. On a GPU its order depends on the number of rows.
    """
    if not x.is_cuda:
        return x.softmax(-1)
    return to_one((x - x.detach().amax(dim=-1, keepdim=True)).exp())


def to_one(x: Tensor, eps: float = 1e-20) -> Tensor:
    """Each row divided by its sum; a gradient's sum is as that of `row_softmax`."""
    total = row_sum(x) + eps
    return scale_rows(x, 1.0 / total.squeeze(-1)) if x.is_cuda else x / total


def log_sum_exp(x: Tensor) -> Tensor:
    """`x.logsumexp(-1)` of rows, as `row_softmax`: `[...]`."""
    if not x.is_cuda:
        return x.logsumexp(-1)
    largest = x.detach().amax(dim=-1, keepdim=True)
    return (row_sum((x - largest).exp()).log() + largest).squeeze(-1)


def running_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)`, as `row_softmax`: on a GPU each doubling of the reach is one addition."""
    if not x.is_cuda:
        return x.cumsum(dim=-1)
    reach = 1
    while reach < x.shape[-1]:
        x = x + F.pad(x[..., :-reach], (reach, 0))
        reach *= 2
    return x


def matrix_products(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of matrices `[..., m, k]` and `[..., k, n]` in float32, see `product`."""
    return applied(_MatrixProducts, left, right)


class _MatrixProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return _products(left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return _products(grad, right.transpose(-1, -2)), _products(left.transpose(-1, -2), grad)


def _products(left: Tensor, right: Tensor) -> Tensor:
    flat = product(left.flatten(0, -3), right.flatten(0, -3))
    return flat.view(*left.shape[:-1], right.shape[-1])


def for_each(x: Tensor, copies: int, dim: int) -> Tensor:
    """Copies of a tensor along a new dimension; their gradients are added in the tree."""
    return applied(_ForEach, x, copies, dim)


class _ForEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, dim: int) -> Tensor:
        ctx.dim = dim
        return torch.stack([x] * copies, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return fold(grad, dim=ctx.dim), None, None


def below_last(x: Tensor) -> Tensor:
    """`x[..., -1:] - x` of rows `[..., width]`."""
    return applied(_BelowLast, x)


class _BelowLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[..., -1:] - x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        by_x = -grad
        by_x[..., -1:] += row_sum(grad)
        return by_x


def decay_between(x: Tensor, allowed: Tensor) -> Tensor:
    """`exp(x[i] - x[j])` of the elements of rows `[..., width]`, zero where it is not allowed.

    Args:
        x: `[..., width]`.
        allowed: bool, broadcast to the result.

    Returns:
        `[..., width, width]`, with i before j.
    """
    return applied(_DecayBetween, x, allowed)


class _DecayBetween(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, allowed: Tensor) -> Tensor:
        # Masked before the exponential, which would overflow above the diagonal (inf * 0 is NaN).
        difference = x.unsqueeze(-1) - x.unsqueeze(-2)
        decay = difference.masked_fill(~allowed, -torch.inf).exp()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (decay,) = ctx.saved_tensors
        inner = grad * decay
        by_rows, by_columns = row_sum(inner), row_sum(inner.transpose(-1, -2))
        return (by_rows - by_columns).squeeze(-1), None


def times_vector(
    x: Tensor,
    vector: Tensor,
    total: TokenSum,
    *,
    rows: bool = False,
    negative_exponential: bool = False,
) -> Tensor:
    """`[..., n]`, or with `rows` `[..., n, width]`, multiplied by a parameter `[n]`, in float32.

    The factor is the parameter p, or `-exp(p)`. `total` sums its gradient over the tokens.
    """
    return applied(_TimesVector, x, vector, total, rows, negative_exponential)


class _TimesVector(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, vector: Tensor, total: TokenSum, rows: bool, exponential: bool
    ) -> Tensor:
        ctx.rows, ctx.exponential = rows, exponential
        ctx.parameter, ctx.total = vector if vector.is_leaf else None, total
        factor = -vector.float().exp() if exponential else vector.float()
        ctx.save_for_backward(x, factor)
        return x.float() * (factor.unsqueeze(-1) if rows else factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        by_vector = None
        if ctx.needs_input_grad[1]:
            products = grad * x.float()
            values = row_sum(products).squeeze(-1) if ctx.rows else products
            if ctx.exponential:
                # The derivative of -exp(p) is itself. Each token's value is multiplied, as a sum
                # over some of the tokens would be rounded once more.
                values = values * factor
            by_vector = delivered(ctx.parameter, ctx.total(values))
        by_x = grad * (factor.unsqueeze(-1) if ctx.rows else factor)
        return by_x.to(x.dtype), by_vector, None, None, None


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` of float32 numbers; see Note [Functions of elements] of `token_sums`."""
    return applied(_Softplus, x)


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        small = torch.exp(-x.abs())
        # log(1 + small), without the error of the sum (Goldberg, 1991, theorem 4).
        above = 1.0 + small
        tiny = above == 1.0
        ratio = torch.log(above) * small / torch.where(tiny, 1.0, above - 1.0)
        return x.clamp(min=0.0) + torch.where(tiny, small, ratio)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (0.5 + 0.5 * torch.tanh(0.5 * x))
