"""The feed-forward network of a block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from lamina.models.base.config import LayerPart, TransformerConfig
from lamina.models.base.configs.elements import Activation, activation_of
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.token_sums import TokenCut, by_elements
from lamina.models.layers.linear import from_residual, into_residual


class ActivationFunction(FixedSums, nn.Module):
    """The function between two products, as a module, so that selective recomputation finds it."""

    def __init__(self, kind: str | Activation) -> None:
        super().__init__()
        self.kind = kind
        activation = activation_of(kind)
        self.function, self.gated = activation.function, activation.gated
        self.linear = activation.linear

    def fix_sums(self, tokens: TokenCut) -> None:
        """See `FixedSums`; an `Activation` of the user's gives what its own operators give."""
        super().fix_sums(tokens)
        if isinstance(self.kind, str):
            self.function = by_elements(self.kind)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., ffn]` to the same; a gated function takes `[..., 2 * ffn]`, the gate first."""
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.function(gate) * (up if self.linear is None else self.linear(up))
        return self.function(x)


class MLP(nn.Module):
    """Up projection, activation, down projection; a gate and the up projection are one weight.

    `up.weight` is `[ffn, hidden]`, or `[2 * ffn, hidden]` with a gate, whose rows are first. Over
    tensor-parallel ranks each holds a run of the inner width, the same of gate and of up.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> MLP(config)(torch.ones(1, 16, 64)).shape
        torch.Size([1, 16, 64])
    """

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        ffn = config.ffn_width
        blocks = (ffn, ffn) if config.gated else (ffn,)
        self.up = from_residual(config, blocks, axis, bias=config.mlp_bias)
        self.activation = ActivationFunction(config.activation)
        self.down = into_residual(config, ffn, axis, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        return cast(Tensor, self.down(self.activation(self.up(x))))


@dataclass(frozen=True, kw_only=True)
class DenseMLP(LayerPart):
    """The MLP that the config's `ffn_width`, `activation` and `mlp_bias` describe."""

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `LayerPart.make`."""
        return MLP(config, mesh)

    def parameters(self, config: TransformerConfig) -> int:
        """See `LayerPart.parameters`."""
        return (3 if config.gated else 2) * config.hidden_size * config.ffn_width

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `LayerPart.huggingface_links`."""
        bias, inner = config.mlp_bias, config.ffn_width
        if config.gated:
            names, rows = (f"{theirs}.gate_proj", f"{theirs}.up_proj"), (inner, inner)
            yield from linked(f"{ours}.up", *names, bias=bias, rows=rows)
        else:
            yield from linked(f"{ours}.up", f"{theirs}.up_proj", bias=bias)
        yield from linked(f"{ours}.down", f"{theirs}.down_proj", bias=bias)


def feed_forward_of(config: TransformerConfig) -> LayerPart:
    """The config's kind of MLP."""
    return config.mlp or DenseMLP()
