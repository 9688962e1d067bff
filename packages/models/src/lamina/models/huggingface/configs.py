"""Hugging Face's `config.json` to `TransformerConfig` and back."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lamina.models.attention.attention import MultiHeadAttention, variant_of
from lamina.models.attention.latent_attention import LatentAttention
from lamina.models.base.config import (
    AttentionVariant,
    TransformerConfig,
)
from lamina.models.base.configs.elements import ActivationName
from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.huggingface.config_fields import (
    AS_IT_IS,
    ConfigFields,
    MissingFieldError,
    refuse_other_classes,
    shortened,
)
from lamina.models.huggingface.known_types import known_types, type_of
from lamina.models.huggingface.model_types import ModelType
from lamina.models.huggingface.moe import EXPERT_FIELDS, read_moe, warn_of_capacity, written_moe
from lamina.models.huggingface.rope import read_scaling, rope_of, with_scale, written_rope
from lamina.models.huggingface.weight_maps import model_type

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}


def huggingface_config(
    config: TransformerConfig, types: Sequence[ModelType] = ()
) -> dict[str, Any]:
    """Write the `config.json` of the Hugging Face model that has the config's weights.

    `types` are further ones, which are found by `config.huggingface_type`.

    Raises:
        ValueError: if no architecture known here has the config's features.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> fields = huggingface_config(config)
    """
    kind = model_type(config, types)
    if (known := type_of(kind, types)) is not None:
        written = {"architectures": [known.architecture], "model_type": kind, **known.write(config)}
        if config.moe is not None:
            warn_of_capacity(config.moe)
        known.check(config, _read(written, {}, types))
        return written
    common: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]] if kind in _ARCHITECTURES else [],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if kind == "mamba2":
        return common | _written_mamba2(config)
    return common | (_written_gpt2(config) if kind == "gpt2" else _written_llama(kind, config))


def _written_gpt2(config: TransformerConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_width,
        "n_positions": config.max_sequence_length,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(str(config.activation), "gelu"),
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _written_llama(kind: str, config: TransformerConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_sequence_length,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": written_rope(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": config.attention_dropout,
    }
    if config.sliding_window is not None:
        window = {"use_sliding_window": True, "max_window_layers": 0}
        written |= {"sliding_window": config.sliding_window} | (
            window if kind in ("qwen2", "qwen3", "qwen3_moe") else {}
        )
    elif kind == "mistral":
        written["sliding_window"] = None
    written |= variant_of(config).huggingface_fields(config)
    if config.moe is not None:
        written |= written_moe(config, config.moe, kind)
    if config.mtp is not None:
        written["num_nextn_predict_layers"] = config.mtp.depth
    return written


def config_from_huggingface(
    source: Mapping[str, Any],
    *,
    variants: Sequence[type[AttentionVariant]] = (),
    types: Sequence[ModelType] = (),
) -> TransformerConfig:
    """Read the contents of a `config.json`.

    Args:
        source: of a model of a type that `docs/models.md` lists; older files (`rope_theta` and
            `rope_scaling` beside each other) are read as well.
        variants: further kinds of attention, which are found by their `huggingface_type`.
        types: further types, which are found by their `name`.

    Raises:
        ValueError: for another architecture, a feature that `TransformerConfig` lacks, or a name
            that nothing here reads and that may change what the model computes.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> config_from_huggingface(huggingface_config(config)).num_layers
        2
    """
    kinds: list[type[AttentionVariant]] = [LatentAttention, *variants]
    own = {str(variant.huggingface_type): variant for variant in kinds}
    try:
        return _read(source, own, types)
    except ValueError as error:
        error.args = (f"{error}{AS_IT_IS}",)
        raise


def _read(
    source: Mapping[str, Any],
    own: Mapping[str, type[AttentionVariant]],
    types: Sequence[ModelType] = (),
) -> TransformerConfig:
    kind = source.get("model_type")
    if (other := type_of(kind, types)) is not None:
        refuse_other_classes(other.architecture.partition("For")[0], source)
        source = {**source, **_left_out(other, source)}
        fields = ConfigFields(source)
        config = TransformerConfig(**other.read(fields))
        if other.latent:
            config = with_scale(config, LatentAttention, other.rope_of(fields))
        derived = _derived(config, source)
        for name in (
            *other.layers,
            *other.values,
            *other.equal,
            *(() if other.latent else ("num_key_value_heads",)),
        ):
            derived.pop(name, None)
        rules = _RULES if other.layers else ()
        no_experts = EXPERT_FIELDS if other.experts is not None and config.moe is None else ()
        fields.refuse_unread(derived, ("model_type", *other.ignored, *rules, *no_experts))
        return config
    if kind not in _ARCHITECTURES and kind not in own:
        known = ", ".join({**_ARCHITECTURES, **known_types(), **own})
        if "vision_config" in source:
            beyond = f"vision_language_from_huggingface reads {kind}, if anything here does"
        else:
            beyond = _beyond_known(source)
        raise ValueError(f"model_type is {kind!r}: known are {known}. {beyond}")
    if kind in _ARCHITECTURES:
        refuse_other_classes(kind, source)
    fields = ConfigFields(source)
    config = _read_fields(fields["model_type"], fields, own)
    unused = EXPERT_FIELDS if config.moe is None else ()
    fields.refuse_unread(_derived(config, source), unused)
    model_type(config)  # raises if it could not be exported again
    return config


_RULES = (
    *("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval"),
    *("no_rope_layer_interval", "global_attn_every_n_layers", "full_attn_idxs"),
    "hybrid_override_pattern",
)
"""Names of rules that lists of the kinds of layers follow from, and that such a list replaces."""


def _left_out(kind: ModelType, source: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers that a file of an older release leaves out, as transformers has them.

    Such a file has a rule in their place (`_RULES`), or none, and only the config class of
    transformers knows what follows from it. Where that class does not either, nothing is made up:
    who reads the field says that it is missing. ValueError: transformers is not installed.
    """
    several = [name for name, kinds in kind.layers.items() if len(kinds) > 1]
    names = [n for n in several if n not in kind.periods and source.get(n) is None]
    if not names:
        return {}
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            f"config.json of model_type {kind.name!r} has no {shortened(names)}: if an older "
            "release has written it, install transformers (lamina-models[older-files]), whose "
            "config class says what follows from the rest of the file"
        ) from None
    said = {name: value for name, value in source.items() if name != "model_type"}
    with suppress(ValueError, KeyError, TypeError):
        whole = AutoConfig.for_model(kind.name, **said).to_dict()
        return {name: whole.get(name) for name in names}
    return {}


