"""The description of a Transformer: frozen, validated dataclasses.

`TransformerConfig` describes a decoder. `AttentionVariant` and `LayerKind` are what it is extended
by: an object of either is a value in the config, so nothing is registered anywhere and two models
in one process may have different ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from lamina.models.base.configs.elements import (
    Activation,
    ActivationName,
    AttentionScores,
    HeadWidths,
    NormName,
    NormPart,
    activation_of,
)
from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
    require_divides,
    require_one_of,
    require_positive,
)
from lamina.models.base.configs.hyper_connections import HyperConnections
from lamina.models.base.configs.mamba import LETTERS, MambaConfig, check_pattern
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.configs.multi_token import MultiTokenPrediction
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.configs.rope import RopeScaling
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.base.weight_link import WeightLink

AttentionPath = Literal["auto", "sdpa", "varlen", "flex"]
ContextParallel = Literal["ring", "all_gather", "ulysses"]
PositionEncoding = Literal["rope", "learned", "none"]
ParallelMLP = Literal["one_norm", "two_norms"]
Reduction = Literal["ordered", "native"]


@dataclass(frozen=True, kw_only=True)
class LayerPart(ABC):
    """A part of a layer: all that the rest of Lamina asks about it.

    Subclass it as a frozen dataclass whose fields are the part's own sizes. `make` and `parameters`
    are required. Roles are marked by the module that `make` builds.
    """

    @abstractmethod
    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """Build the module.

        That of an attention or of a mixer is called as `module(x, context)`, that of an MLP as
        `module(x)`, and that of a whole layer as `layer(x, context)`.

        Args:
            config: of the layer that the part is in.
            mesh: has an axis `tp`, or is that axis; None is one process.
        """

    @abstractmethod
    def parameters(self, config: TransformerConfig) -> int:
        """Count the weights of a layer that a token is multiplied with."""

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """Count the multiplications per token that take no weight, in sequences of this length."""
        return 0.0

    def check(self, config: TransformerConfig) -> None:  # noqa: B027 (optional)
        """Raise ValueError for a config that the part cannot be in."""

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """Link the module's parameters to tensors of a Hugging Face checkpoint.

        Args:
            config: of the layer.
            ours: prefix of our names, such as `blocks.0.attention`.
            theirs: prefix of their names, such as `model.layers.0.self_attn`, in a model of type
                llama. A type with other names renames them (`ModelType.names`).

        Raises:
            ValueError: if the part has no names there.
        """
        raise ValueError(
            f"{type(self).__name__} has no Hugging Face names: override huggingface_links"
        )


@dataclass(frozen=True, kw_only=True)
class AttentionVariant(LayerPart):
    """A kind of attention: give an object as `TransformerConfig(attention=...)`.

    The members that are not required describe multi-head attention with the config's heads, and are
    overridden where the variant differs. `docs/models.md` shows an example.

    Attributes:
        context_parallel: ways of context parallelism that the module supports. A module that
            computes attention by `context.pattern` supports all of them.
        huggingface_type: the `model_type` of Hugging Face's Llama-like checkpoints with this
            attention; None if there are none.
        yarn_scales_scores: whether Hugging Face's model folds YaRN's magnitude into the scale of
            the scores, as DeepSeek's does.
        takes_scores: whether the module applies `TransformerConfig.scores`.
        reads_documents: whether the module reads `context.runs`.
        reads_mamba: whether the config's `mamba` has the sizes of the module.
        adds_loss: whether the module adds a loss of its own, by `context.routing.scale`.
    """

    context_parallel: ClassVar[tuple[ContextParallel, ...]] = get_args(ContextParallel)
    huggingface_type: ClassVar[str | None] = None
    yarn_scales_scores: ClassVar[bool] = False
    takes_scores: ClassVar[bool] = False
    reads_documents: ClassVar[bool] = False
    reads_mamba: ClassVar[bool] = False
    adds_loss: ClassVar[bool] = False

    def products_per_pair(self, config: TransformerConfig) -> int:
        """Count the multiplications for one pair of a query and a key that it attends to."""
        widths = self.widths(config)
        return config.num_heads * (widths.query + widths.value)

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """See `LayerPart.products_per_token`: by causal mask and window."""
        window = min(config.sliding_window or sequence, sequence)
        # The first `window` tokens attend to 1, 2, ... tokens, and the others to `window` each.
        pairs = (window * (window + 1) / 2 + (sequence - window) * window) / sequence
        return pairs * self.products_per_pair(config)

    def check(self, config: TransformerConfig) -> None:
        """See `LayerPart.check`."""
        config.check_own_heads()

    def widths(self, config: TransformerConfig) -> HeadWidths:
        """Widths of the heads."""
        return config.own_head_widths()

    def check_huggingface(self, config: TransformerConfig) -> None:
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


@dataclass(frozen=True, kw_only=True)
class LayerKind(LayerPart):
    """A layer of your own in a stack: give it as `TransformerConfig(layer_kinds=(...,))`.

    Subclass it as a frozen dataclass whose further fields are the layer's sizes. Its module has the
    residual connection in it. `ResidualBlock(config, mixer, mesh)` adds norm, residual connection
    and dropout to a mixer; `apply_recompute` and `Precision` find such layers by themselves.

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


