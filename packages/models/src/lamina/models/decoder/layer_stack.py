"""The Transformer block, blocks with one mixer each, and the stack that a pattern describes.

`"M*M-"` is four layers: Mamba, attention, Mamba, MLP, each `x + mixer(norm(x))`. Lamina's own
letters are `LETTERS` of `base/configs/mamba.py`; `TransformerConfig.layer_kinds` adds others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lamina.models.attention.attention import variant_of
from lamina.models.attention.context import AttentionContext
from lamina.models.base.config import LayerPart, TransformerConfig
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.hyper_connections import Factors, HyperConnection, written
from lamina.models.layers.mlp import feed_forward_of
from lamina.models.layers.norms import make_norm
from lamina.models.mamba.block import Mamba2, MambaMixer, MambaState
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.layer import Experts, MoELayer


class TransformerBlock(nn.Module):
    """Attention and MLP: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    With `config.post_norm` the results of attention and MLP are normalised before the addition,
    without `config.pre_norm` their inputs are not. With `config.parallel_mlp` both read the same x.
    With `config.hyper_connections` x has several streams, which attention and MLP read and write.

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
        self.scale, self.parallel = config.residual_scale, config.parallel_mlp is not None
        self.attention_streams = _streams(config, partial)

        def norm(wanted: bool) -> nn.Module | None:
            return make_norm(config, partial=partial) if wanted else None

        self.attention_norm = norm(config.pre_norm)
        self.attention = variant_of(config).make(config, mesh)
        self.attention_post_norm = norm(config.post_norm is True)
        self.mlp_streams = None if self.parallel else _streams(config, partial)
        self.mlp_norm = norm(config.pre_norm and config.parallel_mlp != "one_norm")
        self.mlp: nn.Module
        if config.has_experts(layer):
            self.mlp = MoELayer(config, mesh if experts is None else experts)
        else:
            self.mlp = feed_forward_of(config).make(config, axis)
        self.mlp_post_norm = norm(bool(config.post_norm))

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """`[batch, sequence, hidden]` to the same, or `[tokens / tp, hidden]` to the same."""
        inner, factors = _read(self.attention_streams, x)
        normed = inner if self.attention_norm is None else self.attention_norm(inner)
        update = self.attention(normed, context)
        how = self.dropout, self.scale, context
        if self.parallel:
            inner = normed if self.mlp_norm is None else self.mlp_norm(inner)
            update = update + _feed_forward(self.mlp, inner, context)
            return _add(x, update, factors, None, *how)
        x = _add(x, update, factors, self.attention_post_norm, *how)
        inner, factors = _read(self.mlp_streams, x)
        inner = inner if self.mlp_norm is None else self.mlp_norm(inner)
        update = _feed_forward(self.mlp, inner, context)
        return _add(x, update, factors, self.mlp_post_norm, *how, use=1)


def _streams(config: TransformerConfig, partial: bool) -> HyperConnection | None:
    """The hyper-connection of an attention, an MLP or a mixer; None is one stream."""
    sizes = config.hyper_connections
    return None if sizes is None else HyperConnection(config, sizes, partial)


def _read(streams: nn.Module | None, x: Tensor) -> tuple[Tensor, Factors | None]:
    """What a layer reads of the residual stream, or streams, and how these take its result."""
    return (x, None) if streams is None else streams(x)


def _add(
    x: Tensor,
    update: Tensor,
    factors: Factors | None,
    norm: nn.Module | None,
    dropout: nn.Module,
    scale: float,
    context: AttentionContext | None,
    use: int = 0,
) -> Tensor:
    """Add an update to the residual stream, after post-norm, dropout and scale."""
    token_keys = None if context is None else context.token_keys
    update = update if norm is None else norm(update)
    dropped: Tensor = dropout(update) if token_keys is None else dropout(update, token_keys, use)
    scaled = dropped if scale == 1.0 else dropped * scale
    return x + scaled if factors is None else written(x, scaled, factors)


def _feed_forward(mlp: nn.Module, x: Tensor, context: AttentionContext | None) -> Any:
    """Apply an MLP, or experts, whose routers share a context."""
    if isinstance(mlp, MoELayer) and context is not None:
        return mlp(x, context.routing, context.shape)
    return mlp(x)


