"""Dropout whose random numbers agree, or differ, between tensor-parallel ranks as they should."""

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import rng_stream
from lamina.mesh.engine import MeshAxis, require_stream
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.compat import one_graph_break


def dropout_stream(
    rate: float, sharded: bool, axis: MeshAxis | None = None
) -> AbstractContextManager[None]:
    """Select the random numbers for dropout of activations; with a rate of 0 nothing is drawn.

    Ranks of `axis` that hold the same activations must drop the same elements; their default
    generators agree after `lamina.mesh.seed_everything`, without which this is a KeyError. Ranks
    that hold different activations (`sharded`) must draw independently; they use the stream `tp`.
    """
    if rate > 0.0 and sharded:
        return rng_stream("tp")
    if rate > 0.0 and axis is not None:
        _require_stream("tp")
    return nullcontext()


# Not compiled: the compiler would treat the set of streams as a constant. The collectives of the
# axis break the graph anyway.
_require_stream = one_graph_break(require_stream)


class Dropout(nn.Module):
    """Zero elements with probability `rate` in training, scaling the others up.

    Args:
        rate: probability.
        mesh: has an axis `tp`, or is that axis; None is one process.
        sharded: each tensor-parallel rank holds other elements. Otherwise they hold the same
            elements, and need `lamina.mesh.seed_everything` to drop the same ones.

    Examples:
        >>> hidden = Dropout(0.1)(torch.ones(2, 8))
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
