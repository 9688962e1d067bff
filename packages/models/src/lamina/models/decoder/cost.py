"""The cost of a model, from its config alone."""

from collections.abc import Sequence

from lamina.models.base.config import LayerPart, TransformerConfig
from lamina.models.decoder.layer_stack import parts_of


def matrix_parameters(config: TransformerConfig) -> int:
    """Count the weights that a token is multiplied with: projections and the head.

    Of the experts only those count that a token is sent to. The layers of `config.mtp` count.

    Examples:
        >>> matrix_parameters(preset("llama3-8b")) > 7e9
        True
    """
    layers = range(config.num_layers)
    blocks = sum(_layer_parameters(config, at) for at in layers)
    depth = 0 if config.mtp is None else config.mtp.depth
    head = config.padded_vocab_size * config.hidden_size
    return blocks + head + depth * (head + _further_parameters(config))


def _layer_parameters(config: TransformerConfig, layer: int) -> int:
    own, parts = config.of_layer(layer), parts_of(config, layer)
    weights = sum(part.parameters(own) for part in parts)
    if (streams := config.hyper_connections) is not None:
        weights += _readers(own, parts) * streams.parameters(config.hidden_size)
    return weights


def _readers(own: TransformerConfig, parts: Sequence[LayerPart]) -> int:
    """How many of a layer's parts read the residual streams."""
    return 1 if own.parallel_mlp is not None else len(parts)


def _further_parameters(config: TransformerConfig) -> int:
    """Weights of a layer of `config.mtp`: the model's last layer, and a projection."""
    return _layer_parameters(config, config.num_layers - 1) + 2 * config.hidden_size**2


def layer_flops_per_token(config: TransformerConfig, layer: int, sequence: int) -> float:
    """Operations of forward and backward of one layer, as of `training_flops_per_token`."""
    own, parts = config.of_layer(layer), parts_of(config, layer)
    products: float = _layer_parameters(config, layer)
    products += sum(part.products_per_token(own, sequence) for part in parts)
    if (streams := config.hyper_connections) is not None:
        products += _readers(own, parts) * streams.products_per_token(config.hidden_size)
    return 6.0 * products


def training_flops_per_token(config: TransformerConfig, sequence: int) -> float:
    """Floating-point operations of forward and backward, per token (Chowdhery et al., 2022).

    These are two per weight and token in forward and four in backward. Attention counts the pairs
    that the causal mask and the window allow. Recomputation is not counted, as usual for model FLOP
    utilisation.

    Args:
        config: the model's.
        sequence: tokens per sequence.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> flops = training_flops_per_token(config, sequence=128)
    """
    layers = range(config.num_layers)
    blocks = sum(layer_flops_per_token(config, at, sequence) for at in layers)
    return blocks + head_flops_per_token(config, sequence)


def head_flops_per_token(config: TransformerConfig, sequence: int) -> float:
    """Operations of forward and backward after the blocks, as of `training_flops_per_token`.

    They are the head's, and those of the layers of `config.mtp`, each with the head once more.
    """
    head = 6.0 * config.padded_vocab_size * config.hidden_size
    if config.mtp is None:
        return head
    block = layer_flops_per_token(config, config.num_layers - 1, sequence)
    projection = 6.0 * 2 * config.hidden_size**2
    return head + config.mtp.depth * (projection + block + head)
