"""What a Transformer is made of: one frozen, validated description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lamina.models.base.configs.mamba import MambaConfig, check_pattern
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.configs.precision import Precision

__all__ = [
    "Activation",
    "AttentionPath",
    "ContextParallel",
    "LatentAttention",
    "Norm",
    "PositionEncoding",
    "Reduction",
    "RopeScaling",
    "RopeScalingKind",
    "TransformerConfig",
    "require_one_of",
]


AttentionPath = Literal["auto", "sdpa", "varlen", "flex"]
Activation = Literal["gelu", "gelu_tanh", "swiglu", "relu2"]
Norm = Literal["rmsnorm", "layernorm"]
ContextParallel = Literal["ring", "all_gather", "ulysses"]
PositionEncoding = Literal["rope", "learned", "none"]
Reduction = Literal["ordered", "native"]
RopeScalingKind = Literal["linear", "llama3", "yarn"]


def _divides(what: str, total: int, by_what: str, by: int, remedy: str) -> None:
    """Raise with the arithmetic spelled out unless `by` divides `total`."""
    if by < 1 or total % by:
        remainder = f" (remainder {total % by})" if by >= 1 else ""
        raise ValueError(f"{what} {total} is not divisible by {by_what} {by}{remainder}: {remedy}")


def require_one_of(what: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's wavelengths are stretched beyond the length a model was first trained on.

    Args:
        kind: `linear` (Chen et al., 2023), `llama3` (of Llama 3.1) or `yarn` (Peng et al.,
            2023).
        factor: how many times longer the new length is.
        original_length: tokens of the length first trained on (`llama3` and `yarn`).
        low_freq_factor: `llama3`: wavelengths above `original_length / low_freq_factor` are
            stretched by `factor`.
        high_freq_factor: `llama3`: wavelengths below `original_length / high_freq_factor` are
            kept; those between are blended.
        beta_fast: `yarn`: pairs that turn this often or more within `original_length` are kept.
        beta_slow: `yarn`: pairs that turn at most this often are stretched by `factor`.
        attention_factor: `yarn`: multiplies cosines and sines; `0.1 * ln(factor) + 1` if None.
    """

    kind: RopeScalingKind
    factor: float
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, get_args(RopeScalingKind))
        if self.factor < 1.0:
            raise ValueError(f"RoPE's factor is {self.factor}: it must be at least 1")
        if self.original_length < 1:
            raise ValueError(f"original_length is {self.original_length}: it must be at least 1")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, 2024), by the paper's names.

    Args:
        kv_lora_rank: width of the latent from which keys and values are made.
        q_lora_rank: width of the latent from which queries are made; None makes them directly.
        qk_nope_head_dim: elements of a query or key head that carry no position.
        qk_rope_head_dim: elements of a query or key head turned by RoPE; keys share them.
        v_head_dim: elements of a value head.
        norm_eps: added to the variance under the root where latents are normalised; DeepSeek's code
            has 1e-6 there, whatever the model's own `norm_eps`.
    """

    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank is {self.q_lora_rank}: it must be at least 1, or None")
        if not self.norm_eps > 0.0:
            raise ValueError(f"norm_eps is {self.norm_eps}: it must be positive")
        _divides("qk_rope_head_dim", self.qk_rope_head_dim, "2", 2, "RoPE turns pairs of elements")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder-only Transformer; every block reads it, none changes it.

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
        mla: sizes of multi-head latent attention, in place of `num_kv_heads` and `head_dim`.
        qk_norm: RMSNorm over each head of queries and keys before RoPE.
        attention_bias: biases in the query, key and value projection.
        attention_output_bias: bias in attention's output projection; as `attention_bias` if None.
        mlp_bias: biases in the MLP.
        post_norm: also normalise what attention and MLP return, before it is added.
        tie_embeddings: the output head uses the embedding's weight.
        dropout: of embeddings and of what attention and MLP add to the residual stream.
        attention_dropout: of attention probabilities.
        sliding_window: how many tokens, itself included, a token attends to; None is all before it.
        attention_scale: what scores are multiplied by before the softmax; by default one over the
            root of a query head's width.
        layer_pattern: the kind of each layer, one letter for each: `M` Mamba-2, `*` attention,
            `-` MLP, `E` experts, `T` attention and MLP. None is `T` for all.
        mamba: sizes of Mamba-2 layers; given where the pattern has an `M`.
        moe: experts of layers of kind `E`, and in place of the MLP in layers of kind `T`, and
            in which of these; None has none.
        attention_path: `auto` takes plain causal `scaled_dot_product_attention` where that says
            it all, and for documents and windows `varlen` (CUDA, fp16 or bf16), `flex` (CUDA)
            or `sdpa` with a mask written out (anything else). All give the same numbers. A path
            that is named is refused where it cannot do the case, and beside `ring` and
            `all_gather`, which have their own.
        vocab_multiple: the embedding and head have the next multiple of this many rows, so that
            they can be cut over ranks; the rows added get no probability.
        sequence_parallel: where tensor parallelism cuts weights, also cut the tokens of all that
            lies between (norms, residual stream, dropout); their number must be divisible too.
        tp_reduction: who sums activations over tensor-parallel ranks: `ordered` adds in float32
            and in one order, `native` is the backend's own all-reduce and reduce-scatter (faster
            on NVLink; sums in the wire dtype, in any order). Experts and Mamba keep `ordered`.
        context_parallel: how attention sees a sequence that is cut over ranks: `ring` passes keys
            and values round, `all_gather` gathers them, `ulysses` trades tokens for heads.
        loss_chunk: tokens whose logits are held at a time while the loss is computed; None takes
            at least 1,024 and more for small vocabularies.
        precision: what the blocks' projections multiply: numbers as they are, FP8, or Transformer
            Engine's; and which blocks stay as they are.
        init_std: standard deviation of initial weights; projections into the residual stream are
            scaled down by the root of their number (Radford et al., 2019).

    Raises:
        ValueError: for sizes that do not fit together, with the arithmetic and a remedy.
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
    mla: LatentAttention | None = None
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
        self._check_choices()
        self._check_numbers()
        self._check_heads()
        self.precision.check_blocks(self.num_layers)
        check_pattern(self.layer_pattern, self.num_layers, self.mamba)
        if self.mamba is not None:
            self.mamba.heads(self.hidden_size)
        if self.moe is not None and self.mlp_bias:
            raise ValueError("mlp_bias beside moe: experts have no biases; leave it False")
        if self.moe is not None and not any(map(self.has_experts, range(self.num_layers))):
            raise ValueError(
                f"moe is given, and none of {self.num_layers} layers ({self.pattern!r}) has "
                f"experts: layers of letter 'E' have them, and those of letter 'T' after "
                f"first_dense {self.moe.first_dense} every {self.moe.every}; change one, or leave "
                "moe out"
            )
        if self.moe is None and "E" in self.pattern:
            raise ValueError(
                f"layer_pattern {self.pattern!r} has layers of experts (letter 'E'), and no moe is "
                "given: give moe=MoEConfig(...)"
            )

    def _check_choices(self) -> None:
        require_one_of("activation", self.activation, get_args(Activation))
        require_one_of("norm", self.norm, get_args(Norm))
        require_one_of("positions", self.positions, get_args(PositionEncoding))
        require_one_of("tp_reduction", self.tp_reduction, get_args(Reduction))
        require_one_of("context_parallel", self.context_parallel, get_args(ContextParallel))
        require_one_of("attention_path", self.attention_path, get_args(AttentionPath))

    def _check_numbers(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length")
        for name in (*sizes, "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("num_kv_heads", "head_dim", "ffn_size", "sliding_window", "loss_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1, or None")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be in [0, 1)")
        for name in ("norm_eps", "rope_theta", "init_std"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")

        if self.rope_scaling is not None and self.positions != "rope":
            raise ValueError(
                f"rope_scaling is given beside positions {self.positions!r}, which have no RoPE: "
                "leave it None, or set positions='rope'"
            )

    def _check_heads(self) -> None:
        if self.mla is not None:
            self._check_mla()
            return
        if self.head_dim is None:
            _divides("hidden_size", self.hidden_size, "num_heads", self.num_heads,
                     "change one of them, or set head_dim yourself")  # fmt: skip
        _divides("num_heads", self.num_heads, "num_kv_heads", self.kv_heads,
                 "every key head serves the same number of query heads")  # fmt: skip
        if self.positions == "rope":
            _divides("head width", self.head_width, "2", 2, "RoPE turns pairs of elements")

    def _check_mla(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)} beside mla: leave it None")
        if self.qk_norm:
            raise ValueError("qk_norm beside mla: latent attention normalises its latents instead")
        if self.positions != "rope":
            raise ValueError(f"positions is {self.positions!r} beside mla: it must be 'rope'")

    # What the optional sizes come to. The fields keep what the caller wrote.

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Elements of one query or key head."""
        if self.mla is not None:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of one value head."""
        return self.head_width if self.mla is None else self.mla.v_head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.head_width if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        if self.attention_scale is not None:
            return self.attention_scale
        return 1.0 / math.sqrt(self.head_width)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head."""
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
