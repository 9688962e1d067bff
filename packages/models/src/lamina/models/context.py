"""What every block of a forward shares: made once, passed to each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.models.config import TransformerConfig
from lamina.models.patterns import AttentionPattern, choose_pattern, document_positions
from lamina.models.rotary import rotary_tables


def default_positions(tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Count from 0, per document where there are documents: int64 ``[(batch,) sequence]``."""
    if document_ids is not None:
        return document_positions(document_ids)
    return torch.arange(tokens.shape[1], device=tokens.device)


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of every block needs beside its input.

    Attributes:
        shape: sequences in the batch, and tokens of each that attention sees.
        pattern: computes the attention: which tokens, by which kernel.
        rotary: cosines and sines from :func:`rotary_tables`, or None without RoPE.

    """

    shape: tuple[int, int]
    pattern: AttentionPattern
    rotary: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def build(
        config: TransformerConfig,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        training: bool = False,
    ) -> AttentionContext:
        """Prepare tables and pattern.

        Args:
            config: the model's.
            tokens: any tensor ``[batch, sequence, ...]`` on the device of the activations.
            dtype: of the activations.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``; counted from 0 when None,
                anew in each document where ``document_ids`` are given.
            document_ids: integers ``[batch, sequence]``; a token attends only within its document,
                a run of equal ids.
            training: whether attention dropout applies.

        """
        rotary = None
        if config.positions == "rope":
            if positions is None:
                positions = default_positions(tokens, document_ids)
            rotary = rotary_tables(config, positions)
        dropout = config.attention_dropout if training else 0.0
        pattern = choose_pattern(config, tokens, dtype, document_ids, dropout)
        return AttentionContext((tokens.shape[0], tokens.shape[1]), pattern, rotary)

    @staticmethod
    def plain(config: TransformerConfig, x: Tensor, *, training: bool) -> AttentionContext:
        """Causal attention, positions from 0, for an attention that is used by itself.

        Raises:
            ValueError: if ``x`` is not ``[batch, sequence, hidden]``.

        """
        if x.ndim != 3:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: without a context it must be [batch, sequence, "
                "hidden]; under sequence parallelism pass AttentionContext.build(...)"
            )
        return AttentionContext.build(config, x, x.dtype, training=training)
