"""Tokens in chunks, for recurrences that are matrix products within a chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cut_chunks(tensor: Tensor, chunk: int, groups: int) -> Tensor:
    """`[batch, sequence, n, width]` to `[batch, groups, n / groups, chunks, chunk, width]`."""
    tensor = F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % chunk))
    tensor = torch.unflatten(torch.unflatten(tensor, 2, (groups, -1)), 1, (-1, chunk))
    return tensor.permute(0, 3, 4, 1, 2, 5)


def decay_within(total: Tensor, documents: ChunkDocuments | None) -> Tensor:
    """The decay between two tokens of a chunk, from the column's token to the row's."""
    length = total.shape[-1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=total.device).tril()
    if documents is not None:
        allowed = allowed & documents.same
    difference = total.unsqueeze(-1) - total.unsqueeze(-2)
    # Masked before the exponential, which would overflow above the diagonal (inf * 0 is NaN).
    return difference.masked_fill(~allowed, -torch.inf).exp()


class ChunkDocuments:
    """Masks of the tokens of a chunk that share a document, broadcast over groups and heads."""

    def __init__(self, runs: Tensor, chunk: int) -> None:
        extra = -runs.shape[1] % chunk
        # Padding belongs to the last document, so that the final state is that document's.
        padded = torch.cat((runs, runs[:, -1:].expand(-1, extra)), dim=1)
        cut = torch.unflatten(padded, 1, (-1, chunk))[:, None, None]  # [batch, 1, 1, chunks, chunk]
        last = cut[..., -1]
        # The document of the state that enters each chunk; a given state is the first document's.
        before = torch.cat((cut[..., :1, 0], last[..., :-1]), dim=-1)
        self.same = cut.unsqueeze(-1) == cut.unsqueeze(-2)
        self.reach_end = cut == last.unsqueeze(-1)
        self.reach_start = cut == before.unsqueeze(-1)
        self.pass_through = last == before
