"""The feed-forward network of a block."""

from typing import cast, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.base.config import Activation, TransformerConfig
from lamina.models.base.configs.field_checks import require_one_of
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.linear import from_residual, into_residual


class ActivationFunction(nn.Module):
    """GELU, SwiGLU or squared ReLU, as a module, so that selective recomputation can find it."""

    def __init__(self, kind: Activation) -> None:
        super().__init__()
        require_one_of("activation", kind, get_args(Activation))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """`[..., ffn]` to the same; SwiGLU takes `[..., 2 * ffn]`, the gate first."""
        if self.kind == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self.kind == "relu2":
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")


class MLP(nn.Module):
    """Up projection, activation, down projection; SwiGLU's gate and up are one weight.

    `up.weight` is `[ffn, hidden]`, or `[2 * ffn, hidden]` with SwiGLU: gate rows first. Over
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
        blocks = (ffn, ffn) if config.activation == "swiglu" else (ffn,)
        self.up = from_residual(config, blocks, axis, bias=config.mlp_bias)
        self.activation = ActivationFunction(config.activation)
        self.down = into_residual(config, ffn, axis, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., hidden]`."""
        return cast(Tensor, self.down(self.activation(self.up(x))))