def _read_fields(
    kind: str, fields: ConfigFields, own: Mapping[str, type[AttentionVariant]]
) -> TransformerConfig:
    if kind == "gpt2":
        return _read_gpt2(fields)
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {fields['hidden_act']!r}: only silu is known")
    if kind == "mamba2":
        return _read_mamba2(fields)
    return _read_llama_like(kind, fields, own.get(kind, MultiHeadAttention))


# What other fields decide, or some models lack: see `_derived` and EXPERT_FIELDS.
_FOLLOWS = {"deepseek_v3": ("head_dim", "qk_head_dim", "num_key_value_heads", *EXPERT_FIELDS)}


def _beyond_known(source: Mapping[str, Any]) -> str:
    """What the config of an unknown type has that the nearest known type has not, in words."""
    own = {str(LatentAttention.huggingface_type): LatentAttention}
    pieces: dict[str, list[str]] = {}
    for kind in ("llama", *_ARCHITECTURES):
        asked = ConfigFields({}, survey=True)
        with suppress(ValueError):  # sizes of 1 fit no model, but by then all are read
            _read_fields(kind, asked, own)
        features = {name: value for name, value in source.items() if value}  # not what is off
        if features.get("hidden_act") != "silu":
            asked.names_read.discard("hidden_act")
        asked.names_read |= {"model_type", "layer_types", *_FOLLOWS.get(kind, ())}
        pieces[kind] = ConfigFields(features).unread(asked.names_read)
    features = {name: value for name, value in source.items() if value}
    for other in known_types().values():
        missing = ConfigFields(features).unread(other.names_read)
        wrong = {n for n, only in other.refused.items() if features.get(n, only) != only}
        pieces[other.name] = missing + [f"{name}={features[name]!r}" for name in sorted(wrong)]
    for nearest in sorted(pieces, key=lambda kind: len(pieces[kind])):
        if pieces[nearest]:
            return f"The nearest is {nearest}, which lacks {shortened(pieces[nearest])}"
        try:
            _read({**source, "model_type": nearest, "architectures": None}, own)
        except MissingFieldError:
            continue  # it reads all that is there, and needs more
        except ValueError as error:
            return f"The nearest is {nearest}, for which {error}"
        return f"Its config.json is like that of {nearest}, so its code must differ"
    return "All known types need fields that it has not got"


