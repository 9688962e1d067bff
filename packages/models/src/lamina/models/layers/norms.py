"""Normalisation over the last dimension."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.collectives import copy_to, reduce_from
from lamina.mesh import mark
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.computing_device import computes_on
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.elements import NormPart
from lamina.models.base.mesh_axes import require_divisible
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.norms import WidthSum, normalise
from lamina.models.invariance.token_sums import TokenSum


class _Norm(FixedSums, nn.Module):
    """What both norms have in common: parameters over the last dimension.

    `names` are those of the parameters that there are. With `zero_centred` the weight starts at
    zero, and one is added to it.
    """

    names: ClassVar[tuple[str, ...]] = ("weight",)
    centred: ClassVar[bool] = False
    per_head = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        *,
        partial: bool = False,
        names: tuple[str, ...] | None = None,
        zero_centred: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.partial, self.zero_centred = size, eps, partial, zero_centred
        names = self.names if names is None else names
        self.weight = nn.Parameter(torch.empty(size)) if "weight" in names else None
        self.bias = nn.Parameter(torch.empty(size)) if "bias" in names else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factor to ones and a bias to zeros, and mark their roles."""
        for parameter in self.parameters(recurse=False):
            mark(parameter, tp_grad="sum" if self.partial else None)
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centred else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def factor(self) -> Tensor | None:
        """What multiplies the normalised elements; None is one."""
        return 1.0 + self.weight if self.zero_centred and self.weight is not None else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; keeps x's dtype."""
        if self.tokens is None:
            return self.by_kernels(x)
        # The norms of queries and keys see `[..., heads, size]`.
        total = TokenSum(self.tokens.of(x), self.partial, self.per_head)
        return normalise(
            x, self.weight, self.bias, size=self.size, eps=self.eps, total=total,
            centred=self.centred, plus_one=self.zero_centred,
        )  # fmt: skip

    def by_kernels(self, x: Tensor) -> Tensor:
        """Normalise in whatever order a kernel has."""
        raise NotImplementedError

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

    def by_kernels(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]` with statistics in float32 or wider; keeps x's dtype."""
        factor = self.factor
        if factor is None or computes_on(x) != "cpu":
            return torch.rms_norm(x, (self.size,), factor, self.eps)
        return rms_norm_on_cpu(x, factor, self.eps)


def rms_norm_on_cpu(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    """RMSNorm as CPUs compute it.

    torch has no fused one there; its backward takes three times as long (decision 0605).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    writing = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if writing and x.dtype == factor.dtype == wide:
        return torch.rms_norm(x, x.shape[-1:], factor, eps)  # the fastest for one token
    arguments = x.to(wide), factor.to(wide), eps
    if torch.is_grad_enabled():
        normed = applied(_RMSNormOnCPU, *arguments)
    else:  # a call of an autograd function takes longer than the norm of one token
        normed, _ = _normed(*arguments)
    return normed.to(dtype=x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = x * scale
    # See Note [Results that are another tensor].
    return normed * weight if torch.compiler.is_compiling() else normed.mul_(weight), scale


class _RMSNormOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

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

    names = ("weight", "bias")
    centred = True

    def by_kernels(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; the result has x's dtype."""
        return F.layer_norm(x, (self.size,), self.factor, self.bias, self.eps)


class CutRMSNorm(FixedSums, nn.Module):
    """RMSNorm over a dimension that tensor-parallel ranks hold a piece of each.

    Args:
        size: width of the dimension over all ranks.
        eps: added to the mean square under the root.
        axis: the ranks; None is one process.
    """

    def __init__(self, size: int, eps: float, axis: MeshAxis | None = None) -> None:
        super().__init__()
        self.size, self.eps, self.axis = size, eps, axis
        self.weight = nn.Parameter(torch.empty(require_divisible("width of norm", size, axis)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones, and mark its role."""
        if self.axis is not None:
            mark(self.weight, tp_shard_dim=0)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size / ranks]` by the mean square over all ranks."""
        if self.tokens is not None:
            return normalise(
                x, self.weight, None, size=self.size, eps=self.eps,
                total=TokenSum(self.tokens.of(x)), over=WidthSum.of_cut(self.size, self.axis),
            )  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(dim=-1, keepdim=True)
        if self.axis is not None:
            # The sum is on every rank, and each rank's part of the loss has a gradient for it.
            squares = copy_to(reduce_from(squares, self.axis.group), self.axis.group)
        return ((wide * (squares / self.size + self.eps).rsqrt()) * self.weight).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class _OwnNorm(NormPart):
    """One of the norms above, with these parameters."""

    kind: type[RMSNorm | LayerNorm] = RMSNorm
    zero_centred: bool = False

    def make(self, size: int, eps: float, *, partial: bool = False) -> RMSNorm | LayerNorm:
        """See `NormPart.make`."""
        how: dict[str, Any] = {"names": self.names, "zero_centred": self.zero_centred}
        return self.kind(size, eps, partial=partial, **how)


_BOTH = ("weight", "bias")
NORMS: dict[str, NormPart] = {
    "rmsnorm": _OwnNorm(),
    "rmsnorm_plain": _OwnNorm(names=()),
    "rmsnorm_zero": _OwnNorm(zero_centred=True),
    "layernorm": _OwnNorm(kind=LayerNorm, names=_BOTH),
    "layernorm_zero": _OwnNorm(kind=LayerNorm, names=_BOTH, zero_centred=True),
    "layernorm_unbiased": _OwnNorm(kind=LayerNorm),
    "layernorm_plain": _OwnNorm(kind=LayerNorm, names=()),
}


def norm_of(config: TransformerConfig) -> NormPart:
    """The norm that the config names, or holds."""
    return config.norm if isinstance(config.norm, NormPart) else NORMS[config.norm]


def make_norm(config: TransformerConfig, *, partial: bool = False) -> nn.Module:
    """Build the norm that the config names, over the hidden size."""
    return norm_of(config).make(config.hidden_size, config.norm_eps, partial=partial)
