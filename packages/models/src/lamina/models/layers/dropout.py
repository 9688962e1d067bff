"""Dropout whose random numbers agree, or differ, between tensor-parallel ranks as they should."""

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import derive_seed, rng_stream
from lamina.mesh.engine import MeshAxis, require_stream
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.compat import one_graph_break
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.random_keys import TokenKeys


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


class Dropout(FixedSums, nn.Module):
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
        self.init_seed: int | None = None

    def forward(self, x: Tensor, token_keys: TokenKeys | None = None, use: int = 0) -> Tensor:
        """Any shape to the same.

        Args:
            x: activations.
            token_keys: what decides which elements are dropped (`invariant=True`); None draws
                from torch's generators.
            use: the number of this call among those of a forward.

        Raises:
            ValueError: without token_keys in a model with `invariant=True`.
        """
        if not self.training or self.rate == 0.0:
            return x
        if token_keys is not None:
            return token_keys.dropout(x, self.rate, derive_seed(self.init_seed or 0, use))
        if self.layout_invariant:
            raise ValueError(
                f"Dropout({self.rate}) of a model with invariant=True has no token_keys, "
                "and torch's generators depend on the layout: give it context.token_keys of the "
                "model's forward"
            )
        with dropout_stream(self.rate, self.sharded, self.axis):
            return F.dropout(x, self.rate)

    def extra_repr(self) -> str:
        """Rate, for printing."""
        return f"{self.rate}, sharded={self.sharded}"
