"""One Transformer block."""

from torch import Tensor, nn

from lamina.models.attention.attention import variant_of
from lamina.models.attention.context import AttentionContext
from lamina.models.base.config import TransformerConfig
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.mlp import MLP
from lamina.models.layers.norms import make_norm
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.layer import MoELayer

__all__ = ["TransformerBlock"]


class TransformerBlock(nn.Module):
    """Pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    With `config.post_norm` the results of attention and MLP are normalised before the addition.

    Args:
        config: the shape.
        mesh: has an axis `tp`, or is that axis; None is one process.
        layer: number in the stack, which decides whether there are experts (`config.moe`).
        experts: the axes of the experts; by default those of `mesh`.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = TransformerBlock(config)
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: MeshLike = None,
        *,
        layer: int = 0,
        experts: ExpertAxes | None = None,
    ) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        partial = config.sequence_parallel and axis is not None
        self.dropout = Dropout(config.dropout, axis, sharded=partial)
        self.attention_norm = make_norm(config, partial=partial)
        self.attention = variant_of(config).make(config, mesh)
        self.attention_post_norm = make_norm(config, partial=partial) if config.post_norm else None
        self.mlp_norm = make_norm(config, partial=partial)
        self.mlp: nn.Module
        if config.has_experts(layer):
            self.mlp = MoELayer(config, mesh if experts is None else experts)
        else:
            self.mlp = MLP(config, axis)
        self.mlp_post_norm = make_norm(config, partial=partial) if config.post_norm else None

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """`[batch, sequence, hidden]` to the same, or `[tokens / tp, hidden]` to the same."""
        x = self.add(x, self.attention(self.attention_norm(x), context), self.attention_post_norm)
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, MoELayer) and context is not None:
            update: Tensor = self.mlp(normed, context.routing, context.shape)
        else:
            update = self.mlp(normed)
        return self.add(x, update, self.mlp_post_norm)

    def add(self, x: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """Add an update to the residual stream, after post-norm and dropout."""
        if norm is not None:
            update = norm(update)
        dropped: Tensor = self.dropout(update)
        return x + dropped
