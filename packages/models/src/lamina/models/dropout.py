"""Dropout that draws what the mesh wants drawn."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import rng_stream


def dropout_stream(rate: float, sharded: bool) -> AbstractContextManager[None]:
    """Random numbers for dropout of activations that are, or are not, sharded over tp.

    Whole activations must lose the same elements on every tensor-parallel rank, and do so where
    ``lamina.mesh.seed_everything`` was called; pieces must lose elements independently, which takes
    the stream that it made for them.
    """
    return rng_stream("tp") if sharded and rate > 0.0 else nullcontext()


class Dropout(nn.Module):
    """Zero elements with probability ``rate`` in training, scaling the others up.

    Args:
        rate: probability.
        sharded: each tensor-parallel rank holds other elements.

    """

    def __init__(self, rate: float, *, sharded: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.sharded = sharded

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        if not self.training or self.rate == 0.0:
            return x
        with dropout_stream(self.rate, self.sharded):
            return F.dropout(x, self.rate)

    def extra_repr(self) -> str:
        """Rate, for printing."""
        return f"{self.rate}, sharded={self.sharded}"
