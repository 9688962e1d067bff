"""Auxiliary losses of routers, whose gradients are added without changing the user's loss.

A load-balancing loss is `E * sum_i f_i * P_i` over a set of tokens, where f_i is the share of the
set's copies that expert i gets, and P_i is its mean score. f has no gradient. So ranks that hold
parts of one set exchange the counts, and each computes the part of the sum over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives import scatter_to
from lamina.collectives.engine import all_reduce_small
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.compat import one_graph_break
from lamina.models.invariance.expert_sums import sums_by_sequence
from lamina.models.invariance.products import row_sum
from lamina.models.invariance.random_keys import TokenKeys
from lamina.models.invariance.row_functions import log_sum_exp
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.routing import count_copies


def adds_losses(config: TransformerConfig) -> bool:
    """Whether a model has layers that add losses of their own."""
    kinds = [layer.attention_variant for layer in config.distinct_layers]
    return config.moe is not None or any(kind is not None and kind.adds_loss for kind in kinds)


class AuxiliaryScale:
    """The factor of the auxiliary losses' gradients in the backward of one forward.

    It is 1 by default, which is right if every rank's loss is a mean and there is one microbatch.
    After `follow(loss, factor)` it is the gradient of that loss times a factor; backward reaches
    the loss before the routers. `GPTModel` makes it follow its own loss. If you use a `MoELayer` by
    itself, pass a `RoutingContext` in each forward and call `context.scale.follow(loss, 1.0)`.
    """

    def __init__(self, value: float | Tensor = 1.0) -> None:
        self.value = value
        self._loads: dict[int, list[Tensor]] = {}

    def keep_loads(self, router: int, loads: Tensor) -> None:
        """Store counts that a router has summed over ranks, for when its block is run again."""
        self._loads.setdefault(router, []).append(loads)

    def kept_loads(self, router: int) -> Tensor | None:
        """Return the stored counts of the forward that is run again, or None.

        Raises:
            ValueError: if the router was called several times, as the calls cannot be told apart.
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
        """Become the gradient of `loss` times `factor`, once backward has reached it.

        Args:
            loss: the loss of this forward, a mean over this rank's tokens.
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
    """What the routers of one forward have in common.

    Attributes:
        scale: the factor of auxiliary losses' gradients.
        padding: bool `[tokens]` of this rank: True for tokens that go to no expert and are left
            out of the losses; None if there are none.
        capacities: the largest capacity of the ranks of a group, by the group's ranks, for
            `pad_to_capacity`. The first layer of a forward finds it.
        warnings_given: the warnings that were given in this forward.
        token_keys: what jitter with `invariant=True` follows from; else None.
    """

    scale: AuxiliaryScale = field(default_factory=AuxiliaryScale)
    padding: Tensor | None = None
    capacities: dict[tuple[int, ...], int] = field(default_factory=dict)
    warnings_given: set[str] = field(default_factory=set)
    token_keys: TokenKeys | None = None

    @staticmethod
    def build(
        padding_mask: Tensor | None, axes: ExpertAxes, scale: float | Tensor = 1.0
    ) -> RoutingContext:
        """Make a context whose padding mask is cut as the model cuts its tokens.

        Args:
            padding_mask: bool `[batch, sequence]`, True for padding; None for none.
            axes: of the model.
            scale: of auxiliary losses until it follows a loss.
        """
        padding = None
        if padding_mask is not None:
            padding = cut_sequence(padding_mask, axes.cp).flatten()
            if axes.tokens_tp is not None:
                padding = scatter_to(padding, axes.tokens_tp.group)
        return RoutingContext(AuxiliaryScale(scale), padding)


@dataclass(frozen=True)
class Scored:
    """The scores that a router has given its tokens.

    Logits and probabilities are `[tokens, num_experts]`, and each token's probabilities sum to one.
    `experts` are int64 `[tokens, top_k]`, `num_experts` for padding. `counted` is False for
    padding; None if there is none. `sequence` is the sequence of each token, or None, of so many
    `sequences`.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    counted: Tensor | None
    sequence: Tensor | None
    sequences: int


def load_by_sequence(scored: Scored, num_experts: int, axes: tuple[MeshAxis, ...]) -> Tensor:
    """Count each sequence's copies for each expert, over all ranks that share the microbatch.

    The result is int64 `[sequences, num_experts]`, or `[1, num_experts]` without sequences.
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
    """Compute this rank's part of each loss with a coefficient, times the coefficient.

    `loads` are those of `load_by_sequence`, and `everywhere`, int64 `[num_experts]`, those for
    `global_loss`. Sums of the results over the ranks of a microbatch, averaged over
    microbatches and data-parallel ranks, are the losses.
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
        balance = _by_sequence(scored, probabilities, loads, loads)
        losses["sequence"] = moe.sequence_loss * balance.mean()
    if moe.z_loss:
        losses["z"] = moe.z_loss * _squares(scored).sum() / tokens
    return losses


