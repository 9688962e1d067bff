"""A layer of one's own, cut over tensor-parallel ranks: radial basis functions.

`y = sum over centres of value * exp(-sharpness * |x - centre|^2) + bias`, where each output has a
value per centre. No linear layer computes it, so `ColumnParallelLinear` is of no help here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.collectives import copy_to, reduce_from
from lamina.mesh import ParallelMesh, mark


class Radial(nn.Module):
    """Each rank of `tp` holds some of the centres, with their values."""

    def __init__(self, inputs: int, centres: int, outputs: int, mesh: ParallelMesh) -> None:
        super().__init__()
        tp = mesh.axis("tp")
        if centres % tp.size:
            raise ValueError(f"{centres} centres cannot be cut over {tp.size} ranks of tp")
        self.group = tp.group
        # Every rank draws the whole and keeps its piece: the model is one, whatever tp is.
        whole_centres = torch.randn(centres, inputs)
        whole_values = torch.randn(outputs, centres) * (2 / centres) ** 0.5
        piece = whole_centres.chunk(tp.size)[tp.rank].clone()
        self.centres = mark(nn.Parameter(piece), tp_shard_dim=0)
        piece = whole_values.chunk(tp.size, dim=1)[tp.rank].clone()
        self.values = mark(nn.Parameter(piece), tp_shard_dim=1)
        # Whole on every rank. But a rank's gradient comes from its own centres alone, so the
        # gradient of the model is the sum over tp. Without this role ranks would drift apart.
        self.sharpness = mark(nn.Parameter(torch.tensor(1.0)), tp_grad="sum")
        # Whole on every rank, and used after the sum: gradients are equal, and no role is needed.
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[batch, outputs]` from `[batch, inputs]`, both equal on all ranks of tp."""
        x = copy_to(x, self.group)  # the same numbers; backward sums what each rank's centres say
        distance = (x[:, None] - self.centres).square().sum(dim=-1)
        partial = torch.exp(-self.sharpness * distance) @ self.values.t()
        return reduce_from(partial, self.group) + self.bias  # one sum over tp
