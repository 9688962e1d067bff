"""Layers that predict tokens beyond the next one; see `MultiTokenPrediction`."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import AttentionContext
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.multi_token import MultiTokenPrediction
from lamina.models.decoder.layer_stack import make_block
from lamina.models.layers.linear import Linear
from lamina.models.layers.loss import IGNORED
from lamina.models.layers.norms import make_norm
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.losses import RoutingContext


class MultiTokenLayer(nn.Module):
    """A block like the model's last one, over a state and the embedding of a later token.

    `final_norm(block(projection([embedding_norm(later), hidden_norm(x)])))`. The norm's result goes
    to the model's head, and to the next of these layers.

    Args:
        config: the model's.
        axis: of tensor-parallel ranks; None is one process.
        experts: the axes of the block's experts.
    """

    def __init__(
        self, config: TransformerConfig, axis: MeshAxis | None, experts: ExpertAxes
    ) -> None:
        super().__init__()
        partial, width = config.sequence_parallel and axis is not None, config.hidden_size
        self.embedding_norm = make_norm(config, partial=partial)
        self.hidden_norm = make_norm(config, partial=partial)
        # Whole on every rank: a product that is cut by columns would have to be gathered.
        self.projection = Linear(2 * width, width, init_std=config.init_std, partial=partial)
        self.block = make_block(config, config.num_layers - 1, axis, experts)
        self.final_norm = make_norm(config, partial=partial)

    def forward(self, x: Tensor, later: Tensor, context: AttentionContext) -> Tensor:
        """Two `[batch, sequence, hidden]` (or `[tokens / tp, hidden]`) to one of that shape."""
        joined = torch.cat((self.embedding_norm(later), self.hidden_norm(x)), dim=-1)
        x = self.block(self.projection(joined), context)
        return self.final_norm(x)  # type: ignore[no-any-return]


class MultiTokenLayers(nn.ModuleList):
    """The layers of `config.mtp`, one after the other.

    Args:
        config: the model's.
        mtp: how many there are, and what their losses weigh.
        axis: of tensor-parallel ranks; None is one process.
        cp: of context-parallel ranks; None has whole sequences on each rank.
        experts: the axes of the blocks' experts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mtp: MultiTokenPrediction,
        axis: MeshAxis | None,
        cp: MeshAxis | None,
        experts: ExpertAxes,
    ) -> None:
        super().__init__(MultiTokenLayer(config, axis, experts) for _ in range(mtp.depth))
        self.weight, self.cp, self.experts = mtp.weight, cp, experts

    def loss(
        self,
        x: Tensor,
        tokens: Tensor,
        labels: Tensor,
        document_ids: Tensor | None,
        padding_mask: Tensor | None,
        context: AttentionContext,
        embed: Callable[[Tensor], Tensor],
        head: nn.Module,
    ) -> Tensor:
        """The mean over the layers of their sums of losses, times the weight: a scalar.

        Args:
            x: this rank's final states.
            tokens: int64 `[batch, sequence]`, whole, as labels, ids and mask are.
            labels: the next token of each; -100 is left out.
            document_ids: no prediction goes beyond the end of a document.
            padding_mask: True for tokens that go to no expert.
            context: of the model's blocks.
            embed: makes embeddings of this rank's ids, as the model's blocks get them.
            head: the model's: states and ids to the sum of their losses.
        """
        totals = []
        for places, layer in enumerate(self, start=1):
            # No token is so much later than the last ones. They get any, have no label, and go to
            # no expert; what is before them does not attend to them.
            later = cut_sequence(_shifted(tokens, places, 0), self.cp)
            wanted = cut_sequence(_later_labels(labels, places, document_ids), self.cp)
            x = layer(x, embed(later), self._with_padding(context, tokens, padding_mask, places))
            totals.append(head(x, wanted, "sum"))
        return torch.stack(totals).mean() * self.weight

    def _with_padding(
        self, context: AttentionContext, tokens: Tensor, padding_mask: Tensor | None, places: int
    ) -> AttentionContext:
        """The context of a layer whose tokens need one so many places later, that is no padding."""
        if context.routing is None:
            return context
        if padding_mask is None:
            padding_mask = torch.zeros_like(tokens, dtype=torch.bool)
        padding_mask = padding_mask | _shifted(padding_mask, places, True)
        padding = RoutingContext.build(padding_mask, self.experts).padding
        return replace(context, routing=replace(context.routing, padding=padding))


def _shifted(ids: Tensor, places: int, filling: int) -> Tensor:
    """Move each row of `[batch, sequence]` to the left, and fill its end."""
    return F.pad(ids[:, places:], (0, min(places, ids.shape[1])), value=filling)


def _later_labels(labels: Tensor, places: int, document_ids: Tensor | None) -> Tensor:
    """The labels of the tokens so many places later, in the same document."""
    later = _shifted(labels, places, IGNORED)
    if document_ids is None:
        return later
    # Where a document is compared with the filling, the label is a filling too.
    other = _shifted(document_ids, places, 0) != document_ids
    return later.masked_fill(other, IGNORED)
