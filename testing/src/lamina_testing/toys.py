"""Small models with awkward parameters, and deterministic data, for tests of the wrappers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual MLP block; width need not divide by anything."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] to [batch, width]."""
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class OddNet(nn.Module):
    """Odd sizes, a parameter of 0 dimensions and an empty one."""

    def __init__(self, width: int = 17, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 3)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 5] to [batch, 3]."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.leave(x) * self.temperature + self.empty.sum()
        return out


class TiedNet(nn.Module):
    """An embedding tied to the head, across units, and a block that is used twice."""

    def __init__(self, vocabulary: int = 29, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] integers to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class ConvNet(nn.Module):
    """Convolutions with weights of four dimensions, and normalisation with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(1, b))
            for a, b in ((1, 5), (5, 5), (5, 7))
        )
        self.head = nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, height, width] to [batch, 3]."""
        for stage in self.stages:
            x = F.relu(stage(x))
        out: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return out


class TinyTransformer(nn.Module):
    """Causal attention and MLP blocks over byte tokens, in plain torch."""

    def __init__(self, vocabulary: int = 31, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] integers to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def inputs(model: nn.Module, seed: int, batch: int = 4) -> torch.Tensor:
    """Input that a toy model takes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, (TiedNet, TinyTransformer)):
        return torch.randint(model.embedding.num_embeddings, (batch, 6), generator=generator)
    if isinstance(model, ConvNet):
        return torch.randn(batch, 1, 6, 6, generator=generator)
    return torch.randn(batch, 5, generator=generator)
