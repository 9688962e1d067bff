"""The decoder-only language model."""

from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from lamina.collectives import scatter_to
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.attention import Attention
from lamina.models.attention.context import (
    AttentionContext,
    TokenCache,
    default_positions,
    same_for_all,
)
from lamina.models.attention.context_parallel import check_context_parallel
from lamina.models.base.config import TransformerConfig
from lamina.models.base.initialise import assign_seeds, check_same_seed, draw_seed
from lamina.models.base.kept_roles import KeepsRoles
from lamina.models.base.mesh_axes import MeshLike, axis_of, data_parallel_axis
from lamina.models.decoder.layer_stack import caches_tokens, make_block
from lamina.models.decoder.multi_token import MultiTokenLayers
from lamina.models.decoder.precision_backends import apply_precision
from lamina.models.decoder.splice import Splice
from lamina.models.invariance.fixed_sums import fix_sums
from lamina.models.invariance.random_keys import ForwardNumbers, TokenKeys
from lamina.models.invariance.token_sums import TokenCut
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.embedding import OutputHead, PositionEmbedding, VocabParallelEmbedding
from lamina.models.layers.hyper_connections import StreamSum
from lamina.models.layers.loss import IGNORED, check_ids, check_reduction
from lamina.models.layers.norms import make_norm
from lamina.models.layers.zigzag import check_divisible, cut_sequence, join_sequence
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.losses import RoutingContext, adds_losses

