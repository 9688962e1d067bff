"""Dropout that draws what the mesh wants drawn."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo as one_graph_break

from lamina.mesh import rng_stream
from lamina.mesh.engine import MeshAxis, require_stream
from lamina.models.base.mesh_axes import MeshLike, axis_of

__all__ = ["Dropout", "dropout_stream"]


def dropout_stream(
    rate: float, sharded: bool, axis: MeshAxis | None = None
) -> AbstractContextManager[None]:
    """Random numbers for dropout of activations that are, or are not, sharded over tp.

    Whole activations must lose the same elements on every tensor-parallel rank, and do so where
    `lamina.mesh.seed_everything` was called; pieces must lose elements independently, which takes
    the stream that it made for them.

    Args:
        rate: 0 draws nothing.
        sharded: each rank holds other elements.
        axis: the ranks that hold the same elements; None is one.

    Raises:
        KeyError: over more than one rank, where `seed_everything` was not called.
    """
    if rate > 0.0 and sharded:
        return rng_stream("tp")
    if rate > 0.0 and axis is not None:
        _require_stream("tp")
    return nullcontext()


# Uncompiled: what streams there are is not the compiler's to remember. Collectives of the axis
# break the graph, too.
_require_stream = one_graph_break(require_stream)


class Dropout(nn.Module):
    """Zero elements with probability `rate` in training, scaling the others up.

    Args:
        rate: probability.
        mesh: has an axis `tp`, or is that axis; None is one process.
        sharded: each tensor-parallel rank holds other elements; otherwise they hold the same, and
            need `lamina.mesh.seed_everything` to lose the same.
    """

    def __init__(self, rate: float, mesh: MeshLike = None, *, sharded: bool = False) -> None:
        super().__init__()
        self.rate = rate
        self.axis = axis_of(mesh, "tp")
        self.sharded = sharded

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        if not self.training or self.rate == 0.0:
            return x
        with dropout_stream(self.rate, self.sharded, self.axis):
            return F.dropout(x, self.rate)

    def extra_repr(self) -> str:
        """Rate, for printing."""
        return f"{self.rate}, sharded={self.sharded}"
