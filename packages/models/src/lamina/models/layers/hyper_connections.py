"""Residual streams: what a layer reads of them, and how they take its result.

See `HyperConnections`. Between blocks the streams of a token lie one after the other:
`[batch, sequence, streams * hidden]`, or `[tokens / tp, streams * hidden]` under sequence
parallelism. So whatever moves activations needs to know their width alone.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.mesh import mark
from lamina.models.base.applied import applied
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.hyper_connections import HyperConnections
from lamina.models.base.initialise import fill, normal
from lamina.models.layers.matmul_products import without_autocast

_FIRST_SCALE = 0.01
"""How much of the first numbers is of the token: little, so that a new model is a plain one."""
_FIRST_DIAGONAL = 4.0
"""The diagonal of the first matrix, as logits: a stream keeps most of itself."""


class Factors(NamedTuple):
    """How a token's streams take a layer's result, in float32 or wider."""

    write: Tensor
    """What the result is multiplied with for each stream: `[..., streams]`."""
    mix: Tensor | None
    """The matrix of the streams, `[..., from, to]`; None leaves them."""


class _TokenLogits(torch.autograd.Function):
    """`rms_norm(x) @ weight.T` in float32 or wider, which keeps x in its own dtype for backward.

    What autograd would keep is x in float32, and normalised: four times the streams in bf16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device):
            products = F.linear(wide, weight.to(wide.dtype))
        inverse = wide.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, weight, products, inverse)
        return products * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, products, inverse = ctx.saved_tensors
        wide, by_product = x.to(grad.dtype), grad * inverse
        # The norm is one number for all elements of x, and its slope is along x.
        by_norm = (grad * products).sum(dim=-1, keepdim=True) * inverse**3 / x.shape[-1]
        with without_autocast(x.device):
            grad_x = by_product @ weight.to(grad.dtype) - by_norm * wide
            grad_weight = by_product.flatten(0, -2).T @ wide.flatten(0, -2)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _DoublyStochastic(torch.autograd.Function):
    """Matrices whose rows and columns have the sum one (Sinkhorn and Knopp, 1967).

    Columns and rows are divided by their sums, in turn, from and to columns. Only the sums are kept
    for backward, which multiplies by them to have each matrix again. Autograd would keep each
    matrix beside its sums.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        matrix, sums = logits.softmax(dim=-1) + eps, []
        for step in range(2 * iterations - 1):
            sums.append(matrix.sum(dim=-1 if step % 2 else -2, keepdim=True) + eps)
            matrix = matrix / sums[-1]
        ctx.eps = eps
        ctx.save_for_backward(matrix, *sums)
        return matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matrix, *sums = ctx.saved_tensors
        for step, total in reversed(list(enumerate(sums))):
            dim = -1 if step % 2 else -2
            grad = (grad - (grad * matrix).sum(dim=dim, keepdim=True)) / total
            matrix = matrix * total
        softmax = matrix - ctx.eps
        return softmax * (grad - (grad * softmax).sum(dim=-1, keepdim=True)), None, None


class _StreamNumbers(nn.Module):
    """Numbers that follow from a token's streams, in kinds of `counts` each.

    `weight` is `[numbers, streams * hidden]`. Each kind has a factor in `scale`, and each number
    its own `bias`. They are whole on every tensor-parallel rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: HyperConnections,
        counts: list[int],
        partial: bool,
    ) -> None:
        super().__init__()
        self.sizes, self.counts, self.partial = sizes, counts, partial
        self.norm_eps, self.init_std = config.norm_eps, config.init_std
        self.init_seed: int | None = None
        self.weight = nn.Parameter(torch.empty(sum(counts), sizes.streams * config.hidden_size))
        self.bias = nn.Parameter(torch.empty(sum(counts)))
        self.scale = nn.Parameter(torch.empty(len(counts)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, and mark the roles. A new model reads the mean of equal streams."""
        for parameter in self.parameters(recurse=False):
            mark(parameter, tp_grad="sum" if self.partial else None)
        fill(self.weight, normal(self.init_std), self.init_seed)
        nn.init.constant_(self.scale, _FIRST_SCALE)
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.bias[: self.sizes.streams].fill_(-math.log(self.sizes.streams - 1))

    def numbers(self, x: Tensor) -> list[Tensor]:
        """The kinds, each `[..., count]`, in float32 or wider."""
        logits = applied(_TokenLogits, x, self.weight, self.norm_eps)
        parts = zip(
            torch.split(logits, self.counts, dim=-1),
            self.scale.to(logits.dtype).unbind(),
            torch.split(self.bias.to(logits.dtype), self.counts),
            strict=True,
        )
        return [torch.addcmul(bias, scale, part) for part, scale, bias in parts]

    def summed(self, x: Tensor, logits: Tensor) -> Tensor:
        """The weighted sum of the streams, `[..., hidden]`."""
        weights = (logits.sigmoid() + self.sizes.eps).unsqueeze(-1)
        return (weights * _one_by_one(x, self.sizes.streams)).sum(dim=-2).to(x.dtype)


class StreamSum(_StreamNumbers):
    """The sum of the streams that the final norm and the head read.

    Args:
        config: the shape.
        sizes: its hyper-connections.
        partial: each tensor-parallel rank sees other tokens, so that gradients are summed.
    """

    def __init__(self, config: TransformerConfig, sizes: HyperConnections, partial: bool) -> None:
        super().__init__(config, sizes, [sizes.streams], partial)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., streams * hidden]` to `[..., hidden]`."""
        (logits,) = self.numbers(x)
        return self.summed(x, logits)


class HyperConnection(_StreamNumbers):
    """What attention, MLP or mixer reads of the streams, and the factors of `written`.

    Args:
        config: the shape.
        sizes: its hyper-connections.
        partial: each tensor-parallel rank sees other tokens, so that gradients are summed.
    """

    def __init__(self, config: TransformerConfig, sizes: HyperConnections, partial: bool) -> None:
        n = sizes.streams
        super().__init__(config, sizes, [n, n, n * n] if sizes.mixed else [n, n], partial)

    def reset_parameters(self) -> None:
        """Set the matrix near to that which leaves the streams, and the factors to about one."""
        super().reset_parameters()
        if self.sizes.mixed:
            with torch.no_grad():
                n = self.sizes.streams
                self.bias[-n * n :].view(n, n).fill_diagonal_(_FIRST_DIAGONAL)

    def forward(self, x: Tensor) -> tuple[Tensor, Factors]:
        """`[..., streams * hidden]` to the sum that is read, `[..., hidden]`, and the factors."""
        read, write, *mix = self.numbers(x)
        factors = self.sizes.magnitude * write.sigmoid()
        if not mix:
            return self.summed(x, read), Factors(factors, None)
        logits = _one_by_one(mix[0], self.sizes.streams)
        matrix = applied(_DoublyStochastic, logits, self.sizes.iterations, self.sizes.eps)
        return self.summed(x, read), Factors(factors, matrix)


def written(x: Tensor, update: Tensor, factors: Factors) -> Tensor:
    """Streams `[..., streams * hidden]` that have taken an update `[..., hidden]`."""
    streams = _one_by_one(x, factors.write.shape[-1])
    if factors.mix is not None:
        with without_autocast(x.device):
            streams = factors.mix.to(x.dtype).transpose(-1, -2) @ streams
    added = factors.write.to(x.dtype).unsqueeze(-1) * update.unsqueeze(-2)
    return (streams + added).flatten(-2)


def _one_by_one(x: Tensor, streams: int) -> Tensor:
    """`[..., streams * width]` as `[..., streams, width]`."""
    return x.view(*x.shape[:-1], streams, -1)