def _derived(config: TransformerConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """Names of `config.json` that other names decide, and that need not be read."""
    window = "full_attention" if config.sliding_window is None else "sliding_attention"
    derived: dict[str, Any] = {
        "layer_types": [window] * config.num_layers,
        "attention_bias": config.attention_bias,
        "num_key_value_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,  # where a list of layers has as many
        "rope_scaling": source.get("rope_parameters"),  # an older name beside the newer one
    }
    if config.moe is not None:
        derived["scoring_func"] = config.moe.scores
        derived["topk_method"] = "greedy" if config.moe.bias_rate is None else "noaux_tc"
        derived["moe_layer_freq"] = config.moe.every
    if config.mamba is not None:
        derived["intermediate_size"] = config.mamba.expand * config.hidden_size
    if isinstance(config.mla, LatentAttention):
        turned = config.mla.qk_rope_head_dim
        derived |= {"head_dim": turned, "qk_head_dim": config.mla.qk_nope_head_dim + turned}
    return derived


def _read_gpt2(source: Mapping[str, Any]) -> TransformerConfig:
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if source.get(name):
            raise ValueError(f"{name} is set, which TransformerConfig cannot express")
    if not source.get("scale_attn_weights", True):
        raise ValueError("scale_attn_weights is False: only scores that are scaled are known")
    embedding, residual = (source.get(f"{name}_pdrop", 0.1) for name in ("embd", "resid"))
    if embedding != residual:
        raise ValueError(
            f"embd_pdrop is {embedding}, resid_pdrop {residual}: TransformerConfig has one dropout "
            "for both; write the same into config.json"
        )
    activations: dict[str, ActivationName] = {"gelu_new": "gelu_tanh", "gelu": "gelu"}
    name = source.get("activation_function", "gelu_new")
    if name not in activations:
        raise ValueError(f"activation_function is {name!r}: known are {', '.join(activations)}")
    return TransformerConfig(
        vocab_size=source["vocab_size"],
        hidden_size=source["n_embd"],
        num_layers=source["n_layer"],
        num_heads=source["n_head"],
        ffn_size=source.get("n_inner"),
        max_sequence_length=source["n_positions"],
        activation=activations[name],
        norm="layernorm",
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
        positions="learned",
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=source.get("tie_word_embeddings", True),
        dropout=residual,
        attention_dropout=source.get("attn_pdrop", 0.1),
        init_std=source.get("initializer_range", 0.02),
    )


def _read_llama_like(
    kind: str, source: Mapping[str, Any], variant: type[AttentionVariant]
) -> TransformerConfig:
    bias = kind == "qwen2" or bool(source.get("attention_bias", False))
    rope = rope_of(source)
    config = TransformerConfig(
        vocab_size=source["vocab_size"],
        hidden_size=source["hidden_size"],
        num_layers=source["num_hidden_layers"],
        num_heads=source["num_attention_heads"],
        ffn_size=source["intermediate_size"],
        max_sequence_length=source["max_position_embeddings"],
        norm_eps=source.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10_000.0),
        rope_scaling=read_scaling(rope, source),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        attention_bias=bias,
        attention_output_bias=False if kind == "qwen2" else None,
        mlp_bias=bool(source.get("mlp_bias", False)),
        tie_embeddings=source.get("tie_word_embeddings", False),
        attention_dropout=source.get("attention_dropout") or 0.0,
        sliding_window=_read_window(kind, source),
        init_std=source.get("initializer_range", 0.02),
        **variant.read_huggingface(source),
        moe=read_moe(kind, source),
    )
    return with_scale(config, variant, rope)


