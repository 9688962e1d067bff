"""Embeddings of tokens and positions, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.initialise import fill_normal


class Embedding(nn.Module):
    """A table of vectors ``weight`` ``[rows, width]``, looked up by integer ids."""

    def __init__(self, rows: int, width: int, init_std: float = 0.02) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.init_std = init_std
        self.init_seed: int | None = None
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2)."""
        fill_normal(self.weight, self.init_std, self.init_seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up int64 ids ``[...]``: ``[..., width]``."""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.rows} x {self.width}"


class OutputHead(nn.Module):
    """Hidden states to logits, or to the loss where labels are given.

    Args:
        hidden_size: width of the hidden states.
        vocab_size: number of logits.
        init_std: standard deviation of the initial weight.
        tied: the weight of an embedding to use instead of an own one.

    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        init_std: float = 0.02,
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.init_seed: int | None = None
        self.tied = tied is not None
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size)) if tied is None else tied
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2); a tied one is the embedding's to draw."""
        if not self.tied:
            fill_normal(self.weight, self.init_std, self.init_seed)

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Compute logits ``[batch, sequence, vocabulary]``, or with labels the cross-entropy.

        Args:
            hidden: ``[batch, sequence, hidden]``.
            labels: int64 ``[batch, sequence]``; -100 is left out.
            reduction: ``mean`` over the labels that count, or ``sum``.

        """
        logits = F.linear(hidden, self.weight)
        if labels is None:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = F.cross_entropy(
            logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return total / (labels != -100).sum().clamp(min=1) if reduction == "mean" else total
