"""The part of a model that belongs to one pipeline stage."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from lamina.mesh import mark
from lamina.mesh.engine import copy_role
from lamina.models.attention.context import default_positions
from lamina.models.base.kept_roles import KeepsRoles
from lamina.models.decoder.gpt import GPTModel
from lamina.models.decoder.precision_backends import amax_exchanges
from lamina.models.layers.zigzag import cut_sequence


@runtime_checkable
class SumsGradients(Protocol):
    """A data-parallel wrapper, as a stage uses it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards are not the last of the step."""

    def late_gradients(self) -> AbstractContextManager[None]:
        """Inside, gradients belong to backwards that have ended."""

    def start_grad_sync(self) -> None:
        """Start to sum the accumulated gradients over ranks."""


@runtime_checkable
class OncePerStep(Protocol):
    """A wrapper that gathers weights, as a schedule uses it."""

    def gather_once_per_step(self, once: bool = True) -> None:
        """Keep units gathered from their first use to the end of a step."""

    def reduce_once_per_step(self, once: bool = True) -> None:
        """Sum gradients over ranks in the final backwards only."""

    def release_units(self) -> None:
        """Release the units, as the step has ended."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A microbatch, as every stage is given it: tensors `[batch, sequence]`, or None.

    Only the last stage uses labels. Positions may be `[sequence]`. The sum of the tokens' losses is
    multiplied by `factor`, and auxiliary losses by `auxiliary`. The padding mask is True for tokens
    that go to no expert. `number` is that of the microbatch in the step.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None
    document_ids: Tensor | None
    factor: Tensor | float = 1.0
    auxiliary: Tensor | float = 1.0
    padding_mask: Tensor | None = None
    number: int = 0


class GPTStage(GPTModel):
    """Some consecutive blocks of a `GPTModel`; the first and last stage also have its ends.

    Parameters have the names that they have in the whole model: layer 5 is `blocks.5` in every
    stage. If embeddings are tied, the last stage's copy is `embedding.weight` (and `head.weight`
    in `state_dict()`, as in the whole model). With `config.mtp` that stage has a copy too.

    The modules of the model, which may be on the meta device, move here. `layers` are numbers of
    its blocks, in order. The `first` stage embeds tokens, and the `last` one computes the loss;
    they may have no layers. With `copies` the last stage copies the embedding, if it needs it,
    because the first stage is on this rank too and has the own one of the model.
    """

    def __init__(
        self,
        model: GPTModel,
        layers: Sequence[int],
        *,
        first: bool,
        last: bool,
        copies: bool = False,
    ) -> None:
        KeepsRoles.__init__(self)
        self.config, self.seed = model.config, model.seed
        self.axis, self.cp = model.axis, model.cp
        self.sequence_parallel, self.token_cut = model.sequence_parallel, model.token_cut
        self.expert_axes, self.auxiliary_scale = model.expert_axes, model.auxiliary_scale
        # A copy, as `finalize_grads` ends the step of every stage.
        self.forward_numbers = copy.deepcopy(model.forward_numbers)
        self.first, self.last, self.layers = first, last, tuple(layers)
        copied = model.reads_embedding_last
        self.mtp = model.mtp if last else None
        # Before the head, as in the whole model: a tied weight has the name of its first module.
        if first or (last and copied):
            self.embedding = model.embedding
        if first:
            self.position_embedding = model.position_embedding
            self.embedding_norm = model.embedding_norm
            self.dropout = model.dropout
        elif self.mtp is not None:  # `embed` reads them; `pipeline` refuses other ends
            self.position_embedding = self.embedding_norm = None
            self.dropout = copy.copy(model.dropout)
        self.blocks = nn.ModuleList()
        for layer in self.layers:
            self.blocks.add_module(str(layer), model.blocks.get_submodule(str(layer)))
        self.stream_sum = model.stream_sum if last else None
        if last:
            self.final_norm, self.head = model.final_norm, model.head
            if copied and copies and not first:
                whole = self.embedding
                self.embedding = copy.deepcopy(whole)
                copy_role(whole.weight, self.embedding.weight)
                self.head = copy.copy(self.head)
                self.head._parameters = dict(self.head._parameters)
                self.tie_weights()
        if copied and first is not last:
            mark(self.embedding.weight, tied="embedding")
        for hook in amax_exchanges(model):  # histories shift as those of the model do
            self.register_forward_pre_hook(hook)
        # The modules of the model keep their own modes.
        self.training = self.blocks.training = model.training

    def tie_weights(self) -> None:
        """Make a tied head use this stage's copy of the embedding's weight."""
        if self.last and self.head.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor | None, batch: Microbatch) -> Tensor:  # type: ignore[override]
        """Run the stage on one microbatch.

        `x` is the result of the stage before (None in the first stage), and the microbatch is the
        same on every stage. Activations come back, `[batch, sequence / cp, width]` (`[tokens / cp
        / tp, width]` under sequence parallelism), or in the last stage the loss times
        `batch.factor`, a scalar. The width is `config.stream_width`.
        """
        positions = batch.positions
        if positions is None:
            positions = default_positions(batch.tokens, batch.document_ids)
        self.begin_forward(batch.tokens)
        token_keys = self.token_keys(batch.tokens, batch.number)
        if self.first:
            self.check_inputs(batch.tokens, batch.labels, batch.document_ids)
            cut = cut_sequence(positions, self.cp, dim=-1)
            x = self.embed(cut_sequence(batch.tokens, self.cp), cut, token_keys=token_keys)
            x = self.spread(x)
        if x is None:
            raise ValueError("x is None: only the first stage makes its own input")
        masks = batch.document_ids, batch.padding_mask
        context = self.context(
            batch.tokens, x.dtype, positions, *masks, batch.auxiliary, token_keys=token_keys
        )
        for block in self.blocks:
            x = block(x, context)
        if not self.last:
            return x
        x = self.final_states(x)
        total: Tensor = self.head(x, cut_sequence(batch.labels, self.cp), "sum")
        if self.training and self.mtp is not None:
            embed = partial(self.embed, positions=cut_sequence(positions, self.cp, dim=-1))
            given = batch.tokens, batch.labels, *masks
            total = total + self.mtp.loss(x, *given, context, embed, self.head)
        return total * batch.factor

    def activation_shape(self, batch: Microbatch) -> tuple[int, ...]:
        """The shape of the activations of a microbatch between stages."""
        rows, columns = batch.tokens.shape
        columns //= 1 if self.cp is None else self.cp.size
        if self.axis is not None and self.sequence_parallel:
            return (rows * columns // self.axis.size, self.config.stream_width)
        return (rows, columns, self.config.stream_width)

    def extra_repr(self) -> str:
        """The layers and ends of the stage, for printing."""
        ends = [name for name, present in (("first", self.first), ("last", self.last)) if present]
        return f"layers={self.layers}" + "".join(f", {end}" for end in ends)
