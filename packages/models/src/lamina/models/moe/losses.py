"""Auxiliary losses of routers, and how their gradients get in without touching the user's loss.

A load-balancing loss is `E * sum_i f_i * P_i` over a set of tokens: f_i is the share of the set's
copies that go to expert i, P_i its mean score. f has no gradient, so ranks that share a set
need only agree on its counts, and each adds the part of the sum over its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as one_graph_break
from torch.autograd.function import once_differentiable

from lamina.collectives import scatter_to
from lamina.collectives.engine import all_reduce_small
from lamina.mesh.engine import MeshAxis
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.routing import count_copies

__all__ = [
    "AuxiliaryScale",
    "RoutingContext",
    "Scored",
    "auxiliary_losses",
    "inject",
    "load_by_sequence",
]


class AuxiliaryScale:
    """What auxiliary losses' gradients are multiplied by in one forward's backward.

    By default 1: right where every rank's loss is a mean and there is one microbatch. It
    follows a loss once that is known (`follow`), because backward reaches the loss first:
    `GPTModel` lets it follow its own; who uses a `MoELayer` by itself passes it a
    `RoutingContext` per forward and calls `context.scale.follow(loss, 1.0)`.
    """

    def __init__(self, value: float | Tensor = 1.0) -> None:
        self.value = value
        self._loads: dict[int, list[Tensor]] = {}

    def keep_loads(self, router: int, loads: Tensor) -> None:
        """Keep counts that a router has summed over ranks, for when its block is run again."""
        self._loads.setdefault(router, []).append(loads)

    def kept_loads(self, router: int) -> Tensor | None:
        """Counts of the forward that is run again; None if none were kept.

        Raises:
            ValueError: if the router was called several times: nothing says which call it is.
        """
        kept = self._loads.get(router, [])
        if len(kept) > 1:
            raise ValueError(
                f"{len(kept)} calls of this router in one forward, and its block is run again for "
                "backward: the loads of its auxiliary losses are one of two calls', and nothing "
                "says which. Give every block a layer of experts of its own and every forward a "
                "context of its own, or apply_recompute(model, 'selective')"
            )
        return kept[0] if kept else None

    @one_graph_break
    def follow(self, loss: Tensor, factor: float | Tensor) -> None:
        """Take the gradient that `loss` is given, times `factor`.

        Args:
            loss: what the forward ends in: a mean over this rank's tokens.
            factor: the number of ranks that share the microbatch's sequences (`cp`); of a sum,
                the number of labels.
        """
        if not loss.requires_grad:
            return

        def remember(grad: Tensor) -> None:
            self.value = grad.detach() * factor

        loss.register_hook(remember)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class RoutingContext:
    """What the routers of one forward share.

    Attributes:
        scale: of auxiliary losses.
        padding: bool `[tokens]` of this rank: True for tokens that go to no expert and count in
            no loss; None where all count.
        capacities: the largest that the ranks of a group have, by their numbers, for
            `pad_to_capacity`: found out by the first layer.
        told: what the user was warned of in this forward.
    """

    scale: AuxiliaryScale = field(default_factory=AuxiliaryScale)
    padding: Tensor | None = None
    capacities: dict[tuple[int, ...], int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    @staticmethod
    def build(
        padding_mask: Tensor | None, axes: ExpertAxes, scale: float | Tensor = 1.0
    ) -> RoutingContext:
        """Cut a mask as the model cuts its tokens.

        Args:
            padding_mask: bool `[batch, sequence]`, True for padding; None for none.
            axes: of the model.
            scale: of auxiliary losses until it follows a loss.
        """
        padding = None
        if padding_mask is not None:
            padding = cut_sequence(padding_mask, axes.cp).flatten()
            if axes.tp is not None and not axes.replicated:
                padding = scatter_to(padding, axes.tp.group)
        return RoutingContext(AuxiliaryScale(scale), padding)


@dataclass(frozen=True)
class Scored:
    """What a router made of its tokens.

    Attributes:
        logits: `[tokens, num_experts]`.
        probabilities: `[tokens, num_experts]`, each token's sum to one.
        experts: int64 `[tokens, top_k]`, `num_experts` for padding.
        counted: bool `[tokens]`: which are no padding; None for all.
        sequence: int64 `[tokens]`: which sequence each belongs to; None for one.
        sequences: how many there are.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    counted: Tensor | None
    sequence: Tensor | None
    sequences: int


