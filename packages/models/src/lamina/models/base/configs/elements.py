"""The smallest parts of a layer: the function between the products of an MLP, scores, and norms.

Each is a value in the config, as a name or as an object. An object of a class of your own is used
as Lamina's are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ActivationName = Literal[
    "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh",
    "swiglu_clamped",
]  # fmt: skip
NormName = Literal[
    "rmsnorm", "rmsnorm_plain", "rmsnorm_zero", "layernorm", "layernorm_unbiased",
    "layernorm_plain", "layernorm_zero",
]  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """The function between the products of an MLP.

    Args:
        function: of one tensor, elementwise.
        gated: the first product has twice the inner width. The function is of its first half,
            the gate, and multiplies the second half (Shazeer, 2020).
        linear: what becomes of the second half before that; None leaves it as it is.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            activation=Activation(torch.tanh, gated=True))
    """

    function: Callable[[Tensor], Tensor]
    gated: bool = False
    linear: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.linear is not None and not self.gated:
            raise ValueError(
                "an Activation has linear, and gated=False: without a gate there is no second half "
                "that it could be of; set gated=True, or leave linear out"
            )


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with a hyperbolic tangent (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


def gelu_sigmoid(x: Tensor) -> Tensor:
    """GELU by its approximation with a sigmoid (Hendrycks and Gimpel, 2016), as CLIP has it."""
    return x * torch.sigmoid(1.702 * x)


CLAMPED = 7.0
"""The bound of `swiglu_clamped`, which is gpt-oss's."""


def clamped_gate(x: Tensor) -> Tensor:
    """The gate of gpt-oss (2025): clamped from above, times a sigmoid of 1.702 times itself."""
    return gelu_sigmoid(x.clamp(max=CLAMPED))


def clamped_and_one(x: Tensor) -> Tensor:
    """What that gate multiplies: the second half, clamped, and 1, so that the gate passes too."""
    return x.clamp(-CLAMPED, CLAMPED) + 1.0


def relu_squared(x: Tensor) -> Tensor:
    """Squared ReLU (So et al., 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(gelu_tanh),
    "gelu_sigmoid": Activation(gelu_sigmoid),
    "relu": Activation(F.relu),
    "relu2": Activation(relu_squared),
    "silu": Activation(F.silu),
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(F.gelu, gated=True),
    "geglu_tanh": Activation(gelu_tanh, gated=True),
    "swiglu_clamped": Activation(clamped_gate, gated=True, linear=clamped_and_one),
}


def activation_of(named: str | Activation) -> Activation:
    """The activation that a config names, or holds."""
    if isinstance(named, Activation):
        return named
    if named not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"activation is {named!r}: it must be one of {known}, or an Activation(function)"
        )
    return ACTIVATIONS[named]


class HeadWidths(NamedTuple):
    """Elements of one attention head."""

    query: int
    """Elements of a query or key head."""
    value: int
    """Elements of a value head."""
    rotary: int
    """Elements of a query or key head that RoPE turns."""


@dataclass(frozen=True, kw_only=True)
class AttentionScores:
    """What becomes of attention's scores between their scale and the softmax.

    Give an object as `TransformerConfig(scores=...)`. A subclass overrides `change`, and is then a
    part of your own.

    Args:
        softcap: a score s becomes `softcap * tanh(s / softcap)` (Gemma 2, 2024).
        sinks: a learned score of each head takes part in the softmax, and has no value, so that a
            head may attend to nothing (gpt-oss, 2025).
        linear_bias: a score falls with the distance of query and key, in each head by its own slope
            (ALiBi, Press et al., 2022).

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            scores=AttentionScores(softcap=50.0))
    """

    softcap: float | None = None
    sinks: bool = False
    linear_bias: bool = False

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"softcap is {self.softcap}: it must be positive, or None")

    def change(self, scores: Tensor, distance: Tensor, slope: Tensor) -> Tensor:
        """Change scores, elementwise.

        Args:
            scores: of pairs of a query and a key, in float32 or wider.
            distance: int64, positions of keys less those of queries: 0 or less.
            slope: of the head, in float32; 0 without `linear_bias`.
        """
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores + slope * distance if self.linear_bias else scores

    def slopes(self, heads: int, device: torch.device) -> Tensor:
        """The slope of each of all heads: float32 `[heads]`."""
        if not self.linear_bias:
            return torch.zeros(heads, device=device)
        power = 1 << (heads.bit_length() - 1)
        steps = torch.arange(1, heads + 1, device=device, dtype=torch.float32)
        # Heads beyond the largest power of two have the slopes between those of the first.
        between = (2 * (steps - power) - 1) / 2
        return torch.exp2(-8.0 / power * torch.where(steps > power, between, steps))


@dataclass(frozen=True, kw_only=True)
class NormPart(ABC):
    """A kind of norm over the last dimension: give an object as `TransformerConfig(norm=...)`.

    Args:
        names: those of its parameters, each as long as the dimension.
    """

    names: tuple[str, ...] = ("weight",)

    @abstractmethod
    def make(self, size: int, eps: float, *, partial: bool = False) -> nn.Module:
        """Build the module for a width.

        With `partial` each tensor-parallel rank sees other tokens, so that gradients of its
        parameters have to be marked as sums: `mark(parameter, tp_grad="sum")`.
        """