@dataclass(frozen=True, init=False)
class LayerSpec:
    """A layer of a stack: its kind, and the parts in which it differs from the model's config.

    Args:
        letter: the kind of layer, as in `TransformerConfig.layer_pattern`.
        changes: fields of `TransformerConfig` that have other values in this layer. Fields that the
            layers of a model share are refused.

    Examples:
        >>> local, whole = LayerSpec(sliding_window=128), LayerSpec(positions="none")
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=4, num_heads=4,
        ...                            layers=(local, local, local, whole))
    """

    letter: str
    changes: tuple[tuple[str, Any], ...]

    def __init__(self, letter: str = "T", **changes: Any) -> None:
        object.__setattr__(self, "letter", letter)
        object.__setattr__(self, "changes", tuple(sorted(changes.items())))
        known = {each.name for each in fields(TransformerConfig)}
        if wrong := sorted(set(changes) - (known - _SHARED_BY_LAYERS)):
            raise ValueError(
                f"{wrong[0]} cannot be that of one layer: "
                + ("all layers of a model share it" if wrong[0] in known else "there is no such")
                + "; a layer may have its own of the other fields of TransformerConfig"
            )

    def __repr__(self) -> str:
        """As it is written."""
        changes = "".join(f", {name}={value!r}" for name, value in self.changes)
        return f"LayerSpec({self.letter!r}{changes})"


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
        activation: `gelu` (exact), `gelu_tanh` (GPT-2's), `gelu_sigmoid` (CLIP's), `relu`, `relu2`
            (squared, So et al., 2021), `silu`; with a gate `swiglu`, `geglu` or `geglu_tanh`
            (Shazeer, 2020), or `swiglu_clamped` (gpt-oss, 2025); or an `Activation` of your own.
        norm: `rmsnorm` or `layernorm`; `layernorm_unbiased` has no bias, and `rmsnorm_plain` and
            `layernorm_plain` no parameters; in `rmsnorm_zero` and `layernorm_zero` the factor is
            1 + weight; or a `NormPart` of your own.
        norm_eps: added to the variance under the root.
        positions: `rope` (Su et al., 2021), `learned` or `none`.
        rope_theta: base of RoPE's wavelengths.
        rope_scaling: how the wavelengths are stretched; None keeps them.
        rotary_fraction: the part of each query and key head that RoPE turns, from its start.
        attention: another kind of attention in place of multi-head attention.
        mla: the same as `attention`, by the name that multi-head latent attention has.
        mlp: another kind of MLP.
        qk_norm: the config's norm (RMSNorm for `layernorm`) over each head of queries and keys
            before RoPE; `after_rope` does it after RoPE, `layernorm` is a LayerNorm in any model,
            and `whole` normalises all heads of a token together.
        scores: what becomes of attention's scores before the softmax; None leaves them.
        attention_bias: biases in the query, key and value projection.
        attention_output_bias: bias in attention's output projection; as `attention_bias` if None.
        mlp_bias: biases in the MLP.
        pre_norm: normalise the inputs of attention and MLP.
        post_norm: also normalise the results of attention and MLP before they are added; `mlp`
            those of the MLP alone.
        embedding_norm: normalise the embeddings.
        parallel_mlp: attention and MLP both read the input of the block, and are added to it
            together. With `one_norm` they read the same normalised input; with `two_norms` each has
            its own norm. None is one after the other.
        embedding_scale: multiplies the embeddings of tokens.
        residual_scale: multiplies what a layer adds to the residual stream.
        hyper_connections: residual streams, and how layers read and write them; None is one stream.
        logit_scale: multiplies the logits.
        logit_softcap: a logit l becomes `logit_softcap * tanh(l / logit_softcap)`; None leaves it.
        head_bias: a bias in the output head.
        position_offset: the row of the learned position 0 in their table, which has that many rows
            more (OPT: 2).
        tie_embeddings: the output head uses the embedding's weight.
        dropout: dropout of embeddings and of the results of attention and MLP.
        attention_dropout: dropout of attention probabilities.
        embedding_dropout: dropout of embeddings; as `dropout` if None.
        sliding_window: the number of tokens, itself included, that a token attends to; None is all
            tokens before it.
        attention_scale: the factor of the scores before the softmax; by default one over the root
            of the width of a query head.
        layer_pattern: the kind of each layer, one letter for each: `M` Mamba-2, `*` attention,
            `-` MLP, `E` experts, `T` attention and MLP, or a letter of `layer_kinds`. None is `T`
            for all.
        layer_kinds: layers of your own, by their letters.
        layers: a specification of each layer, where layers of one kind differ; `layer_pattern` is
            for stacks whose layers of one letter are alike.
        mamba: sizes of Mamba-2 layers; given where the pattern has an `M`.
        moe: experts of layers of kind `E`, and in place of the MLP in layers of kind `T`, and
            in which of these; None has none.
        mtp: layers that predict tokens beyond the next one in training; None has none.
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
        invariant: all sums whose order could depend on how ranks share the work, on the batch or
            on packing have one order, which the model fixes: the same bits for every layout
            (docs/invariance.md, with its price).
        init_std: standard deviation of initial weights; projections into the residual stream are
            scaled down by the root of their number (Radford et al., 2019).
        residual_additions: that number; None counts the layers.
        huggingface_type: the `model_type` that `huggingface_config` writes; None chooses one that
            has the config's features.

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
    activation: ActivationName | Activation = "swiglu"
    norm: NormName | NormPart = "rmsnorm"
    norm_eps: float = 1e-5
    positions: PositionEncoding = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0
    attention: AttentionVariant | None = None
    mla: AttentionVariant | None = None
    mlp: LayerPart | None = None
    qk_norm: bool | Literal["whole", "after_rope", "layernorm"] = False
    scores: AttentionScores | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    pre_norm: bool = True
    post_norm: bool | Literal["mlp"] = False
    embedding_norm: bool = False
    parallel_mlp: ParallelMLP | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    hyper_connections: HyperConnections | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    position_offset: int = 0
    tie_embeddings: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float | None = None
    sliding_window: int | None = None
    attention_scale: float | None = None
    attention_path: AttentionPath = "auto"
    layer_pattern: str | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    layers: tuple[LayerSpec, ...] | None = None
    mamba: MambaConfig | None = None
    moe: MoEConfig | None = None
    mtp: MultiTokenPrediction | None = None
    vocab_multiple: int = 1
    sequence_parallel: bool = False
    tp_reduction: Reduction = "ordered"
    context_parallel: ContextParallel = "ring"
    loss_chunk: int | None = None
    precision: Precision = field(default_factory=Precision)
    invariant: bool = False
    init_std: float = 0.02
    residual_additions: int | None = None
    huggingface_type: str | None = None

    def __post_init__(self) -> None:
        require_choices(self, TransformerConfig)
        self._check_numbers()
        if self.attention is not None and self.mla is not None:
            raise ValueError("attention and mla are both given: they mean the same, give one")
        if self.attention_variant is None:
            self.check_own_heads()
        else:
            self.attention_variant.check(self)
        given = self.attention_variant
        if self.scores is not None and given is not None and not given.takes_scores:
            raise ValueError(
                f"scores is {self.scores} beside {type(given).__name__}, which leaves scores as "
                "they are: leave one out"
            )
        if self.mlp is not None:
            self.mlp.check(self)
        if self.mtp is not None:
            self.mtp.check(self.hyper_connections)
        self.precision.check_blocks(self.num_layers)
        if self.layers is not None:
            self._check_specs(self.layers)
        self._check_layers()
        if self.invariant:
            self._check_invariant()

    def _check_specs(self, layers: tuple[LayerSpec, ...]) -> None:
        if self.layer_pattern is not None:
            raise ValueError(
                f"layer_pattern {self.layer_pattern!r} and layers are both given: each says what "
                "the layers are; leave one out"
            )
        if len(layers) != self.num_layers:
            raise ValueError(
                f"layers has {len(layers)} layers, and num_layers is {self.num_layers}"
            )
        for number, spec in enumerate(layers):
            given = {name for name, value in spec.changes if value is not None}
            for name in given & {"moe", "mamba"}:
                if getattr(self, name) is None:
                    raise ValueError(
                        f"layer {number} has {name}, and the model none: give it to the model, and "
                        f"{name}=None to its other layers"
                    )
            try:
                self.of_layer(number)
            except ValueError as error:
                error.args = (f"layer {number} ({spec!r}): {error}",)
                raise

    def _check_layers(self) -> None:
        own = [kind.letter for kind in self.layer_kinds]
        if len(set(own)) < len(own):
            raise ValueError(f"layer_kinds have letters {own}: each must be another one")
        letters = self.layer_pattern if self.layers is None else self.pattern
        reads = any(map(self._reads_mamba, self.layers or (LayerSpec(),)))
        check_pattern(letters, self.num_layers, self.mamba, own, reads)
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

    def _check_invariant(self) -> None:
        """Raise ValueError for what has no order that the model could fix."""
        backend = self.precision.backend
        lacks = {
            f"tp_reduction={self.tp_reduction!r} (the backend chooses the order)": (
                self.tp_reduction == "native"
            ),
            f"precision={backend!r} (its scales and kernels see what a rank has)": (
                backend != "torch"
            ),
            f"attention_path={self.attention_path!r} (a kernel of another order)": (
                self.attention_path != "auto"
            ),
            f"logit_softcap={self.logit_softcap} (not in the loss of this setting)": (
                self.logit_softcap is not None
            ),
            f"head_bias={self.head_bias} (a sum over tokens in no fixed order)": self.head_bias,
            f"mtp={self.mtp} (embedding and head have several gradients)": self.mtp is not None,
            "tie_embeddings=True (a weight with two gradients, added for each microbatch)": (
                self.tie_embeddings
            ),
        }
        for name in ("scores", "hyper_connections"):
            part = getattr(self, name)
            lacks[f"{name}={part} (kernels of another order)"] = part is not None
        if self.moe is not None:
            lacks |= self.moe.depends_on_layout
        for what, there in lacks.items():
            if there:
                raise ValueError(f"invariant=True beside {what}: leave one of them out")

    def _check_numbers(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length")
        require_at_least(1, self, *sizes, "vocab_multiple")
        optional = ("num_kv_heads", "head_dim", "ffn_size", "sliding_window", "loss_chunk")
        require_at_least(1, self, *optional, optional=True)
        for name in ("dropout", "attention_dropout", "embedding_dropout"):
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be in [0, 1)")
        require_positive(self, "norm_eps", "rope_theta", "init_std", "rotary_fraction")
        require_positive(self, "embedding_scale", "residual_scale", "logit_scale")
        self.gated  # noqa: B018 (an unknown activation)
        if not isinstance(self.norm, NormPart):
            require_one_of("norm", self.norm, get_args(NormName))
        for name, words in _SWITCHES.items():
            require_one_of(name, getattr(self, name), words)
        if self.logit_softcap is not None:
            require_positive(self, "logit_softcap")
        if self.positions != "learned":
            refuse_unread(self, ["position_offset"], f"positions={self.positions!r} has no table")
        require_at_least(0, self, "position_offset")
        if self.parallel_mlp is not None:
            require_one_of("parallel_mlp", self.parallel_mlp, get_args(ParallelMLP))
            if self.post_norm or not self.pre_norm:
                raise ValueError(
                    f"parallel_mlp={self.parallel_mlp!r} beside pre_norm={self.pre_norm} and "
                    f"post_norm={self.post_norm}: such blocks normalise their inputs alone"
                )
        if self.positions != "rope":
            why = f"positions={self.positions!r} turns nothing by RoPE"
            refuse_unread(self, ("rope_theta", "rope_scaling", "rotary_fraction"), why)

    def check_own_heads(self) -> None:
        """Raise ValueError unless `num_heads`, `num_kv_heads` and `head_dim` fit together."""
        if self.head_dim is None:
            require_divides("hidden_size", self.hidden_size, "num_heads", self.num_heads,
                            "change one of them, or set head_dim yourself")  # fmt: skip
        require_divides("num_heads", self.num_heads, "num_kv_heads", self.kv_heads,
                        "every key head serves the same number of query heads")  # fmt: skip
        if self.positions == "rope":
            require_divides("head width", self.head_width, "2", 2, "RoPE turns pairs of elements")
            turned = self.rotary_fraction * self.head_width
            if self.rotary_fraction > 1.0 or self.rotary_width < 2 or self.rotary_width % 2:
                raise ValueError(
                    f"rotary_fraction is {self.rotary_fraction}, and turns {turned} of "
                    f"{self.head_width} elements: it must turn an even number of them"
                )

    def own_head_widths(self) -> HeadWidths:
        """Widths of the heads by `head_dim`, or by `hidden_size` and `num_heads`."""
        width = self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim
        return HeadWidths(width, width, int(width * self.rotary_fraction))

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
        own = self.attention_scale
        return 1.0 / math.sqrt(self.head_width) if own is None else own

    @property
    def stream_width(self) -> int:
        """Elements of a token between blocks: of all residual streams."""
        streams = 1 if self.hyper_connections is None else self.hyper_connections.streams
        return streams * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding and the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_size is not None:
            return self.ffn_size
        if self.gated:
            return -(-8 * self.hidden_size // (3 * 64)) * 64
        return 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return activation_of(self.activation).gated

    def _reads_mamba(self, spec: LayerSpec) -> bool:
        kind = dict(spec.changes).get("attention", self.attention)
        return kind is not None and kind.reads_mamba

    def of_layer(self, layer: int) -> TransformerConfig:
        """The config of a layer, counted from 0: this one, with what its specification changes.

        All layers of that config are like the layer.
        """
        if self.layers is None:
            return self
        spec = self.layers[layer]
        own: dict[str, Any] = {"layers": None, "layer_pattern": None}
        own["residual_additions"] = self.additions
        if spec.letter != "T":
            own["layer_pattern"] = spec.letter * self.num_layers
        own |= {} if spec.letter == "M" or self._reads_mamba(spec) else {"mamba": None}
        own |= {} if spec.letter in "TE" else {"moe": None}
        return replace(self, **{**own, **dict(spec.changes)})

    @property
    def distinct_layers(self) -> list[TransformerConfig]:
        """The configs of layers that differ."""
        return self._of_specs if self.layers else [self]

    # On Python 3.11 it takes a lock where it is not made yet, which no compiled graph can hold.
    @cached_property
    def _of_specs(self) -> list[TransformerConfig]:
        first = {spec: at for at, spec in reversed(list(enumerate(self.layers or ())))}
        return [self.of_layer(at) for at in sorted(first.values())]

    @property
    def draws_numbers(self) -> bool:
        """Whether a forward that trains draws random numbers."""
        rates = [self.dropout, self.embedding_dropout]
        for layer in self.distinct_layers:
            rates += [layer.dropout, layer.attention_dropout]
            rates += [0.0 if layer.moe is None else layer.moe.jitter]
        return any(rates)

    @property
    def additions(self) -> int:
        """The number of results that are added to the residual stream."""
        return self.residual_additions or self.num_layers + self.pattern.count("T")

    @property
    def pattern(self) -> str:
        """One letter per layer; see `layer_pattern`."""
        if self.layers is not None:
            return "".join(spec.letter for spec in self.layers)
        return "T" * self.num_layers if self.layer_pattern is None else self.layer_pattern

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts (`T` in place of its MLP)."""
        letter, moe = self.pattern[layer], self.of_layer(layer).moe
        return moe is not None and (letter == "E" or (letter == "T" and moe.at(layer)))

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        own = self.attention_output_bias
        return self.attention_bias if own is None else own

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of initial weights that write into the residual stream."""
        return self.init_std / math.sqrt(self.additions)


_SWITCHES: dict[str, tuple[bool | str, ...]] = {
    "qk_norm": (False, True, "whole", "after_rope", "layernorm"),
    "post_norm": (False, True, "mlp"),
}
_SHARED_BY_LAYERS = {
    *("vocab_size", "hidden_size", "num_layers", "max_sequence_length", "tie_embeddings"),
    *("embedding_norm", "logit_softcap", "head_bias", "position_offset", "mtp"),
    *("embedding_scale", "logit_scale", "layer_pattern", "layer_kinds", "layers", "loss_chunk"),
    *("vocab_multiple", "sequence_parallel", "tp_reduction", "context_parallel", "precision"),
    *("invariant", "residual_additions", "huggingface_type", "hyper_connections"),
}
"""Fields that are of the whole model: its ends, and how its ranks share the work."""
