"""The description of a Transformer: frozen, validated dataclasses.

`TransformerConfig` describes a decoder. `AttentionVariant` and `LayerKind` are what it is extended
by: an object of either is a value in the config, so nothing is registered anywhere and two models
in one process may have different ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import nn

from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
    require_divides,
    require_positive,
)
from lamina.models.base.configs.mamba import LETTERS, MambaConfig, check_pattern
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.base.weight_link import WeightLink

AttentionPath = Literal["auto", "sdpa", "varlen", "flex"]
Activation = Literal["gelu", "gelu_tanh", "swiglu", "relu2"]
Norm = Literal["rmsnorm", "layernorm"]
ContextParallel = Literal["ring", "all_gather", "ulysses"]
PositionEncoding = Literal["rope", "learned", "none"]
Reduction = Literal["ordered", "native"]
RopeScalingKind = Literal["linear", "llama3", "yarn"]


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """The factor that YaRN multiplies cosines and sines by (Peng et al., 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


_OF_SCALING = {
    "llama3": ["low_freq_factor", "high_freq_factor"],
    "yarn": ["beta_fast", "beta_slow", "attention_factor", "truncate"],
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


class HeadWidths(NamedTuple):
    """Elements of one attention head."""

    query: int
    """Elements of a query or key head."""
    value: int
    """Elements of a value head."""
    rotary: int
    """Elements of a query or key head that RoPE turns."""


@dataclass(frozen=True, kw_only=True)
class AttentionVariant(ABC):
    """A kind of attention: all that the rest of Lamina asks about it.

    Subclass it as a frozen dataclass whose fields are the variant's own sizes, and give an
    instance as `TransformerConfig(attention=...)`. `make` and `parameters` are required. The other
    members describe multi-head attention with the config's heads, and are overridden where the
    variant differs. `docs/models.md` shows an example.

    Attributes:
        context_parallel: ways of context parallelism that the module supports. A module that
            computes attention by `context.pattern` supports all of them.
        huggingface_type: the `model_type` of Hugging Face's Llama-like checkpoints with this
            attention; None if there are none.
        yarn_scales_scores: whether Hugging Face's model folds YaRN's magnitude into the scale of
            the scores, as DeepSeek's does.
    """

    context_parallel: ClassVar[tuple[ContextParallel, ...]] = get_args(ContextParallel)
    huggingface_type: ClassVar[str | None] = None
    yarn_scales_scores: ClassVar[bool] = False

    @abstractmethod
    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """Build the module, which is called as `module(x, context)`.

        Args:
            config: the model's.
            mesh: has an axis `tp`, or is that axis; None is one process.
        """

    @abstractmethod
    def parameters(self, config: TransformerConfig) -> int:
        """Count the weights of a layer that a token is multiplied with."""

    def products_per_pair(self, config: TransformerConfig) -> int:
        """Count the multiplications for one pair of a query and a key that it attends to."""
        widths = self.widths(config)
        return config.num_heads * (widths.query + widths.value)

    def check(self, config: TransformerConfig) -> None:
        """Raise ValueError for a config that the variant cannot be part of."""
        config.check_own_heads()

    def widths(self, config: TransformerConfig) -> HeadWidths:
        """Widths of the heads."""
        return config.own_head_widths()

    def check_huggingface(self, config: TransformerConfig) -> None:  # noqa: B027 (optional)
        """Raise ValueError for settings that Hugging Face's model cannot express."""

    def huggingface_fields(self, config: TransformerConfig) -> dict[str, Any]:
        """Fields of `config.json` beside those that Llama has."""
        return {}

    @classmethod
    def read_huggingface(cls, source: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `TransformerConfig` that describe the attention of a `config.json`."""
        heads = source["num_attention_heads"]
        return {
            "attention": cls(),
            "num_kv_heads": source.get("num_key_value_heads") or heads,
            "head_dim": source.get("head_dim") or source["hidden_size"] // heads,
        }

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """Link the module's parameters to tensors of a Hugging Face checkpoint.

        Args:
            config: the model's.
            ours: prefix of our names, such as `blocks.0.attention`.
            theirs: prefix of their names, such as `model.layers.0.self_attn`.

        Raises:
            ValueError: if the variant has no names there.
        """
        raise ValueError(
            f"{type(self).__name__} has no Hugging Face names: override huggingface_links"
        )


@dataclass(frozen=True, kw_only=True)
class LayerKind(ABC):
    """A layer of your own in a stack: give it as `TransformerConfig(layer_kinds=(...,))`.

    Subclass it as a frozen dataclass whose further fields are the layer's sizes.

    Args:
        letter: stands for the layer in `TransformerConfig.layer_pattern`.
    """

    letter: str

    def __post_init__(self) -> None:
        if len(self.letter) != 1 or self.letter in LETTERS:
            raise ValueError(
                f"letter is {self.letter!r}: it must be one character, and none of "
                f"{', '.join(LETTERS)}, which are Lamina's own layers"
            )

    @abstractmethod
    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """Build the layer, which is called as `layer(x, context)`, residual connection included.

        `ResidualBlock(config, mixer, mesh)` adds norm, residual connection and dropout to a mixer;
        `apply_recompute` and `Precision` find such layers by themselves.

        Args:
            config: the model's.
            mesh: has an axis `tp`, or is that axis; None is one process.
        """

    @abstractmethod
    def parameters(self, config: TransformerConfig) -> int:
        """Count the weights that a token is multiplied with."""

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """Count the multiplications per token that take no weight, in sequences of this length."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder-only Transformer. Blocks read it and never change it.

    Sizes are in elements, lengths in tokens, rates are probabilities.

    Args:
        vocab_size: number of token ids; ids are `0 .. vocab_size - 1`.
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads: `num_heads` (the default) is multi-head attention,
            1 is multi-query, anything between grouped-query attention (Ainslie et al., 2023).
        head_dim: width of one head, by default `hidden_size / num_heads`.
        ffn_size: inner width of the MLP, by default `4 * hidden_size` (for SwiGLU the multiple
            of 64 next above `8/3 * hidden_size`, which costs the same).
        max_sequence_length: the longest sequence; the number of rows of learned positions.
        activation: `gelu` (exact), `gelu_tanh` (GPT-2's), `swiglu` (Shazeer, 2020) or
            `relu2` (squared ReLU, So et al., 2021).
        norm: `rmsnorm` or `layernorm`.
        norm_eps: added to the variance under the root.
        positions: `rope` (Su et al., 2021), `learned` or `none`.
        rope_theta: base of RoPE's wavelengths.
        rope_scaling: how the wavelengths are stretched; None keeps them.
        attention: another kind of attention in place of multi-head attention.
        mla: the same as `attention`, by the name that multi-head latent attention has.
        qk_norm: RMSNorm over each head of queries and keys before RoPE.
        attention_bias: biases in the query, key and value projection.
        attention_output_bias: bias in attention's output projection; as `attention_bias` if None.
        mlp_bias: biases in the MLP.
        post_norm: also normalise the results of attention and MLP before they are added.
        tie_embeddings: the output head uses the embedding's weight.
        dropout: dropout of embeddings and of the results of attention and MLP.
        attention_dropout: dropout of attention probabilities.
        sliding_window: the number of tokens, itself included, that a token attends to; None is all
            tokens before it.
        attention_scale: the factor of the scores before the softmax; by default one over the root
            of the width of a query head.
        layer_pattern: the kind of each layer, one letter for each: `M` Mamba-2, `*` attention,
            `-` MLP, `E` experts, `T` attention and MLP, or a letter of `layer_kinds`. None is `T`
            for all.
        layer_kinds: layers of your own, by their letters.
        mamba: sizes of Mamba-2 layers; given where the pattern has an `M`.
        moe: experts of layers of kind `E`, and in place of the MLP in layers of kind `T`, and
            in which of these; None has none.
        attention_path: `auto` uses `scaled_dot_product_attention` for plain causal attention. For
            documents and windows it uses `varlen` (CUDA, fp16 or bf16), `flex` (CUDA), or `sdpa`
            with a stored mask (anything else). All give the same numbers. A path that is named is
            refused if it does not support the case, and beside `ring` and `all_gather`, which
            have kernels of their own.
        vocab_multiple: the number of rows of embedding and head is rounded up to a multiple of
            this, so that they can be cut over ranks. The added rows get no probability.
        sequence_parallel: tensor parallelism also cuts the tokens of norms, residual stream and
            dropout. The number of tokens must be divisible by the number of ranks.
        tp_reduction: how activations are summed over tensor-parallel ranks. `ordered` adds in
            float32 and in one order. `native` is the backend's own all-reduce and reduce-scatter,
            which is faster on NVLink and adds in the wire dtype, in any order. Experts and Mamba
            always use `ordered`.
        context_parallel: how attention is computed if sequences are cut over ranks. `ring` sends
            keys and values from rank to rank, `all_gather` gathers them, and `ulysses` gives each
            rank the whole sequences of some heads.
        loss_chunk: the number of tokens whose logits are in memory at a time in the loss. None
            is at least 1,024, and more for small vocabularies.
        precision: how the blocks' projections multiply: in the model's dtype, in FP8, or by
            Transformer Engine; and which blocks keep the model's dtype.
        init_std: standard deviation of initial weights; projections into the residual stream are
            scaled down by the root of their number (Radford et al., 2019).

    Raises:
        ValueError: for sizes that do not fit together, with the arithmetic and a remedy.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    max_sequence_length: int = 2048
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    positions: PositionEncoding = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention: AttentionVariant | None = None
    mla: AttentionVariant | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    post_norm: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    attention_scale: float | None = None
    attention_path: AttentionPath = "auto"
    layer_pattern: str | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    mamba: MambaConfig | None = None
    moe: MoEConfig | None = None
    vocab_multiple: int = 1
    sequence_parallel: bool = False
    tp_reduction: Reduction = "ordered"
    context_parallel: ContextParallel = "ring"
    loss_chunk: int | None = None
    precision: Precision = field(default_factory=Precision)
    init_std: float = 0.02

    def __post_init__(self) -> None:
        require_choices(self, TransformerConfig)
        self._check_numbers()
        if self.attention is not None and self.mla is not None:
            raise ValueError("attention and mla are both given: they mean the same, give one")
        if self.attention_variant is None:
            self.check_own_heads()
        else:
            self.attention_variant.check(self)
        self.precision.check_blocks(self.num_layers)
        self._check_layers()

    def _check_layers(self) -> None:
        own = [kind.letter for kind in self.layer_kinds]
        if len(set(own)) < len(own):
            raise ValueError(f"layer_kinds have letters {own}: each must be another one")
        check_pattern(self.layer_pattern, self.num_layers, self.mamba, own)
        if self.mamba is not None:
            self.mamba.heads(self.hidden_size)
        if self.moe is not None and self.mlp_bias:
            raise ValueError("mlp_bias beside moe: experts have no biases; leave it False")
        if self.moe is not None and not any(map(self.has_experts, range(self.num_layers))):
            raise ValueError(
                f"moe is given, and none of {self.num_layers} layers (layer_pattern "
                f"{self.pattern!r}) has experts: layers of letter 'E' have them, and those "
                f"of letter 'T' after first_dense {self.moe.first_dense} every {self.moe.every}; "
                "change one, or leave moe out"
            )
        if self.moe is not None and self.layer_pattern and "T" not in self.layer_pattern:
            why = f"layer_pattern={self.layer_pattern!r} has no letter 'T', and each 'E' is experts"
            refuse_unread(self.moe, ["first_dense", "every"], why)
        if self.moe is None and "E" in self.pattern:
            raise ValueError(
                f"layer_pattern {self.pattern!r} has layers of experts (letter 'E'), and no moe is "
                "given: give moe=MoEConfig(...)"
            )

    def _check_numbers(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length")
        require_at_least(1, self, *sizes, "vocab_multiple")
        optional = ("num_kv_heads", "head_dim", "ffn_size", "sliding_window", "loss_chunk")
        require_at_least(1, self, *optional, optional=True)
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be in [0, 1)")
        require_positive(self, "norm_eps", "rope_theta", "init_std")
        if self.positions != "rope":
            why = f"positions={self.positions!r} turns nothing by RoPE"
            refuse_unread(self, ("rope_theta", "rope_scaling"), why)

    def check_own_heads(self) -> None:
        """Raise ValueError unless `num_heads`, `num_kv_heads` and `head_dim` fit together."""
        if self.head_dim is None:
            require_divides("hidden_size", self.hidden_size, "num_heads", self.num_heads,
                            "change one of them, or set head_dim yourself")  # fmt: skip
        require_divides("num_heads", self.num_heads, "num_kv_heads", self.kv_heads,
                        "every key head serves the same number of query heads")  # fmt: skip
        if self.positions == "rope":
            require_divides("head width", self.head_width, "2", 2, "RoPE turns pairs of elements")

    def own_head_widths(self) -> HeadWidths:
        """Widths of the heads by `head_dim`, or by `hidden_size` and `num_heads`."""
        width = self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim
        return HeadWidths(width, width, width)

    # The values of optional sizes. The fields themselves keep what the caller wrote.

    @property
    def attention_variant(self) -> AttentionVariant | None:
        """The kind of attention that is given; None is multi-head attention."""
        return self.mla if self.attention is None else self.attention

    @property
    def head_widths(self) -> HeadWidths:
        """Widths of the heads of the attention that is given."""
        given = self.attention_variant
        return self.own_head_widths() if given is None else given.widths(self)

    @property
    def own_layers(self) -> dict[str, LayerKind]:
        """Layers of your own, by letter."""
        return {kind.letter: kind for kind in self.layer_kinds}

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Elements of one query or key head."""
        return self.head_widths.query

    @property
    def value_width(self) -> int:
        """Elements of one value head."""
        return self.head_widths.value

    @property
    def rotary_width(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.head_widths.rotary

    @property
    def score_scale(self) -> float:
        """The factor of the scores before the softmax."""
        if self.attention_scale is not None:
            return self.attention_scale
        return 1.0 / math.sqrt(self.head_width)

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding and the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_size is not None:
            return self.ffn_size
        if self.activation == "swiglu":
            return -(-8 * self.hidden_size // (3 * 64)) * 64
        return 4 * self.hidden_size

    @property
    def pattern(self) -> str:
        """One letter per layer; see `layer_pattern`."""
        return "T" * self.num_layers if self.layer_pattern is None else self.layer_pattern

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts (`T` in place of its MLP)."""
        letter = self.pattern[layer]
        return self.moe is not None and (letter == "E" or (letter == "T" and self.moe.at(layer)))

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        if self.attention_output_bias is None:
            return self.attention_bias
        return self.attention_output_bias

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of initial weights that write into the residual stream."""
        additions = self.num_layers + self.pattern.count("T")
        return self.init_std / math.sqrt(additions)