def load_by_sequence(scored: Scored, num_experts: int, axes: tuple[MeshAxis, ...]) -> Tensor:
    """Copies of each sequence to each expert over all ranks that share the microbatch.

    Returns:
        int64 `[sequences, num_experts]`, or `[1, num_experts]` without sequences.
    """
    if scored.sequence is None:
        loads = count_copies(scored.experts, num_experts).unsqueeze(0)
    else:
        nowhere = scored.experts >= num_experts
        flat = scored.experts + scored.sequence.unsqueeze(-1) * num_experts
        total = scored.sequences * num_experts
        loads = count_copies(flat.masked_fill(nowhere, total), total).view(-1, num_experts)
    for axis in axes:
        all_reduce_small([loads], axis.sibling("tokens"))
    return loads


def auxiliary_losses(
    scored: Scored, moe: MoEConfig, loads: Tensor, everywhere: Tensor | None
) -> dict[str, Tensor]:
    """This rank's part of each loss that has a coefficient, multiplied by it.

    Args:
        scored: this rank's tokens.
        moe: coefficients.
        loads: from `load_by_sequence`.
        everywhere: int64 `[num_experts]`: loads over all ranks, for `global_loss`.

    Returns:
        Scalars by name. Added up over the ranks of a microbatch and averaged over microbatches
        and data-parallel ranks they are the losses.
    """
    wide = scored.probabilities.dtype
    tokens = (loads.sum() / moe.top_k).clamp(min=1).to(wide)
    probabilities = scored.probabilities
    if scored.counted is not None:
        probabilities = probabilities * scored.counted.unsqueeze(-1)
    losses = {}
    if moe.switch_loss:
        losses["switch"] = moe.switch_loss * _balance(loads.sum(0), probabilities, tokens)
    if moe.global_loss and everywhere is not None:
        losses["global"] = moe.global_loss * _balance(everywhere, probabilities, tokens)
    if moe.sequence_loss and scored.sequence is not None:
        losses["sequence"] = moe.sequence_loss * _by_sequence(scored, probabilities, loads)
    if moe.z_loss:
        squares = scored.logits.logsumexp(-1).square()
        if scored.counted is not None:
            squares = squares * scored.counted
        losses["z"] = moe.z_loss * squares.sum() / tokens
    return losses


def _balance(loads: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """`E * sum_i f_i * P_i`, the part of these tokens."""
    share = loads.to(probabilities.dtype) / loads.sum().clamp(min=1)
    return loads.numel() * (share * probabilities.sum(0)).sum() / tokens


def _by_sequence(scored: Scored, probabilities: Tensor, loads: Tensor) -> Tensor:
    shape = (scored.sequences, probabilities.shape[1])
    sums = probabilities.new_zeros(shape).index_add(0, scored.sequence, probabilities)  # type: ignore[arg-type]
    copies = loads.sum(-1, keepdim=True).clamp(min=1).to(sums.dtype)
    share = loads.to(sums.dtype) / copies
    tokens = copies.squeeze(-1) / scored.experts.shape[1]
    return shape[1] * ((share * sums).sum(-1) / tokens).mean()


def inject(carrier: Tensor, loss: Tensor, scale: AuxiliaryScale) -> Tensor:
    """Tie a loss to a tensor: backward through the tensor also goes through the loss.

    The carrier lies on the way of the user's own loss. A sum with that loss instead would reach the
    router before the rest of its block, whose weights may not be gathered then.

    Args:
        carrier: any shape; returned as it is.
        loss: a scalar.
        scale: what its gradient is, when backward comes by.
    """
    tied: Tensor = _Inject.apply(carrier, loss, scale)  # type: ignore[no-untyped-call]
    return tied


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: AuxiliaryScale) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        value = ctx.scale.value
        if isinstance(value, Tensor):
            return grad, value.to(ctx.device, ctx.dtype), None
        # Not as_tensor: on CUDA a copy from the host makes it wait.
        return grad, torch.full((), value, dtype=ctx.dtype, device=ctx.device), None