class ResidualBlock(nn.Module):
    """`x + mixer(norm(x))`; with `config.post_norm` the mixer's result is normalised as well.

    Args:
        config: the shape.
        mixer: of activations `[batch, sequence, hidden]` (`[tokens / tp, hidden]` under
            sequence parallelism).
        mesh: has an axis `tp`, or is that axis; None is one process.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = ResidualBlock(config, MLP(config))
    """

    def __init__(self, config: TransformerConfig, mixer: nn.Module, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        partial = config.sequence_parallel and axis is not None
        self.streams = _streams(config, partial)
        self.norm = make_norm(config, partial=partial)
        self.mixer = mixer
        self.post_norm = make_norm(config, partial=partial) if config.post_norm else None
        self.scale = config.residual_scale
        self.dropout = Dropout(config.dropout, axis, sharded=partial)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """`[batch, sequence, hidden]` to the same, or `[tokens / tp, hidden]` to the same."""
        inner, factors = _read(self.streams, x)
        return self.add(x, self.mix(self.norm(inner), context), context, factors)

    def mix(self, x: Tensor, context: AttentionContext | None) -> Any:
        """Apply the mixer to normalised activations."""
        return self.mixer(x, context)

    def add(
        self,
        x: Tensor,
        update: Tensor,
        context: AttentionContext | None = None,
        factors: Factors | None = None,
    ) -> Tensor:
        """Add an update to the residual stream, or streams, after post-norm and dropout."""
        return _add(x, update, factors, self.post_norm, self.dropout, self.scale, context)


class MambaBlock(ResidualBlock):
    """A Mamba-2 layer: `x + mamba(norm(x))` (letter `M`).

    Args:
        config: the shape; its `mamba` has the layer's own sizes.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Examples:
        >>> shape = dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = MambaBlock(TransformerConfig(**shape, layer_pattern="MM", mamba=MambaConfig()))
    """

    mixer: MambaMixer

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__(config, MambaMixer(config, mesh), mesh)

    def initial_state(self, batch: int) -> MambaState:
        """The state before the first token."""
        return self.mixer.initial_state(batch)

    def step(self, x: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        """Compute one token `[batch, hidden]`, given the state after the tokens before it."""
        inner, factors = _read(self.streams, x)
        update, state = self.mixer.step(self.norm(inner), state)
        return self.add(x, update, factors=factors), state


class AttentionBlock(ResidualBlock):
    """An attention layer: `x + attention(norm(x))` (letter `*`).

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = AttentionBlock(config)
    """

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__(config, variant_of(config).make(config, mesh), mesh)


class _FeedForwardBlock(ResidualBlock):
    """A layer whose mixer treats each token by itself."""

    def mix(self, x: Tensor, context: AttentionContext | None) -> Any:
        """See `ResidualBlock.mix`."""
        return _feed_forward(self.mixer, x, context)


class MLPBlock(_FeedForwardBlock):
    """An MLP layer: `x + mlp(norm(x))` (letter `-`).

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = MLPBlock(config)
    """

    def __init__(self, config: TransformerConfig, mesh: MeshLike = None) -> None:
        super().__init__(config, feed_forward_of(config).make(config, mesh), mesh)


class ExpertBlock(_FeedForwardBlock):
    """A layer of experts: `x + experts(norm(x))` (letter `E`).

    Args:
        config: the shape; its `moe` has the layer's own sizes.
        mesh: has an axis `tp`, or is that axis; None is one process.
        experts: the axes of the experts; by default those of `mesh`.

    Examples:
        >>> shape = dict(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> block = ExpertBlock(TransformerConfig(**shape, moe=MoEConfig(num_experts=8, top_k=2)))
    """

    def __init__(
        self, config: TransformerConfig, mesh: MeshLike = None, experts: ExpertAxes | None = None
    ) -> None:
        super().__init__(config, MoELayer(config, mesh if experts is None else experts), mesh)


def make_block(
    config: TransformerConfig, index: int, mesh: MeshLike = None, experts: ExpertAxes | None = None
) -> nn.Module:
    """Build layer `index` of the stack that the config describes.

    Args:
        config: its `pattern` has one letter per layer.
        index: `0 <= index < config.num_layers`.
        mesh: has an axis `tp`, or is that axis; None is one process.
        experts: the axes of the experts; by default those of `mesh`.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> first = make_block(config, 0)
    """
    letter, layer = config.pattern[index], config.of_layer(index)
    if letter in config.own_layers:
        return config.own_layers[letter].make(layer, mesh)
    return _KINDS[letter].build(layer, mesh, index, experts)


def parts_of(config: TransformerConfig, index: int) -> tuple[LayerPart, ...]:
    """The parts of layer `index`, each to be asked with `config.of_layer(index)`."""
    letter, layer = config.pattern[index], config.of_layer(index)
    if letter in config.own_layers:
        return (config.own_layers[letter],)
    return _KINDS[letter].made_of(layer, index)


def caches_tokens(block: nn.Module) -> bool:
    """Whether a block takes a `TokenCache`: it is Lamina's, and what mixes its tokens says so."""
    mixer = getattr(block, "attention", getattr(block, "mixer", None))
    if mixer is None or not type(block).__module__.startswith("lamina."):
        return False
    if isinstance(block, _FeedForwardBlock):
        return True
    for cls in type(mixer).__mro__:
        # An heir of a user's that says nothing itself may mix tokens in a way of its own.
        if "caches" in vars(cls) or not cls.__module__.startswith("lamina."):
            return bool(vars(cls).get("caches", False))
    return False


class _Kind(NamedTuple):
    """One of Lamina's own kinds of layer: its block, and the parts that it is made of."""

    build: Callable[[TransformerConfig, MeshLike, int, ExpertAxes | None], nn.Module]
    made_of: Callable[[TransformerConfig, int], tuple[LayerPart, ...]]


def _inner_part(config: TransformerConfig, index: int) -> LayerPart:
    return Experts() if config.has_experts(index) else feed_forward_of(config)


_KINDS = {
    "T": _Kind(
        lambda config, mesh, at, experts: TransformerBlock(config, mesh, layer=at, experts=experts),
        lambda config, at: (variant_of(config), _inner_part(config, at)),
    ),
    "*": _Kind(
        lambda config, mesh, *_: AttentionBlock(config, mesh),
        lambda config, _: (variant_of(config),),
    ),
    "-": _Kind(
        lambda config, mesh, *_: MLPBlock(config, mesh),
        lambda config, _: (feed_forward_of(config),),
    ),
    "E": _Kind(
        lambda config, mesh, _, experts: ExpertBlock(config, mesh, experts),
        lambda *_: (Experts(),),
    ),
    "M": _Kind(lambda config, mesh, *_: MambaBlock(config, mesh), lambda *_: (Mamba2(),)),
}
"""Lamina's own layers, by letter; `TransformerConfig.layer_kinds` are others."""
