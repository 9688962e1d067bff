"""The costs of a model, in parameters and floating-point operations, from its config alone."""

from lamina.models.attention.attention import variant_of
from lamina.models.base.config import TransformerConfig


def matrix_parameters(config: TransformerConfig) -> int:
    """Count the weights that a token is multiplied with: projections and the head.

    Of the experts only those count that a token is sent to.

    Examples:
        >>> matrix_parameters(preset("llama3-8b")) > 7e9
        True
    """
    attention = variant_of(config).parameters(config)
    products = 3 if config.activation == "swiglu" else 2
    mlp = products * config.hidden_size * config.ffn_width
    instead = 0
    if config.moe is not None:
        moe = config.moe
        inner = moe.top_k * (moe.ffn_size or config.ffn_width) + (moe.shared_ffn_size or 0)
        layers = sum(map(config.has_experts, range(config.num_layers)))
        each = config.hidden_size * (products * inner + moe.num_experts)
        instead = layers * (each - mlp)
    mamba = 0
    if config.mamba is not None:
        heads = config.mamba.heads(config.hidden_size)
        inner = heads * config.mamba.head_dim
        shared = config.mamba.groups * config.mamba.state_size
        mamba = config.hidden_size * (3 * inner + 2 * shared + heads)
        mamba += config.mamba.conv_kernel * (inner + 2 * shared)
    per_letter = {"T": attention + mlp, "*": attention, "-": mlp, "E": mlp, "M": mamba}
    per_letter |= {kind.letter: kind.parameters(config) for kind in config.layer_kinds}
    blocks = sum(per_letter[letter] for letter in config.pattern) + instead
    return blocks + config.padded_vocab_size * config.hidden_size


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
    window = min(config.sliding_window or sequence, sequence)
    # The first `window` tokens attend to 1, 2, ... tokens, and the others to `window` each.
    pairs = (window * (window + 1) / 2 + (sequence - window) * window) / sequence
    per_pair = variant_of(config).products_per_pair(config)
    layers = sum(config.pattern.count(letter) for letter in "T*")
    mixing = layers * pairs * per_pair
    if config.mamba is not None:
        # The recurrence has two products per element of the state: its update and its output.
        state = config.mamba.head_dim * config.mamba.state_size
        per_token = 2 * state * config.mamba.heads(config.hidden_size)
        mixing += config.pattern.count("M") * per_token
    for kind in config.layer_kinds:
        mixing += config.pattern.count(kind.letter) * kind.products_per_token(config, sequence)
    return 6.0 * (matrix_parameters(config) + mixing)
