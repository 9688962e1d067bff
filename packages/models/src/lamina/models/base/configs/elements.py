"""The smallest parts of a layer: the function between the products of an MLP, and norms.

Each is a value in the config, as a name or as an object. An object of a class of your own is used
as Lamina's are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

ActivationName = Literal[
    "gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"
]
NormName = Literal[
    "rmsnorm", "layernorm", "layernorm_unbiased", "layernorm_plain", "rmsnorm_zero",
    "layernorm_zero",
]  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """The function between the products of an MLP.

    Args:
        function: of one tensor, elementwise.
        gated: the first product has twice the inner width. The function is of its first half,
            the gate, and multiplies the second half (Shazeer, 2020).

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        ...                            activation=Activation(torch.tanh, gated=True))
    """

    function: Callable[[Tensor], Tensor]
    gated: bool = False


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with a hyperbolic tangent (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """Squared ReLU (So et al., 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(gelu_tanh),
    "relu": Activation(F.relu),
    "relu2": Activation(relu_squared),
    "silu": Activation(F.silu),
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(F.gelu, gated=True),
    "geglu_tanh": Activation(gelu_tanh, gated=True),
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
