"""A layer of experts, which replaces the MLP of a block."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lamina.models.base.config import LayerPart, TransformerConfig
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.invariance.token_sums import in_float32, sigmoid
from lamina.models.layers.linear import Linear
from lamina.models.layers.mlp import MLP
from lamina.models.moe.dispatcher import TokenDispatcher
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.experts import GroupedExperts
from lamina.models.moe.fixed_experts import numbers_of_tokens
from lamina.models.moe.losses import RoutingContext
from lamina.models.moe.router import TopKRouter


class MoELayer(nn.Module):
    """Mixture of experts: a router, the experts of this rank, and maybe shared experts.

    The shared experts compute while tokens are sent: the up projection on the way to the experts,
    the down projection on the way back, and likewise in backward.

    Args:
        config: the shape; `config.moe` says what the layer is made of.
        mesh: the model's mesh (axes `ep`, `expert_tp`, `tp`, `cp` and the data-parallel
            ones), or what it says of experts; None is one process.

    Raises:
        ValueError: if the config has no `moe`, or sizes are not divisible by the ranks.

    Examples:
        >>> shape = dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> layer = MoELayer(TransformerConfig(**shape, moe=MoEConfig(num_experts=8, top_k=2)))
    """

    def __init__(self, config: TransformerConfig, mesh: MeshLike | ExpertAxes = None) -> None:
        super().__init__()
        moe = sizes_of(config)
        self.axes = axes = ExpertAxes.of(mesh, sequence_parallel=config.sequence_parallel)
        self.router = TopKRouter(
            config.hidden_size,
            moe,
            axes,
            sequence_parallel=config.sequence_parallel,
            init_std=config.init_std,
        )
        self.experts = GroupedExperts(
            moe.num_experts,
            config.hidden_size,
            moe.ffn_size or config.ffn_width,
            axes,
            activation=config.activation,
            bias=moe.bias,
            init_std=config.init_std,
            output_std=config.residual_init_std,
            path=moe.experts,
        )
        self.dispatcher = TokenDispatcher(moe.num_experts, axes, moe.dispatcher)
        self.shared: MLP | None = None
        if moe.shared_ffn_size is not None:
            # Without the layer pattern, because letters of experts are refused without `moe`, and
            # without the sizes of layers that no pattern has then.
            reads = config.attention is not None and config.attention.reads_mamba
            own: dict[str, Any] = {} if reads else {"mamba": None}
            own |= {"ffn_size": moe.shared_ffn_size, "moe": None, "layer_pattern": None}
            shared = replace(config, **own)
            self.shared = MLP(shared, axes.tp)
        self.shared_gate: Linear | None = None
        if moe.shared_gate:
            cut = axes.tokens_tp is not None
            self.shared_gate = Linear(config.hidden_size, 1, init_std=config.init_std, partial=cut)

    def forward(
        self, x: Tensor, context: RoutingContext | None = None, shape: tuple[int, int] | None = None
    ) -> Tensor:
        """Apply to each token its experts, and add up their weighted results.

        Args:
            x: `[batch, sequence, hidden]`, or under sequence parallelism `[tokens, hidden]`.
                Ranks may have different numbers of tokens.
            context: the padding and the scale of auxiliary losses of this forward.
            shape: sequences in the microbatch and tokens of each here; by default read from `x`.

        Returns:
            As `x`.
        """
        context = context or RoutingContext()
        tokens = x.reshape(-1, x.shape[-1])
        if shape is None and x.ndim == 3:
            shape = (x.shape[0], x.shape[1])
        routing = self.router(tokens, context, shape)
        numbers = None
        if self.experts.tokens is not None:
            # Results of ranks are added in float32, and rounded once.
            tokens = tokens.float()
            numbers = numbers_of_tokens(self.experts.tokens, self.axes, len(tokens), x.device)
        way = self.dispatcher.dispatch(tokens, routing, context.capacities, numbers)
        inner = None if self.shared is None else self.shared.activation(self.shared.up(x))
        results = self.experts(way.arrive())
        way.give_back(results)
        beside = None if self.shared is None else self.shared.down(inner)
        if self.shared_gate is not None and beside is not None:
            gate = self.shared_gate(x)
            beside = beside * (gate.sigmoid() if numbers is None else in_float32(sigmoid, gate))
        output = way.combine().view(x.shape).to(x.dtype)
        return output if beside is None else output + beside


@dataclass(frozen=True, kw_only=True)
class Experts(LayerPart):
    """The experts that the config's `moe` describes."""

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `LayerPart.make`."""
        return MoELayer(config, mesh)

    def parameters(self, config: TransformerConfig) -> int:
        """See `LayerPart.parameters`; of the experts only those count that a token is sent to."""
        moe = sizes_of(config)
        inner = moe.top_k * (moe.ffn_size or config.ffn_width) + (moe.shared_ffn_size or 0)
        gates = moe.num_experts + moe.shared_gate
        return config.hidden_size * ((3 if config.gated else 2) * inner + gates)


def sizes_of(config: TransformerConfig) -> MoEConfig:
    """The config's `moe`; ValueError if it has none."""
    if config.moe is None:
        raise ValueError("config.moe is None: give the TransformerConfig a MoEConfig")
    return config.moe
