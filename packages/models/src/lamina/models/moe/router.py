"""Routers: they choose the experts of each token; and statistics of what they chose, by step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.engine import main_of
from lamina.mesh import ParallelMesh, derive_seed, mark
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.initialise import fill, normal
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.compat import current_graph_task_id, one_graph_break
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.layer_products import InvariantProducts
from lamina.models.invariance.products import cut_blocks, fold
from lamina.models.invariance.random_keys import TokenKeys
from lamina.models.invariance.row_functions import row_softmax, to_one
from lamina.models.invariance.token_sums import TokenCut, sigmoid
from lamina.models.layers.dropout import dropout_stream
from lamina.models.layers.linear import fixed_linear
from lamina.models.layers.matmul_products import without_autocast
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.losses import (
    AuxiliaryScale,
    RoutingContext,
    Scored,
    auxiliary_losses,
    inject,
    load_by_sequence,
    losses_by_sequence,
)
from lamina.models.moe.routing import Routing, choose_experts, count_copies, within_capacity


class RoutingTotals:
    """Sums over the microbatches of a step. They stay on the device, so the host never waits."""

    def __init__(self) -> None:
        self.forwards = 0
        self.chosen: Tensor | None = None
        self.sums: dict[str, Tensor] = {}

    def add(self, chosen: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add one forward's int64 `[num_experts]` counts and named scalars."""
        self.forwards += 1
        self.chosen = chosen.clone() if self.chosen is None else self.chosen + chosen
        for name, value in sums.items():
            before = self.sums.get(name)
            self.sums[name] = value.detach().double() + (0.0 if before is None else before)


