"""Several residual streams in place of one."""

from dataclasses import dataclass

from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class HyperConnections:
    """Residual streams, which layers read and write by weights of their own (Zhu et al., 2024).

    Attention, MLP or mixer reads a weighted sum of a token's streams. Its result is added to each
    stream by a factor. Before that the streams are mixed, by a matrix whose rows and columns have
    the sum one (mHC; Xie et al., 2025). All of these numbers follow from the token's streams.

    Args:
        streams: how many there are.
        mixed: whether streams are mixed. If not, each one is added to alone (Hy4, 2026).
        iterations: how often rows and columns of the matrix are divided by their sums.
        magnitude: the bound of the factors of results.
        eps: added to the weights of the sum, to the matrix, and to sums that divide.

    Raises:
        ValueError: for fewer than two streams, no iteration, numbers that are not positive, and
            iterations without a matrix.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            hyper_connections=HyperConnections(streams=4))
    """

    streams: int = 4
    mixed: bool = True
    iterations: int = 20
    magnitude: float = 2.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_at_least(2, self, "streams")
        require_at_least(1, self, "iterations")
        require_positive(self, "magnitude", "eps")
        if not self.mixed:
            refuse_unread(self, ["iterations"], "mixed=False has no matrix of streams")

    @property
    def numbers(self) -> int:
        """How many numbers of a token one reader makes: weights, factors, and the matrix."""
        return self.streams * (2 + self.streams * self.mixed)

    def parameters(self, hidden_size: int) -> int:
        """The weights of one reader that a token is multiplied with."""
        return self.numbers * self.streams * hidden_size

    def products_per_token(self, hidden_size: int) -> int:
        """The multiplications of one reader that take no weight: each number's, with a stream."""
        return self.numbers * hidden_size
