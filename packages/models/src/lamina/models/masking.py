"""Who attends to whom, and what every block of a forward shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.models.config import TransformerConfig
from lamina.models.rotary import rotary_tables


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions that start at 0 at the first token of each run of equal ids.

    Args:
        document_ids: integers ``[batch, sequence]``.

    Returns:
        int64 ``[batch, sequence]``.

    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


@dataclass(frozen=True)
class AttentionContext:
    """What the blocks of one forward share; made once, passed to each.

    Attributes:
        rotary: cosines and sines from :func:`rotary_tables`, or None without RoPE.
        mask: bool ``[batch or 1, 1, sequence, sequence]``, True where the query (rows) may attend
            to the key (columns); None where plain causal attention says it all.

    """

    rotary: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None

    @staticmethod
    def build(
        config: TransformerConfig,
        sequence: int,
        device: torch.device,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> AttentionContext:
        """Prepare tables and mask for sequences of ``sequence`` tokens.

        Args:
            config: the model's.
            sequence: tokens per sequence.
            device: where the activations are.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``; counted from 0 when None,
                anew in each document where ``document_ids`` are given.
            document_ids: integers ``[batch, sequence]``; a token attends only within its document.

        """
        rotary = None
        if config.positions == "rope":
            if positions is None:
                positions = default_positions(sequence, device, document_ids)
            rotary = rotary_tables(config, positions)
        return AttentionContext(rotary, dense_mask(sequence, device, config, document_ids))


def default_positions(
    sequence: int, device: torch.device, document_ids: Tensor | None = None
) -> Tensor:
    """Count from 0, per document where there are documents; int64 ``[(batch,) sequence]``."""
    if document_ids is not None:
        return document_positions(document_ids)
    return torch.arange(sequence, device=device)


def dense_mask(
    sequence: int, device: torch.device, config: TransformerConfig, document_ids: Tensor | None
) -> Tensor | None:
    """Write the mask out in full, or return None where it is plain causal."""
    window = config.sliding_window
    if document_ids is None and (window is None or window >= sequence):
        return None
    index = torch.arange(sequence, device=device)
    distance = index[:, None] - index[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    allowed = allowed[None]
    if document_ids is not None:
        allowed = allowed & (document_ids[:, :, None] == document_ids[:, None, :])
    return allowed[:, None]
