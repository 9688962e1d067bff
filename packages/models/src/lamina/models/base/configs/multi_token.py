"""Prediction of tokens beyond the next one."""

from dataclasses import dataclass

from lamina.models.base.configs.field_checks import require_at_least, require_positive
from lamina.models.base.configs.hyper_connections import HyperConnections


@dataclass(frozen=True, kw_only=True)
class MultiTokenPrediction:
    """Layers that predict tokens beyond the next one, in training (DeepSeek-V3, 2024, section 2.2).

    Layer k reads what the layer before it has made of a token, or the model for k = 1, and the
    embedding of the token k places later. It predicts the token after that one. Embedding and head
    are the model's. Generation does not use these layers.

    Args:
        depth: how many layers there are, and so how many tokens beyond the next one are predicted.
        weight: the factor of the mean of their losses, which is added to the loss.

    Raises:
        ValueError: for a depth below 1, or a weight that is not positive.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            mtp=MultiTokenPrediction(depth=1, weight=0.3))
    """

    depth: int = 1
    weight: float = 0.3

    def __post_init__(self) -> None:
        require_at_least(1, self, "depth")
        require_positive(self, "weight")

    def check(self, streams: HyperConnections | None) -> None:
        """Raise ValueError for a model whose states are several streams."""
        if streams is not None:
            raise ValueError(
                f"mtp is {self} beside hyper_connections={streams}: these layers read one residual "
                "stream; leave one of them out"
            )