def _read_window(kind: str, source: Mapping[str, Any]) -> int | None:
    window: int | None = source.get("sliding_window")
    if kind in ("mistral", "mixtral"):
        return window
    if kind not in ("qwen2", "qwen3", "qwen3_moe"):
        return None
    layers, kinds = source["num_hidden_layers"], set(source.get("layer_types") or ())
    if len(kinds) > 1:
        raise ValueError(f"layers of kinds {sorted(kinds)}: TransformerConfig has one kind")
    off = not source.get("use_sliding_window") or window is None
    if off and kinds - {"full_attention"}:
        raise ValueError(
            f"layer_types is {sorted(kinds)}, and use_sliding_window and sliding_window say that "
            "there is no window: make them agree in config.json"
        )
    if off or kinds == {"full_attention"}:
        return None
    if kinds or kind == "qwen3_moe":
        return window
    # In files without layer_types the first layers see everything.
    full = min(source.get("max_window_layers", 28), layers)
    if window is not None and 0 < full < layers:
        raise ValueError(
            f"max_window_layers is {full} of {layers} layers: the others have a sliding window, "
            "and TransformerConfig has one kind of layer"
        )
    return window if full == 0 else None


# Sizes by their names in `config.json`; files may lack the second kind.
_ALWAYS = {
    "state_size": "state_size",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "conv_kernel": "conv_kernel",
    "chunk_size": "chunk_size",
}
_MAYBE = {
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
}


def _written_mamba2(config: TransformerConfig) -> dict[str, Any]:
    """Write the fields of `config.json` that only Mamba-2 has."""
    sizes = config.mamba
    if sizes is None:
        raise ValueError("the config has no mamba")
    heads = sizes.heads(config.hidden_size)
    expand, remainder = divmod(heads * sizes.head_dim, config.hidden_size)
    if remainder:
        raise ValueError(
            f"{heads} heads of {sizes.head_dim} make an inner width of {heads * sizes.head_dim}, "
            f"no multiple of hidden_size {config.hidden_size}: mamba2 has expand instead"
        )
    written: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_eps,
        "num_heads": heads,
        "expand": expand,
        **{theirs: getattr(sizes, ours) for ours, theirs in (_ALWAYS | _MAYBE).items()},
        "hidden_act": "silu",
        "residual_in_fp32": True,
    }
    if sizes.dt_limit != (0.0, math.inf):  # the default; JSON has no infinity
        infinity = {"__float__": "Infinity"}  # as transformers writes it
        written["time_step_limit"] = [infinity if b == math.inf else b for b in sizes.dt_limit]
    return written


def _read_bound(bound: float | Mapping[str, str]) -> float:
    return float(bound["__float__"] if isinstance(bound, Mapping) else bound)


def _read_mamba2(source: Mapping[str, Any]) -> TransformerConfig:
    """Read the contents of the `config.json` of a stack of Mamba-2 layers."""
    layers, expand = source["num_hidden_layers"], source.get("expand", 2)
    limit = source.get("time_step_limit") or (0.0, math.inf)
    config = TransformerConfig(
        vocab_size=source["vocab_size"],
        hidden_size=source["hidden_size"],
        num_layers=layers,
        num_heads=1,  # not used, as there is no attention
        # Without positions nothing limits the length of a sequence or is allocated for it.
        max_sequence_length=1 << 20,
        positions="none",
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
        layer_pattern="M" * layers,
        mamba=MambaConfig(
            num_heads=source["num_heads"],
            expand=expand,
            **{ours: source[theirs] for ours, theirs in _ALWAYS.items()},
            **{ours: source[theirs] for ours, theirs in _MAYBE.items() if theirs in source},
            dt_limit=(_read_bound(limit[0]), _read_bound(limit[1])),
        ),
        tie_embeddings=source.get("tie_word_embeddings", False),
        init_std=source.get("initializer_range", 0.1),
    )
    widths = source["num_heads"] * source["head_dim"], expand * source["hidden_size"]
    if widths[0] != widths[1]:
        raise ValueError(
            f"num_heads * head_dim is {widths[0]} and expand * hidden_size {widths[1]}: both are "
            "the inner width of mamba2, and config.json has to say the same"
        )
    return config
