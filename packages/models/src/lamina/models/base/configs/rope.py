"""RoPE beyond the length that a model was first trained on."""

import math
from dataclasses import dataclass
from typing import Literal

from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
)

RopeScalingKind = Literal["linear", "llama3", "yarn"]


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """The factor that YaRN multiplies cosines and sines by (Peng et al., 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


_OF_SCALING = {
    "llama3": ["low_freq_factor", "high_freq_factor"],
    "yarn": ["beta_fast", "beta_slow", "attention_factor", "truncate", "query_beta"],
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's wavelengths are stretched beyond the length that a model was first trained on.

    Args:
        kind: `linear` (Chen et al., 2023), `llama3` (of Llama 3.1) or `yarn` (Peng et al.,
            2023).
        factor: how many times longer the new length is.
        original_length: tokens of the length first trained on (`llama3` and `yarn`).
        low_freq_factor: `llama3`: wavelengths above `original_length / low_freq_factor` are
            stretched by `factor`.
        high_freq_factor: `llama3`: wavelengths below `original_length / high_freq_factor` are
            kept. Wavelengths between the two limits are interpolated.
        beta_fast: `yarn`: pairs that turn this often or more within `original_length` are kept.
        beta_slow: `yarn`: pairs that turn at most this often are stretched by `factor`.
        attention_factor: `yarn`: multiplies cosines and sines; `0.1 * ln(factor) + 1` if None.
        truncate: `yarn`: round the first and the last interpolated pair to whole numbers.
        query_beta: `yarn`: queries grow with their position p, by the factor
            `1 + query_beta * ln(1 + floor(p / original_length))` (Ministral 3, 2025).

    Examples:
        >>> scaling = RopeScaling(kind="yarn", factor=4.0, original_length=32768)
    """

    kind: RopeScalingKind
    factor: float
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    query_beta: float = 0.0

    def __post_init__(self) -> None:
        require_choices(self, RopeScaling)
        if self.factor < 1.0:
            raise ValueError(f"RoPE's factor is {self.factor}: it must be at least 1")
        require_at_least(1, self, "original_length")
        for kind, names in _OF_SCALING.items():
            if kind != self.kind:
                refuse_unread(self, names, f"kind={self.kind!r} is not {kind!r}")
        if self.kind == "linear":
            refuse_unread(self, ["original_length"], "kind='linear' stretches all wavelengths")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )

    @property
    def magnitude(self) -> float:
        """The factor that cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor)
