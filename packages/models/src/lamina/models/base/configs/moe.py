"""Settings of the mixture-of-experts layers of a Transformer."""

from dataclasses import dataclass
from typing import Literal

from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
    require_divides,
)

Scores = Literal["softmax", "sigmoid"]
Drop = Literal["weight", "position"]
GlobalLoads = Literal["so_far", "last_step"]
Dispatcher = Literal["all_to_all", "all_gather"]
ExpertsPath = Literal["auto", "grouped", "loop"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts instead of the MLP: sizes, routing, balance and transport.

    Sizes are in elements. A *copy* is one token as it is sent to one of its `top_k` experts.

    Args:
        num_experts: experts of a layer, over all ranks.
        top_k: experts per token.
        ffn_size: inner width of an expert; the model's `ffn_width` if None.
        shared_ffn_size: inner width of an expert that every token goes to (several shared experts
            are one that is as wide as all of them); None has no such expert.
        bias: both projections of each expert have a bias (gpt-oss, 2025).
        router_bias: the router's logits have a learned bias.
        shared_gate: the result of the shared expert is multiplied by a sigmoid of a product with
            the token (Qwen team, 2024).
        first_dense: the number of layers, from the first, that have an MLP.
        every: of the other layers every n-th has experts, beginning with the n-th.
        scores: `softmax` over the experts, or `sigmoid` of each (DeepSeek-V3).
        normalize_weights: the weights of a token's experts are scaled to sum to one. It must be
            False with a `top_k` of 1, because the weight would always be 1 and the router would
            learn nothing.
        weights_eps: added to that sum before the division.
        chosen_by: what experts are chosen by, before their bias: their `scores`, or the `logits`
            that scores are made from (Kolibri 1).
        weight_scale: multiplies the weights (DeepSeek's routed scaling factor).
        num_groups: groups of neighbouring experts; above 1, a token goes to experts of
            `groups_kept` groups only (DeepSeek-V2 and -V3: nodes that a token visits).
        groups_kept: groups that a token may go to.
        group_best: the score of a group is the sum of this many best scores in it.
        bias_rate: the step size of a bias per expert that is added to the scores when experts are
            chosen, and to nothing else (Wang et al., 2024: balance without an auxiliary loss). In
            each training step the bias grows for experts below the mean load and shrinks for those
            above. 0 keeps the bias as it was loaded; None has no bias.
        jitter: in training the router's input is multiplied by noise from
            `[1 - jitter, 1 + jitter]` (Fedus et al., 2021).
        capacity_factor: an expert takes at most `ceil(factor * top_k * tokens / num_experts)` of
            the copies that one rank sends. The others are dropped and contribute nothing to their
            token (Lepikhin et al., 2020). With `TransformerConfig(invariant=True)` these are the
            tokens and copies of one sequence. None drops nothing.
        drop: which copies are dropped: those with the least `weight`, or the last by `position`.
        pad_to_capacity: in training every rank sends every expert the same number of rows, which
            is the capacity of the rank with the most tokens, padded with zeros. So shapes are
            fixed, and the host never waits for counts from the device.
        switch_loss: coefficient of the load-balancing loss over the tokens of a data-parallel
            rank's microbatch (Fedus et al., 2021); 1 when balanced, times the coefficient.
        sequence_loss: the same over each sequence, averaged (DeepSeek-V3, 2024).
        global_loss: the same with the load of all ranks (Qiu et al., 2025).
        global_loads: of which microbatches the load of `global_loss` is: those of the step
            `so_far`, or all of the `last_step`, so that the loss does not depend on how a batch is
            cut and forwards exchange nothing. In the first step it then has no gradient.
        z_loss: coefficient of the mean square of the log of the sum of exponentials of the router's
            logits (Zoph et al., 2022).
        dispatcher: `all_to_all` sends each copy to its expert. `all_gather` sends all tokens to
            all ranks and sums the results, which is cheaper on few ranks with many experts per
            token.
        experts: `grouped` multiplies all experts in one kernel, `loop` one by one. `auto` takes
            the first of these that supports the case, and one batched product for equal loads.

    Raises:
        ValueError: for sizes that do not fit together.

    Examples:
        >>> shape = dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> config = TransformerConfig(**shape, moe=MoEConfig(num_experts=8, top_k=2))
    """

    num_experts: int
    top_k: int
    ffn_size: int | None = None
    shared_ffn_size: int | None = None
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    first_dense: int = 0
    every: int = 1
    scores: Scores = "softmax"
    normalize_weights: bool = True
    weights_eps: float = 1e-20
    chosen_by: Literal["scores", "logits"] = "scores"
    weight_scale: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1
    group_best: int = 2
    bias_rate: float | None = None
    jitter: float = 0.0
    capacity_factor: float | None = None
    drop: Drop = "weight"
    pad_to_capacity: bool = False
    switch_loss: float = 0.0
    sequence_loss: float = 0.0
    global_loss: float = 0.0
    global_loads: GlobalLoads = "so_far"
    z_loss: float = 0.0
    dispatcher: Dispatcher = "all_to_all"
    experts: ExpertsPath = "auto"

    def __post_init__(self) -> None:
        require_choices(self, MoEConfig)
        self._check_sizes()
        self._check_groups()
        self._check_capacity()

    @property
    def depends_on_layout(self) -> dict[str, bool]:
        """Settings that `invariant=True` refuses, and why; and whether they are set."""
        microbatch = "needs counts of microbatches to come"
        return {
            f"dispatcher={self.dispatcher!r} (adds results by rank)": (
                self.dispatcher == "all_gather"
            ),
            "pad_to_capacity=True (pads to a capacity of a rank)": self.pad_to_capacity,
            f"bias={self.bias} or router_bias={self.router_bias} of its experts (sums over tokens "
            "in no fixed order)": self.bias or self.router_bias,
            f"switch_loss={self.switch_loss} (it {microbatch}; take sequence_loss)": (
                self.switch_loss > 0.0
            ),
            f"global_loss={self.global_loss} (it {microbatch}; add global_loads='last_step')": (
                self.global_loss > 0.0 and self.global_loads == "so_far"
            ),
        }

    def _check_sizes(self) -> None:
        counts = ("num_experts", "top_k", "every", "num_groups", "groups_kept", "group_best")
        require_at_least(1, self, *counts)
        require_at_least(1, self, "ffn_size", "shared_ffn_size", optional=True)
        require_at_least(0, self, "first_dense")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is above num_experts {self.num_experts}: a token goes to an "
                "expert once"
            )
        if self.top_k == 1 < self.num_experts and self.normalize_weights:
            raise ValueError(
                "top_k 1 with normalize_weights=True: a token's one weight would always be 1, and "
                "the router would learn nothing from the loss; set normalize_weights=False"
            )
        if not self.weights_eps > 0.0:
            raise ValueError(f"weights_eps is {self.weights_eps}: it must be positive")
        if not 0.0 <= self.jitter < 1.0:
            raise ValueError(f"jitter is {self.jitter}: it must be in [0, 1)")
        require_at_least(0, self, "switch_loss", "sequence_loss", "global_loss", "z_loss")
        require_at_least(0, self, "bias_rate", optional=True)
        if not self.normalize_weights:
            refuse_unread(self, ["weights_eps"], "normalize_weights=False divides by no sum")
        if not self.global_loss:
            refuse_unread(self, ["global_loads"], "global_loss=0 reads no loads")
        if self.shared_ffn_size is None:
            refuse_unread(self, ["shared_gate"], "shared_ffn_size=None has no shared expert")

    def _check_groups(self) -> None:
        if self.num_groups == 1:
            refuse_unread(self, ["group_best"], "num_groups=1 has no groups to choose")
        require_divides("num_experts", self.num_experts, "num_groups", self.num_groups,
                        "groups are equally large")  # fmt: skip
        if self.groups_kept > self.num_groups:
            raise ValueError(
                f"groups_kept {self.groups_kept} is above num_groups {self.num_groups}"
            )
        within = self.groups_kept * self.num_experts // self.num_groups
        if self.num_groups > 1 and self.top_k > within:
            raise ValueError(
                f"top_k {self.top_k} is above {within}, the experts in {self.groups_kept} of "
                f"{self.num_groups} groups: keep more groups"
            )

    def _check_capacity(self) -> None:
        if self.capacity_factor is not None and not self.capacity_factor > 0.0:
            raise ValueError(
                f"capacity_factor is {self.capacity_factor}: it must be positive, or None"
            )
        if self.capacity_factor is None:
            why = "capacity_factor=None drops nothing, and leaves nothing to pad to"
            refuse_unread(self, ["drop", "pad_to_capacity"], why)
        if self.pad_to_capacity and self.dispatcher != "all_to_all":
            raise ValueError(
                f"pad_to_capacity with dispatcher {self.dispatcher!r}: gathered tokens need no "
                "padding; use 'all_to_all'"
            )

    def at(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer >= self.first_dense and (layer - self.first_dense + 1) % self.every == 0

    def capacity(self, tokens: int) -> int | None:
        """The copies that an expert takes from a rank with this many tokens; None takes all."""
        if self.capacity_factor is None:
            return None
        exact = self.capacity_factor * self.top_k * tokens / self.num_experts
        # At least one, because an expert that takes no copies is never trained.
        return max(1, -int(-exact // 1))

    @property
    def has_losses(self) -> bool:
        """Whether there is any auxiliary loss."""
        losses = (self.switch_loss, self.sequence_loss, self.global_loss, self.z_loss)
        return any(value > 0.0 for value in losses)
