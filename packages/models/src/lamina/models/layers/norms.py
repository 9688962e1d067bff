"""Normalisation over the last dimension."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.mesh import mark
from lamina.models.base.applied import applied
from lamina.models.base.config import TransformerConfig


class _Norm(nn.Module):
    """What both norms have in common: parameters over the last dimension."""

    has_bias: ClassVar[bool] = False
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float = 1e-5, *, partial: bool = False) -> None:
        super().__init__()
        self.size, self.eps, self.partial = size, eps, partial
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if self.has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and a bias to zeros, and mark their roles."""
        for parameter in self.parameters(recurse=False):
            mark(parameter, tp_grad="sum" if self.partial else None)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """The width and `eps`, for printing."""
        return f"{self.size}, eps={self.eps}"


class RMSNorm(_Norm):
    """`x / rms(x) * weight` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        size: width of the last dimension.
        eps: added to the mean square under the root.
        partial: each tensor-parallel rank sees other tokens or heads, so that gradients are summed.

    Examples:
        >>> RMSNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]` with statistics in float32 or wider; keeps x's dtype."""
        if x.device.type != "cpu":
            return torch.rms_norm(x, (self.size,), self.weight, self.eps)
        # torch has no fused RMSNorm on a CPU; its backward takes three times as long (0605).
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = applied(_RMSNormOnCPU, x.to(wide), self.weight.to(wide), self.eps)
        return normed.to(dtype=x.dtype)


class _RMSNormOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = x * scale
        # Dynamo of torch 2.11 gives wrong gradients where a product is written to in place.
        return normed * weight if torch.compiler.is_compiling() else normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        # If the mean is given as zero, the backward of LayerNorm differs from that of RMSNorm in
        # one term only, the mean of the gradient, which it subtracts. That term is added back.
        grad = grad.contiguous()
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [x.shape[-1]], torch.zeros_like(scale), scale, weight, None,
            [True, True, False],
        )  # fmt: skip
        grad_x.addcmul_(scale, (grad @ weight).unsqueeze(-1), value=1.0 / x.shape[-1])
        return grad_x, grad_weight, None


class LayerNorm(_Norm):
    """`(x - mean) / std * weight + bias` over the last dimension (Ba et al., 2016).

    Args:
        size: width of the last dimension.
        eps: added to the variance under the root.
        partial: each tensor-parallel rank sees other tokens, so that gradients are summed.

    Examples:
        >>> LayerNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; the result has x's dtype."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


def make_norm(config: TransformerConfig, *, partial: bool = False) -> RMSNorm | LayerNorm:
    """Build the norm that the config names, over the hidden size."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, config.norm_eps, partial=partial)