class TopKRouter(FixedSums, nn.Module):
    """Scores tokens for experts in float32 (float64 for float64 models) and takes the best.

    `weight` is `[num_experts, hidden]`, whole on every rank, and so is the `bias` `[num_experts]`
    that `moe.router_bias` asks for. With `moe.bias_rate` there is a
    buffer `expert_bias`, float32 `[num_experts]` for every dtype of the model, which
    `finalize_step` updates. With `global_loads="last_step"` there is a buffer `last_loads`, int64
    `[num_experts]`: all ranks' copies in the last step. `lamina.ddp.finalize_grads` calls
    `finalize_step` once per step.

    Args:
        hidden_size: width of a token.
        moe: sizes, scores, losses.
        mesh: the model's mesh, or its `ExpertAxes`; None is one process.
        sequence_parallel: each tensor-parallel rank sees other tokens.
        init_std: standard deviation of the initial weight.

    Examples:
        >>> router = TopKRouter(64, MoEConfig(num_experts=8, top_k=2))
    """

    expert_bias: Tensor | None
    last_loads: Tensor | None
    casts_itself = True  # wrappers that cast inputs and buffers read this
    full_precision_buffers = ("expert_bias",)

    def __init__(
        self,
        hidden_size: int,
        moe: MoEConfig,
        mesh: MeshLike | ExpertAxes = None,
        *,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.axes = ExpertAxes.of(mesh, sequence_parallel=sequence_parallel)
        self.init_std = init_std
        self.init_seed: int | None = None
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.router_bias else None
        bias = None if moe.bias_rate is None else torch.zeros(moe.num_experts)
        self.register_buffer("expert_bias", bias)
        last = torch.zeros(moe.num_experts, dtype=torch.int64)
        self.register_buffer("last_loads", last if moe.global_loads == "last_step" else None)
        self.totals = RoutingTotals()
        self.finished: RoutingTotals | None = None
        self.loads_of_step: Tensor | None = None
        self._step_watched = False
        self.weight_version = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2), zero biases and loads, mark the roles."""
        fill(self.weight, normal(self.init_std), self.init_seed)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                mark(parameter, tp_grad=None if self.axes.tokens_tp is None else "sum")
        for zeros in (self.bias, self.expert_bias, self.last_loads):
            if zeros is not None:
                nn.init.zeros_(zeros)

    # Not compiled: torch.compile would treat the scale of auxiliary losses, which is only known in
    # backward, as a constant, and would compile again for every number of forwards.
    @one_graph_break
    def forward(
        self, x: Tensor, context: RoutingContext | None = None, shape: tuple[int, int] | None = None
    ) -> Routing:
        """Route `[tokens, hidden]`.

        Args:
            x: this rank's tokens.
            context: padding, and the scale of auxiliary losses.
            shape: sequences in the microbatch and this context-parallel rank's tokens of each;
                for `sequence_loss`.

        Raises:
            ValueError: `sequence_loss` without a shape.
        """
        context = context or RoutingContext()
        moe, padding = self.moe, context.padding
        logits, scores = self.score(x, context.token_keys)
        ranking = logits if moe.chosen_by == "logits" else scores
        experts = choose_experts(ranking, moe, self.expert_bias, fixed=self.layout_invariant)
        if self.layout_invariant:
            experts = experts.sort(dim=-1).values  # a token's results are added in this order
        weights = scores.gather(1, experts)
        if moe.normalize_weights:
            weights = self._to_one(weights, moe.weights_eps)
        weights = weights * moe.weight_scale
        if padding is not None:
            experts = experts.masked_fill(padding.unsqueeze(-1), moe.num_experts)
        chosen = count_copies(experts, moe.num_experts)
        if self.training:
            probabilities = scores
            if moe.scores == "sigmoid":
                probabilities = self._to_one(scores)
            counted = None if padding is None else ~padding
            sequence, count = self._sequences(logits, shape), 1 if shape is None else shape[0]
            scored = Scored(logits, probabilities, experts, counted, sequence, count)
            losses = self._losses(scored, context.scale) if moe.has_losses else {}
            if losses and weights.requires_grad:
                total = torch.stack([*losses.values()])
                total = fold(total) if self.layout_invariant else total.sum(dim=0)
                weights = inject(weights, total, context.scale)
        routing = self._limit(experts, weights, chosen, padding is not None, shape)
        if self.training and not _running_again():
            self._notice_step(context.warnings_given)
            self._record(scored, chosen, routing.counts, losses)
        return routing

    def score(self, x: Tensor, token_keys: TokenKeys | None = None) -> tuple[Tensor, Tensor]:
        """Logits and scores `[tokens, num_experts]` of `[tokens, hidden]`, jittered.

        ValueError: jitter in a layer whose sums are fixed, without the tokens' keys.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide)
        if self.tokens is not None:
            experts, hidden = (cut_blocks((size,)) for size in self.weight.shape)
            partial = self.axes.tokens_tp is not None
            if self.training and self.moe.jitter:
                x = x * self._jitter_by_keys(x, token_keys)
            products = InvariantProducts(self.tokens, hidden, experts, partial)
            logits = fixed_linear(x, self.weight, products)
            softmax = self.moe.scores == "softmax"
            return logits, row_softmax(logits) if softmax else sigmoid(logits)
        if self.training and self.moe.jitter:
            low, high = 1.0 - self.moe.jitter, 1.0 + self.moe.jitter
            split = self.axes.tokens_tp is not None
            with dropout_stream(self.moe.jitter, split, self.axes.tp):
                x = x * torch.empty_like(x).uniform_(low, high)
        with without_autocast(x.device):
            bias = None if self.bias is None else self.bias.to(wide)
            logits = F.linear(x, self.weight.to(wide), bias)
        return logits, logits.softmax(-1) if self.moe.scores == "softmax" else logits.sigmoid()

    def finalize_step(self, mesh: ParallelMesh | DeviceMesh | None) -> None:
        """End a step: update bias and last loads by those of all ranks, start new statistics.

        This is collective over the ranks that hold different tokens. One process without a wrapper
        calls it with None. The bias of a frozen router, whose weight takes no gradient, stays.

        Raises:
            ValueError: if a global loss did not include ranks of the mesh that hold other tokens.
        """
        axes = self.axes
        if mesh is not None:
            axes = ExpertAxes.of(mesh, sequence_parallel=not axes.replicated)
        self._check_global(axes)
        totals, self.totals = self.totals, RoutingTotals()
        self.loads_of_step = None
        if totals.forwards:
            self.finished = totals
        if not self._moves_bias and self.last_loads is None:
            return
        if totals.chosen is None:  # this rank had no forward, and another one may have had one
            size = self.moe.num_experts
            loads = torch.zeros(size, dtype=torch.int64, device=self.weight.device)
        else:
            loads = totals.chosen.clone()  # the statistics sum the original over ranks
        # In integers, so that the result is the same on every rank and for every layout.
        for axis in axes.token_axes:
            all_reduce_small([loads], axis.sibling("reduce"))
        with torch.no_grad():
            if self.last_loads is not None:
                self.last_loads.copy_(loads)
            if self._moves_bias and self.expert_bias is not None:
                missing = (loads.sum() - loads * self.moe.num_experts).sign()
                self.expert_bias.add_(missing, alpha=self.moe.bias_rate)

    @property
    def needs_finalize(self) -> bool:
        """Whether tokens were counted in a step that has not ended, and whose end matters."""
        waits = self._moves_bias or bool(self.moe.global_loss)
        return self.totals.forwards > 0 and waits

    @property
    def _moves_bias(self) -> bool:
        return bool(self.moe.bias_rate) and main_of(self.weight).requires_grad

    @property
    def latest(self) -> RoutingTotals:
        """The totals of the last step that ended, or of the current one if none has."""
        return self.totals if self.finished is None else self.finished

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        moe = self.moe
        return f"{self.weight.shape[1]} -> {moe.top_k} of {moe.num_experts}, {moe.scores}"

    def _jitter_by_keys(self, x: Tensor, token_keys: TokenKeys | None) -> Tensor:
        jitter = self.moe.jitter
        if token_keys is None:
            raise ValueError(
                f"jitter is {jitter} in a layer with invariant=True, and the keys of its "
                f"{x.shape[0]} tokens are not known: call it from a GPTModel, or give it a "
                "RoutingContext with token_keys"
            )
        return token_keys.uniform(
            x, 1.0 - jitter, 1.0 + jitter, derive_seed(self.init_seed or 0, "jitter")
        )

    def _to_one(self, x: Tensor, eps: float = 1e-20) -> Tensor:
        """Each row divided by its sum."""
        return to_one(x, eps) if self.layout_invariant else x / (x.sum(-1, keepdim=True) + eps)

    def _sequences(self, logits: Tensor, shape: tuple[int, int] | None) -> Tensor | None:
        """The sequence of each token, for `sequence_loss`."""
        if not (self.moe.sequence_loss or (self.layout_invariant and self.moe.has_losses)):
            return None
        if shape is None:
            raise ValueError(
                f"sequence_loss is {self.moe.sequence_loss} and tokens come as "
                f"{tuple(logits.shape[:1])}: which sequences are they of? Pass [batch, "
                "sequence, hidden], or a context"
            )
        tp, tokens = self.axes.tokens_tp, logits.shape[0]
        first = 0 if tp is None else tp.rank * tokens
        index = torch.arange(first, first + tokens, device=logits.device)
        return index.div(shape[1], rounding_mode="floor")

    def _losses(self, scored: Scored, scale: AuxiliaryScale) -> dict[str, Tensor]:
        running_again = _running_again()
        again = scale.kept_loads(id(self)) if running_again else None
        if again is None:
            if running_again and self.moe.global_loss:
                raise ValueError(
                    f"global_loss is {self.moe.global_loss} and this layer is run again for "
                    "backward without a context: what the step's load was in its forward is not "
                    "known. In every forward pass layer(x, RoutingContext()), or a block an "
                    "AttentionContext whose routing is one; or do not recompute the layer"
                )
            loads = load_by_sequence(scored, self.moe.num_experts, self.axes.along_sequence)
            again = torch.cat((loads, self._everywhere(loads).unsqueeze(0)))
            if not running_again:
                scale.keep_loads(id(self), again)
        if self.layout_invariant:
            return losses_by_sequence(scored, self.moe, again[:-1], again[-1])
        return auxiliary_losses(scored, self.moe, again[:-1], again[-1])

    def _everywhere(self, loads: Tensor) -> Tensor:
        """The loads for `global_loss`: of all ranks and the step so far, or of the last step."""
        if self.last_loads is not None:
            return self.last_loads.clone()
        total = loads.sum(0)
        if not self.moe.global_loss:
            return total
        if self.axes.dp is not None:
            all_reduce_small([total], self.axes.dp.sibling("tokens"))
        if self.loads_of_step is not None:
            total = total + self.loads_of_step
        self.loads_of_step = total
        return total

    def _check_global(self, axes: ExpertAxes) -> None:
        if not self.moe.global_loss or self.last_loads is not None:
            return  # loads of a whole step are added here, over the axes that were given
        for axis, own in ((axes.dp, self.axes.dp), (axes.cp, self.axes.cp)):
            if axis is not None and own is None:
                raise ValueError(
                    f"global_loss is {self.moe.global_loss} and takes the load of all ranks, and "
                    f"the {axis.size} ranks of {axis.name} each counted their own: build "
                    "GPTModel(config, mesh) (or the MoELayer) with the mesh that it is trained on"
                )

    def _limit(
        self,
        experts: Tensor,
        weights: Tensor,
        chosen: Tensor,
        padded: bool,
        shape: tuple[int, int] | None,
    ) -> Routing:
        """Drop the copies that exceed the capacity of their experts."""
        moe = self.moe
        capacity = moe.capacity(experts.shape[0])
        counts = chosen
        if capacity is not None and self.tokens is not None:
            kept = self._within_sequences(self.tokens, experts, weights, shape)
            experts = experts.masked_fill(~kept, moe.num_experts)
            counts = count_copies(experts, moe.num_experts)
        elif capacity is not None:
            kept = within_capacity(experts, weights, capacity, moe.drop)
            experts = experts.masked_fill(~kept, moe.num_experts)
            counts = chosen.clamp(max=capacity)
        holes = padded or capacity is not None
        if holes:
            weights = weights.masked_fill(experts == moe.num_experts, 0.0)
        fixed = capacity if moe.pad_to_capacity and self.training else None
        return Routing(experts, weights, counts, holes, fixed)

    def _within_sequences(
        self, cut: TokenCut, experts: Tensor, weights: Tensor, shape: tuple[int, int] | None
    ) -> Tensor:
        """As `within_capacity`, where each sequence has a capacity of its own."""
        if shape is None:
            raise ValueError(
                f"capacity_factor is {self.moe.capacity_factor} with invariant=True, where each "
                f"sequence has a capacity, and tokens come as {tuple(experts.shape[:1])}: pass "
                "[batch, sequence, hidden], or a shape"
            )
        rows, width = shape[0], self.moe.num_experts + 1
        split = self.axes.tokens_tp is not None
        experts, weights = (cut.whole(x, scattered=split) for x in (experts, weights.detach()))
        length = len(experts) // rows
        sequences = torch.arange(rows, device=experts.device).repeat_interleave(length)
        of_sequence = experts + width * sequences.unsqueeze(-1)
        capacity = cast(int, self.moe.capacity(length))
        kept = within_capacity(of_sequence, weights, capacity, self.moe.drop)
        return cut.piece(kept.view(rows, length, -1)).reshape(-1, kept.shape[1])

    def leave_steps(self) -> None:
        """Somebody else looks for steps that come without `finalize_grads`, or has said so."""
        self._step_watched = True

    def _notice_step(self, warnings_given: set[str]) -> None:
        """Warn once if the weight was updated after tokens were counted in a step that goes on.

        This is for optimizers that know nothing of wrappers. Other optimizers ask `needs_finalize`
        as they step, and call `leave_steps`.
        """
        weight = main_of(self.weight)
        if weight.is_inference():
            return
        written, self.weight_version = weight._version != self.weight_version, weight._version
        if not written or self._step_watched or not self.needs_finalize:
            return
        self.leave_steps()
        if "unfinished" not in warnings_given:
            warnings_given.add("unfinished")
            warnings.warn(
                "an optimizer has stepped, and routers were not told that the step ended: biases "
                "do not move and counts for a global loss go on. Call lamina.ddp.finalize_grads("
                "model, mesh) after the last backward of every step (for a model without a wrapper "
                "finalize_plain_gradients, or router.finalize_step(None) in one process)",
                stacklevel=2,
            )

    @torch.no_grad()
    def _record(
        self, scored: Scored, chosen: Tensor, counts: Tensor, losses: dict[str, Tensor]
    ) -> None:
        entropy = torch.special.entr(scored.probabilities).sum(-1)
        if scored.counted is not None:
            entropy = entropy * scored.counted
        sums = {
            "entropy": entropy.sum(),
            "tokens": chosen.sum() / self.moe.top_k,
            "dropped": (chosen - counts).sum(),
        }
        means = {name: loss.mean() for name, loss in losses.items()}
        self.totals.add(chosen, {**sums, **means})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        # The bias keeps its dtype and its bits: bfloat16 would lose updates of a thousandth.
        before: Any = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            kept = torch.empty_like(after, dtype=before.dtype)
            self.expert_bias = kept if before.is_meta else kept.copy_(before)
        return self