def losses_by_sequence(
    scored: Scored, moe: MoEConfig, loads: Tensor, everywhere: Tensor
) -> dict[str, Tensor]:
    """As `auxiliary_losses`, for each sequence of the microbatch: `[sequences]`.

    A token's gradient depends on its sequence and `everywhere` alone (`invariant=True`).
    """
    losses = {}
    probabilities = scored.probabilities
    if scored.counted is not None:
        probabilities = probabilities * scored.counted.unsqueeze(-1)
    if moe.global_loss:
        balance = _by_sequence(scored, probabilities, loads, everywhere.unsqueeze(0), fixed=True)
        losses["global"] = moe.global_loss * balance
    if moe.sequence_loss:
        balance = _by_sequence(scored, probabilities, loads, loads, fixed=True)
        losses["sequence"] = moe.sequence_loss * balance
    if moe.z_loss:
        squares = _squares(scored, log_sum_exp).unsqueeze(-1)
        sums = sums_by_sequence(squares, cast(Tensor, scored.sequence), scored.sequences)
        sums = sums.squeeze(-1)
        tokens = (loads.sum(-1) / moe.top_k).clamp(min=1).to(sums.dtype)
        losses["z"] = moe.z_loss * sums / tokens
    return losses


def _squares(scored: Scored, log_sum: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    logits = scored.logits
    squares = (logits.logsumexp(-1) if log_sum is None else log_sum(logits)).square()
    return squares if scored.counted is None else squares * scored.counted


def _balance(loads: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The part of `E * sum_i f_i * P_i` that these tokens contribute."""
    share = loads.to(probabilities.dtype) / loads.sum().clamp(min=1)
    return loads.numel() * (share * probabilities.sum(0)).sum() / tokens


def _by_sequence(
    scored: Scored, probabilities: Tensor, loads: Tensor, shared: Tensor, fixed: bool = False
) -> Tensor:
    """As `_balance`, for each sequence; `shared` are the loads that f is made of.

    `loads` and `shared` are int64 `[sequences, num_experts]`; `shared` may be `[1, num_experts]`.
    """
    shape, sequence = (scored.sequences, probabilities.shape[1]), cast(Tensor, scored.sequence)
    if fixed:
        sums = sums_by_sequence(probabilities, sequence, shape[0])
    else:
        sums = probabilities.new_zeros(shape).index_add(0, sequence, probabilities)
    share = shared.to(sums.dtype) / shared.sum(-1, keepdim=True).clamp(min=1).to(sums.dtype)
    tokens = loads.sum(-1).clamp(min=1).to(sums.dtype) / scored.experts.shape[1]
    products = share * sums
    total = row_sum(products).squeeze(-1) if fixed else products.sum(-1)
    return shape[1] * (total / tokens)


def inject(carrier: Tensor, loss: Tensor, scale: AuxiliaryScale) -> Tensor:
    """Return a tensor unchanged, such that backward through it also goes through a loss.

    The loss is a scalar, whose gradient is the scale's value in backward. Or it is the loss of each
    sequence, whose gradients are the scale's values, or shares of its one value. See Note
    [Auxiliary losses ride on the routing weights].
    """
    return applied(_Inject, carrier, loss, scale)


class _Inject(torch.autograd.Function):
    # Note [Auxiliary losses ride on the routing weights]
    # An auxiliary loss is not added to the user's loss. If it were, autograd could visit the router
    # before the rest of its block, whose weights `fully_shard` may not have gathered at that time.
    # Instead the loss is attached to the routing weights, through which the user's loss depends on
    # the router anyway, so its gradient starts when backward comes by (decision 0620).

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: AuxiliaryScale) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device, ctx.shape = scale, loss.dtype, loss.device, loss.shape
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        value = ctx.scale.value
        if isinstance(value, Tensor):
            value = value.to(ctx.device, ctx.dtype)
        else:
            # as_tensor would copy from the host, which waits on CUDA.
            value = torch.full((), value, dtype=ctx.dtype, device=ctx.device)
        if value.ndim < len(ctx.shape):
            value = (value / ctx.shape[0]).expand(ctx.shape)
        return grad, value, None
