"""Normalisation over the last dimension."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.mesh import mark
from lamina.models.base.config import TransformerConfig

__all__ = ["LayerNorm", "RMSNorm", "make_norm"]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        size: width of the last dimension.
        eps: added to the mean square under the root.
        partial: each tensor-parallel rank sees other tokens or heads, so that gradients are summed.

    Examples:
        >>> RMSNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, size: int, eps: float = 1e-5, *, partial: bool = False) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.partial = partial
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones, and mark its role."""
        mark(self.weight, tp_grad="sum" if self.partial else None)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]` with statistics in float32 or wider; keeps x's dtype."""
        if x.device.type != "cpu":
            return torch.rms_norm(x, (self.size,), self.weight, self.eps)
        # torch has no fused RMSNorm on a CPU; its backward takes three times as long (0605).
        wide = torch.promote_types(x.dtype, torch.float32)
        normed: Tensor = _RMSNormOnCPU.apply(x.to(wide), self.weight.to(wide), self.eps)  # type: ignore[no-untyped-call]
        return normed.to(dtype=x.dtype)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.size}, eps={self.eps}"


class _RMSNormOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

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


class LayerNorm(nn.Module):
    """`(x - mean) / std * weight + bias` over the last dimension (Ba et al., 2016).

    Args:
        size: width of the last dimension.
        eps: added to the variance under the root.
        partial: each tensor-parallel rank sees other tokens, so that gradients are summed.
    """

    def __init__(self, size: int, eps: float = 1e-5, *, partial: bool = False) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.partial = partial
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros, and mark their roles."""
        for parameter in (self.weight, self.bias):
            mark(parameter, tp_grad="sum" if self.partial else None)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; the result has x's dtype."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.size}, eps={self.eps}"


def make_norm(config: TransformerConfig, *, partial: bool = False) -> RMSNorm | LayerNorm:
    """Build the norm that the config names, over the hidden size."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, config.norm_eps, partial=partial)