# The attributes in which torch keeps a module's hooks.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class GPTModel(KeepsRoles):
    """Embedding, blocks, final norm and head.

    A model that is built under `torch.device("meta")` takes no memory. After
    `to_empty(device=...)`, `init_weights()` (or `reset_parameters()` of each submodule, in any
    order) gives the same weights as a model that is built on that device with the same seed.

    Args:
        config: the shape.
        mesh: the ranks that share the work. Its axis `tp`, if it has one, cuts the weights, and
            its axis `cp` the sequences; experts are spread over `ep` and `expert_tp`. None is
            one process.
        seed: seed of the initial weights, the same on all ranks; by default drawn from torch's
            generator, so `torch.manual_seed` (or `lamina.mesh.seed_everything`) decides it.

    Raises:
        ValueError: if heads, inner width or vocabulary are not divisible by the number of ranks, or
            if ranks of `tp` or `pp` have different seeds.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> tokens = torch.randint(256, (1, 16))
        >>> GPTModel(config)(tokens).shape
        torch.Size([1, 16, 256])
    """

    def __init__(
        self, config: TransformerConfig, mesh: MeshLike = None, *, seed: int | None = None
    ) -> None:
        super().__init__()
        self.seed = draw_seed() if seed is None else seed
        check_same_seed(self.seed, axis_of(mesh, "tp"), axis_of(mesh, "pp"))
        self.cp = axis_of(mesh, "cp")
        self.expert_axes = ExpertAxes()
        if config.moe is not None:
            self.expert_axes = ExpertAxes.of(mesh, sequence_parallel=config.sequence_parallel)
        self.auxiliary_scale = 1.0
        self.forward_numbers: ForwardNumbers | None = None
        if config.invariant and config.draws_numbers:
            self.forward_numbers = ForwardNumbers(data_parallel_axis(mesh))
        device = torch.get_default_device()
        with torch.device("meta"):
            # Weights are drawn once, below, when every module has the seed of its name.
            self.build(config, axis_of(mesh, "tp"))
            apply_precision(self, config.precision, mesh)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def build(self, config: TransformerConfig, axis: MeshAxis | None) -> None:
        """Make the modules, for an axis of tensor-parallel ranks; None is one process."""
        self.config = config
        self.axis = axis
        for layer in config.distinct_layers:  # which also makes them before a forward is compiled
            if self.cp is not None:
                check_context_parallel(layer, self.cp, 1 if axis is None else axis.size)
        partial = self.sequence_parallel = config.sequence_parallel and axis is not None
        self.embedding = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            self.axis,
            sequence_parallel=partial,
            init_std=config.init_std,
            vocab_size=config.vocab_size,
            reduction=config.tp_reduction,
        )
        self.position_embedding = None
        if config.positions == "learned":
            self.position_embedding = PositionEmbedding(
                config.max_sequence_length + config.position_offset,
                config.hidden_size,
                partial=partial,
                init_std=config.init_std,
            )
        self.embedding_norm = make_norm(config, partial=partial) if config.embedding_norm else None
        rate = config.dropout if config.embedding_dropout is None else config.embedding_dropout
        self.dropout = Dropout(rate, self.axis, sharded=partial)
        if config.moe is None:  # other layers may add losses, from which padding is left out
            self.expert_axes = ExpertAxes(tp=axis, cp=self.cp, replicated=not partial)
        elif axis is not None and self.expert_axes.tp is None:
            # Experts are cut as the other weights are.
            self.expert_axes = ExpertAxes.of(axis, sequence_parallel=config.sequence_parallel)
        self.blocks = nn.ModuleList(
            make_block(config, index, self.axis, self.expert_axes)
            for index in range(config.num_layers)
        )
        self.mtp: MultiTokenLayers | None = None
        if config.mtp is not None:
            self.mtp = MultiTokenLayers(config, config.mtp, axis, self.cp, self.expert_axes)
        for module in self.modules():
            if self.cp is not None and isinstance(module, Attention):
                module.cp = self.cp.size  # blocks were given the axis of tp only
        self.stream_sum: StreamSum | None = None
        if config.hyper_connections is not None:
            self.stream_sum = StreamSum(config, config.hyper_connections, partial)
        self.final_norm = make_norm(config, partial=partial)
        self.head = OutputHead(
            config, self.axis, tied=self.embedding.weight if config.tie_embeddings else None
        )
        assign_seeds(self, self.seed)
        self.token_cut: TokenCut | None = None
        if config.invariant:
            self.token_cut = TokenCut(axis, partial, self.cp)
            fix_sums(self, self.token_cut)

    def tie_weights(self) -> None:
        """Make the head use the embedding's weight, if the config ties them."""
        if self.head.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        padding_mask: Tensor | None = None,
        splice: Splice | None = None,
        cache: TokenCache | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: int64 `[batch, sequence]`: whole sequences, the same on all ranks of `tp`
                and `cp`.
            labels: int64 `[batch, sequence]`: `labels[:, i]` is what should follow
                `tokens[:, i]` (the caller shifts); -100 is left out.
            positions: int64 `[sequence]`, `[1, sequence]` or `[batch, sequence]`; by default
                counted from 0, anew in each document.
            document_ids: integers `[batch, sequence]`: a token attends only to its own document.
            reduction: of the loss: `mean` over the labels that count, or `sum`.
            padding_mask: bool `[batch, sequence]`, True for padding. Such tokens go to no expert
                and are left out of auxiliary losses. The mask has no other effect: tokens still
                attend to padding, unless it is last or in a document of its own.
            splice: vectors that replace some tokens' embeddings.
            cache: of the tokens before these, for generation; see `caches`.

        Returns:
            Logits `[batch, sequence, vocabulary]`, or with labels the scalar loss in float32
            (nats; float64 for a float64 model). Over `cp` each rank returns the loss of its own
            tokens, weighted such that the mean over ranks is the loss (with `sum`, the sum over
            ranks), as for data-parallel ranks.

        Raises:
            ValueError: for a sequence longer than `config.max_sequence_length`, shapes that do
                not fit, and another reduction; on a CPU, for ids that the vocabulary does not
                have (on a GPU they make the result NaN).
        """
        check_reduction(reduction)
        if splice is not None and self.mtp is not None:
            raise ValueError(
                "splice beside mtp: spliced vectors are no later token's; leave mtp out"
            )
        self.check_inputs(tokens, labels, document_ids, positions, padding_mask)
        counted = cache is not None and positions is None and document_ids is None
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = default_positions(tokens, document_ids, start)
        positions = same_for_all(positions)
        cut = cut_sequence(tokens, self.cp), cut_sequence(positions, self.cp, dim=-1)
        self.begin_forward(tokens)
        token_keys = self.token_keys(tokens)
        x = self.embed(*cut, None if splice is None else splice.cut(self.cp), token_keys)
        x = self.spread(x)
        # Each rank of cp has a part of an auxiliary loss, and an equal share in a loss that the
        # caller computes from the whole logits.
        parts = 1 if self.cp is None else self.cp.size
        places = None if counted else positions  # those that are counted have tables in the cache
        masks = document_ids, padding_mask
        context = self.context(tokens, x.dtype, places, *masks, parts, cache, token_keys)
        for block in self.blocks:
            x = block(x, context)
        if cache is not None:
            cache.end_forward(tokens.shape[1])
            x = x[:, -1:] if cache.last_only and not self.sequence_parallel else x
        x = self.final_states(x)
        if labels is not None:
            loss = self.loss(x, labels, reduction)
            if self.training and self.mtp is not None:
                embed = partial(self.embed, positions=cut[1])
                further = self.mtp.loss(x, tokens, labels, *masks, context, embed, self.head)
                loss = loss + self._of_labels(further, labels, reduction)
            if context.routing is not None:
                # A mean is averaged over the ranks of cp, each of which has a part of an auxiliary
                # loss. A sum is divided by the number of labels later.
                factor = parts if reduction == "mean" else self.count_labels(labels)
                context.routing.scale.follow(loss, factor)
            return loss
        logits: Tensor = self.head(x)
        return join_sequence(logits.view(tokens.shape[0], -1, logits.shape[-1]), self.cp)

    def token_keys(self, tokens: Tensor, forward: int | None = None) -> TokenKeys | None:
        """Keys of this rank's tokens, in training with `invariant=True` and random numbers.

        `forward` is the forward's number in the step; by default they are counted.
        """
        if self.forward_numbers is None or self.token_cut is None or not self.training:
            return None
        return self.forward_numbers.token_keys(tokens, self.token_cut, forward)

    def begin_forward(self, tokens: Tensor) -> None:
        """Say how many sequences `[batch, sequence]` has, before any layer runs.

        Under sequence parallelism layers see runs of tokens, and cannot tell.
        """
        if self.token_cut is not None:
            self.token_cut.rows = tokens.shape[0]

    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None,
        document_ids: Tensor | None,
        padding_mask: Tensor | None,
        auxiliary: float | Tensor,
        cache: TokenCache | None = None,
        token_keys: TokenKeys | None = None,
    ) -> AttentionContext:
        """Make what the blocks of a forward share; `auxiliary` weighs auxiliary losses."""
        context = AttentionContext.build(
            self.config,
            tokens,
            dtype,
            positions,
            document_ids,
            training=self.training,
            mesh=self.cp,
            cache=cache,
        )
        if token_keys is not None:
            context = replace(context, token_keys=token_keys)
        if not adds_losses(self.config):
            return context
        scale = self.auxiliary_scale * auxiliary
        routing = RoutingContext.build(padding_mask, self.expert_axes, scale)
        return replace(context, routing=replace(routing, token_keys=token_keys))

    def loss(self, x: Tensor, labels: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        """Cross-entropy of this rank's hidden states with whole labels `[batch, sequence]`."""
        check_reduction(reduction)
        total: Tensor = self.head(x, cut_sequence(labels, self.cp), "sum")
        return self._of_labels(total, labels, reduction)

    def _of_labels(
        self, total: Tensor, labels: Tensor, reduction: Literal["mean", "sum"]
    ) -> Tensor:
        """A sum of this rank's losses, or its part of their mean over the labels that count."""
        if reduction == "sum":
            return total
        parts = 1 if self.cp is None else self.cp.size
        return total * parts / (labels != IGNORED).sum().clamp(min=1)

    def count_labels(self, labels: Tensor) -> Tensor:
        """The labels that count, by which a sum of losses weighs auxiliary losses.

        With `invariant=True` each sequence has its own number, `[batch]`, as a batch is cut into
        microbatches by the layout.
        """
        counted = labels != IGNORED
        return counted.sum(dim=1) if self.config.invariant else counted.sum()

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        splice: Splice | None = None,
        token_keys: TokenKeys | None = None,
    ) -> Tensor:
        """Embed tokens, replace the embeddings that are spliced, and add learned positions.

        Returns:
            `[batch, sequence, hidden]`, or under sequence parallelism this rank's run of the
            tokens, `[tokens / tp, hidden]`.
        """
        x: Tensor = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if splice is not None:
            x = splice.into(x, self.axis if self.sequence_parallel else None)
        if self.position_embedding is not None:
            if self.axis is not None and self.sequence_parallel:
                positions = scatter_to(positions.expand_as(tokens).flatten(), self.axis.group)
            elif self.token_cut is not None:
                # Each token looks its position up, so that all are leaves of one sum.
                positions = positions.expand_as(tokens)
            x = x + self.position_embedding(positions + self.config.position_offset)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Without keys the call is that of any module which a user may have put there.
        return cast(Tensor, self.dropout(x) if token_keys is None else self.dropout(x, token_keys))

    def spread(self, x: Tensor) -> Tensor:
        """Begin every residual stream with the embeddings `[..., hidden]`."""
        sizes = self.config.hyper_connections
        return x if sizes is None else torch.cat([x] * sizes.streams, dim=-1)

    def final_states(self, x: Tensor) -> Tensor:
        """What the head reads, `[..., hidden]`, of what the blocks have made."""
        x = x if self.stream_sum is None else self.stream_sum(x)
        return self.final_norm(x)  # type: ignore[no-any-return]

    def check_inputs(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        document_ids: Tensor | None,
        positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> None:
        """Raise ValueError for shapes that do not fit, instead of an error in a kernel later.

        Ids that do not exist and learned positions beyond the table are found on a CPU only.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}: need [batch, sequence]")
        limit = self.config.max_sequence_length
        if tokens.shape[1] > limit:
            raise ValueError(
                f"sequence of {tokens.shape[1]} tokens is longer than max_sequence_length {limit}: "
                "cut it, or raise max_sequence_length in TransformerConfig"
            )
        check_divisible(tokens.shape[1], self.cp)
        size = self.axis.size if self.axis is not None and self.sequence_parallel else 1
        rows, columns = tokens.shape[0], tokens.shape[1] // (1 if self.cp is None else self.cp.size)
        if rows * columns % size:
            raise ValueError(
                f"{rows} x {columns} = {rows * columns} tokens are not divisible by tp {size} "
                f"(remainder {rows * columns % size}), and sequence parallelism cuts them: pad the "
                "batch, or set sequence_parallel=False"
            )
        whole = {"labels": labels, "document_ids": document_ids, "padding_mask": padding_mask}
        for name, other in whole.items():
            if other is not None and other.shape != tokens.shape:
                raise ValueError(
                    f"{name} {'has' if name == 'padding_mask' else 'have'} shape "
                    f"{tuple(other.shape)}, tokens {tuple(tokens.shape)}: they must be equal"
                )
        if padding_mask is not None and padding_mask.dtype != torch.bool:
            raise TypeError(f"padding_mask is {padding_mask.dtype}: it must be torch.bool")
        if positions is not None:
            self._check_positions(positions, tokens)
        check_ids("tokens", tokens, self.config.vocab_size)
        if labels is not None:
            check_ids("labels", labels, self.config.vocab_size, IGNORED)

    def _check_positions(self, positions: Tensor, tokens: Tensor) -> None:
        shape = tuple(tokens.shape)
        if tuple(positions.shape) not in (shape, shape[1:], (1, *shape[1:])):
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, tokens {shape}: they must have "
                f"shape {shape} or {shape[1:]}"
            )
        if self.config.positions == "learned":
            remedy = "raise max_sequence_length, which is the number of learned positions"
            limit = self.config.max_sequence_length
            check_ids("positions", positions, limit, remedy=remedy)

    @property
    def reads_embedding_last(self) -> bool:
        """Whether what follows the blocks needs the embedding's weight, which comes first."""
        return self.head.tied or self.mtp is not None

    @property
    def caches(self) -> bool:
        """Whether a `TokenCache` gives what whole sequences give.

        Not over cp, not where experts take a limited number of tokens, and not with layers or
        attention of a user's own, which say nothing of later tokens. With `invariant=True` it would
        give other bits for Mamba, and for windows, whose keys are not kept from the start.
        """
        moe = self.config.moe
        limited = moe is not None and moe.capacity_factor is not None
        other_bits = self.config.invariant and any(
            layer.mamba is not None or layer.sliding_window is not None
            for layer in self.config.distinct_layers
        )
        plain = self.cp is None and not limited and not other_bits
        return plain and all(map(caches_tokens, self.blocks))

    @property
    def length_multiple(self) -> int:
        """The number that a sequence's length must be divisible by for the ranks that share it."""
        tp = self.axis.size if self.axis is not None and self.sequence_parallel else 1
        return tp * (1 if self.cp is None else 2 * self.cp.size)

    @property
    def sequence_axes(self) -> tuple[MeshAxis, ...]:
        """The axes whose ranks work on the same sequences."""
        return tuple(axis for axis in (self.axis, self.cp) if axis is not None)

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Count the parameters that this rank holds, tied ones once.

        Args:
            embeddings: False leaves out embeddings and head.
        """
        ends = () if embeddings else ("embedding", "position_embedding", "head")
        modules = [module for name in ends if (module := self._modules.get(name)) is not None]
        skip = {parameter for module in modules for parameter in module.parameters()}
        return sum(p.numel() for p in self.parameters() if p not in skip)


def require_gpt(model: nn.Module, what: str) -> GPTModel:
    """Return the model, or raise TypeError naming what `what` takes."""
    if isinstance(model, GPTModel):
        return model
    inside = [name for name, child in model.named_children() if isinstance(child, GPTModel)]
    hint = f": give it model.{inside[0]}" if inside else ""
    raise TypeError(f"{what} is for a GPTModel, not for a {type(model).__name__}{hint}")