def _running_again() -> bool:
    """Whether this forward runs inside a backward, because activations are recomputed."""
    return current_graph_task_id() != -1


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing in the last step, over all ranks.

    Attributes:
        load: each expert's share of the copies, before any were dropped; they sum to one.
        entropy: the mean entropy of a token's scores in nats; `log(num_experts)` if all are equal.
        dropped: the share of the copies that were dropped.
        losses: auxiliary losses by name, with their coefficients.
    """

    load: tuple[float, ...]
    entropy: float
    dropped: float
    losses: dict[str, float]

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load: 1 is balanced."""
        return max(self.load) * len(self.load)


def routing_statistics(model: nn.Module, mesh: MeshLike = None) -> dict[str, LayerRouting]:
    """Return the statistics of the last training step, by the router's name.

    A step ends with `finalize_step`, which `finalize_grads` calls. If it was never called, all
    forwards so far are one step. This is collective over the ranks that hold different tokens, and
    the host waits for the device once.

    Args:
        model: holds routers, at any depth; the same on all ranks of the mesh.
        mesh: the mesh; None for one process.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> routing_statistics(GPTModel(config))  # a model without experts
        {}
    """
    routers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) and module.latest.chosen is not None
    }
    if not routers:
        return {}
    totals = [router.latest for router in routers.values()]
    rows = [_row(t) for t in totals]
    packed = torch.cat(rows)
    axes = next(iter(routers.values())).axes
    if mesh is not None:
        axes = ExpertAxes.of(mesh, sequence_parallel=not axes.replicated)
    for axis in axes.token_axes:
        all_reduce_small([packed], axis.sibling("tokens"))
    shared_by = math.prod(axis.size for axis in axes.along_sequence)
    values = iter(packed.tolist())
    return {
        name: _read(router.latest, list(islice(values, row.numel())), shared_by)
        for (name, router), row in zip(routers.items(), rows, strict=True)
    }


def _row(totals: RoutingTotals) -> Tensor:
    """Counts, sums, and the number of forwards, in which ranks may differ."""
    chosen = cast(Tensor, totals.chosen)
    sums = (value.double().flatten() for value in totals.sums.values())
    # torch.tensor would copy from the host, which waits on CUDA.
    forwards = torch.full((1,), totals.forwards, dtype=torch.float64, device=chosen.device)
    return torch.cat([chosen.double(), *sums, forwards])


def _read(totals: RoutingTotals, values: list[float], shared_by: int) -> LayerRouting:
    """Turn the sums over all ranks into statistics; `shared_by` ranks share each microbatch."""
    *values, forwards = values
    experts = len(values) - len(totals.sums)
    sums = dict(zip(totals.sums, values[experts:], strict=True))
    copies = max(sum(values[:experts]), 1.0)
    microbatches = forwards / shared_by
    return LayerRouting(
        load=tuple(value / copies for value in values[:experts]),
        entropy=sums.pop("entropy") / max(sums.pop("tokens"), 1.0),
        dropped=sums.pop("dropped") / copies,
        losses={name: value / microbatches for name, value in sums.items()},
    )
