"""The correspondence between a model's parameters and the tensors of Hugging Face's models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lamina.models.attention.attention import MultiHeadAttention, variant_of
from lamina.models.base.config import AttentionVariant, LayerPart, TransformerConfig
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.decoder.layer_stack import parts_of
from lamina.models.huggingface.known_types import type_of
from lamina.models.huggingface.model_types import ModelType
from lamina.models.huggingface.moe import moe_links, moe_model_type
from lamina.models.layers.mlp import feed_forward_of
from lamina.models.layers.norms import norm_of
from lamina.models.mamba.block import Mamba2
from lamina.models.moe.layer import Experts

__all__ = ["WeightLink", "further_layer", "head_names", "model_type", "weight_map"]


def model_type(config: TransformerConfig, types: Sequence[ModelType] = ()) -> str:
    """Name the Hugging Face architecture with the config's features; ValueError if none has all.

    `types` are further ones, which are found by `config.huggingface_type`.
    """
    kind = _type_of_features(config, types)
    if config.mtp is not None and kind != "deepseek_v3":
        raise ValueError(
            f"mtp={config.mtp} in a model of type {kind}: of the types known here, deepseek_v3 "
            "alone has names for its tensors; set mtp=None, or give from_huggingface() mtp=False"
        )
    return kind


def _type_of_features(config: TransformerConfig, types: Sequence[ModelType]) -> str:
    if config.huggingface_type is not None:
        if type_of(config.huggingface_type, types) is None:
            raise ValueError(
                f"huggingface_type is {config.huggingface_type!r}, which is not known here: give "
                "None, or its ModelType"
            )
        return config.huggingface_type
    _refuse_new_fields(config)
    if set(config.pattern) != {"T"}:
        return _stack_type(config)
    variant = variant_of(config)
    multi_head = type(variant) is MultiHeadAttention  # a subclass may compute something else
    if not multi_head and variant.huggingface_type is None:
        raise ValueError(
            f"{type(variant).__name__} has no huggingface_type: no Hugging Face architecture can "
            "be told from it; name one as TransformerConfig(huggingface_type=...) if there is one"
        )
    _check_scale(config, variant)
    variant.check_huggingface(config)
    if (kind := _kind(config, variant)) is not None:
        return kind
    if config.moe is not None:
        raise ValueError(
            "no Hugging Face architecture known here has these experts and features together; "
            f"known are mixtral, qwen3_moe and deepseek_v3: {config.moe}"
        )
    raise ValueError(
        "no Hugging Face architecture known here has these features together: positions "
        f"{config.positions!r}, norm {config.norm!r}, activation {config.activation!r}, qk_norm "
        f"{config.qk_norm}, post_norm {config.post_norm}, biases {config.attention_bias}, "
        f"{config.output_bias}, {config.mlp_bias}; known are gpt2, llama, mistral, qwen2, qwen3 "
        "and deepseek_v3 (dense)"
    )


_GPT2: dict[str, Any] = {
    "positions": "learned", "norm": "layernorm", "attention_bias": True, "output_bias": True,
    "mlp_bias": True, "qk_norm": False, "post_norm": False, "sliding_window": None,
}  # fmt: skip
_LLAMA_LIKE: dict[str, Any] = {
    "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "post_norm": False,
}  # fmt: skip


def _refuse_new_fields(config: TransformerConfig) -> None:
    """Raise ValueError for parts that only types with a name of their own have."""
    if isinstance(config.qk_norm, str):
        raise ValueError(
            f"qk_norm is {config.qk_norm!r}: name a type of transformers as huggingface_type"
        )
    for name, default in _OF_OTHER_TYPES.items():
        if (value := getattr(config, name)) != default:
            raise ValueError(
                f"{name} is {value!r}: of the architectures known here only some have that, none "
                "of which can be told from it; name one as TransformerConfig(huggingface_type=...)"
            )


_OF_OTHER_TYPES = {
    "layers": None, "mlp": None, "pre_norm": True, "parallel_mlp": None, "rotary_fraction": 1.0,
    "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "scores": None,
    "logit_softcap": None, "head_bias": False, "embedding_norm": False, "position_offset": 0,
    "hyper_connections": None,
}  # fmt: skip


def _has(config: TransformerConfig, fields: Mapping[str, Any]) -> bool:
    return all(getattr(config, name) == value for name, value in fields.items())


def _kind(config: TransformerConfig, variant: AttentionVariant) -> str | None:
    like_qkv, plain_mlp = config.output_bias == config.attention_bias, not config.mlp_bias
    whole = config.kv_heads == config.num_heads
    whole = whole and config.head_width * config.num_heads == config.hidden_size
    if config.moe is not None:
        fits = like_qkv and _has(config, _LLAMA_LIKE)
        return moe_model_type(config, config.moe, variant.huggingface_type) if fits else None
    gelu = config.activation in ("gelu", "gelu_tanh")
    if whole and gelu and _has(config, _GPT2) and type(variant) is MultiHeadAttention:
        return "gpt2"
    if not _has(config, _LLAMA_LIKE):
        return None
    if variant.huggingface_type is not None or config.qk_norm:
        return (variant.huggingface_type or "qwen3") if plain_mlp and like_qkv else None
    if config.sliding_window is None and like_qkv:
        return "llama"
    if plain_mlp and not config.output_bias:
        return "qwen2" if config.attention_bias else "mistral"
    return None


def _check_scale(config: TransformerConfig, variant: AttentionVariant) -> None:
    """Refuse a scale of the scores that Hugging Face's models would not apply."""
    default, scaling = 1.0 / math.sqrt(config.head_width), config.rope_scaling
    stretched = scaling is not None and scaling.kind == "yarn" and scaling.factor > 1.0
    own = variant.yarn_scales_scores and stretched and config.score_scale > 0.0
    if not own and not math.isclose(config.score_scale, default, rel_tol=1e-6):
        raise ValueError(
            f"attention_scale is {config.attention_scale}: Hugging Face's architectures known here "
            f"scale by one over the root of a head's width, {default:.6g} (deepseek_v3 with yarn "
            "apart): leave attention_scale None, and put the rest into the queries' weights"
        )


def _stack_type(config: TransformerConfig) -> str:
    plain = config.positions == "none" and config.norm == "rmsnorm" and not config.post_norm
    if set(config.pattern) == {"M"} and plain:
        return "mamba2"
    raise ValueError(
        f"no Hugging Face architecture known here has layer_pattern {config.pattern!r} with "
        f"positions {config.positions!r}, norm {config.norm!r} and post_norm {config.post_norm}: "
        "mamba2 has 'M' only, positions 'none' and norm 'rmsnorm'"
    )


def weight_map(
    config: TransformerConfig, types: Sequence[ModelType] = ()
) -> tuple[WeightLink, ...]:
    """Link each parameter of a model with this config to Hugging Face's tensors.

    Args:
        config: the model's.
        types: further types, which are found by `config.huggingface_type`.

    Raises:
        ValueError: if no architecture known here has the config's features.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> links = weight_map(config)
    """
    kind = model_type(config, types)
    if (known := type_of(kind, types)) is not None:
        return tuple(known.links(config, _like_llama(config, kind)))
    if kind != "gpt2" and kind != "mamba2":
        return tuple(_like_llama(config, kind))
    blocks, table, norm = {
        "gpt2": (_gpt2, "transformer.wte", "transformer.ln_f"),
        "mamba2": (_mamba2, "backbone.embeddings", "backbone.norm_f"),
    }[kind]
    added = config.padded_vocab_size - config.vocab_size
    links = [*linked("embedding", table, rows_added=added), *blocks(config)]
    links += linked("final_norm", norm, bias=config.norm == "layernorm")
    if not config.tie_embeddings:
        links += linked("head", "lm_head", rows_added=added)
    return tuple(links)


def head_names(config: TransformerConfig, types: Sequence[ModelType] = ()) -> set[str]:
    """The names that the head's weight has, in files and in memory."""
    name, known = "lm_head.weight", type_of(model_type(config, types), types)
    return {name} if known is None else {known.renamed(name), known.renamed(name, known.memory)}


def _gpt2(config: TransformerConfig) -> Iterator[WeightLink]:
    yield from linked("position_embedding", "transformer.wpe")
    modules = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(config.num_layers):
        for ours, theirs in modules.items():
            for kind in ("weight", "bias"):
                yield WeightLink(
                    f"blocks.{i}.{ours}.{kind}",
                    (f"transformer.h.{i}.{theirs}.{kind}",),
                    transposed=kind == "weight" and "norm" not in ours,
                )


def _like_llama(config: TransformerConfig, kind: str) -> Iterator[WeightLink]:
    """Link a model with the names of Llama, and of the types nearest to it where it lacks some."""
    added = config.padded_vocab_size - config.vocab_size
    yield from linked("embedding", "model.embed_tokens", rows_added=added)
    if config.positions == "learned":
        yield from linked("position_embedding", "model.embed_positions")
    if config.embedding_norm:
        yield from _norm(config, "embedding_norm", "model.embed_norm")
    for at, letter in enumerate(config.pattern):
        layer, ours, theirs = config.of_layer(at), f"blocks.{at}", f"model.layers.{at}"
        if letter == "T":
            yield from _block(layer, at, kind, ours, theirs)
            continue
        yield from _norm(layer, f"{ours}.norm", f"{theirs}.norm")
        (mixer,) = parts_of(config, at)
        yield from _links_of(mixer, layer, kind, f"{ours}.mixer", f"{theirs}.mixer")
    yield from _norm(config, "final_norm", "model.norm")
    if not config.tie_embeddings:
        yield from linked("head", "lm_head", rows_added=added)
    if config.head_bias:
        yield WeightLink("head.bias", ("lm_head.bias",), rows_added=added)
    for number in range(0 if config.mtp is None else config.mtp.depth):
        for link in _multi_token(config, kind, f"mtp.{number}", further_layer(config, number)):
            yield replace(link, in_memory=())


def further_layer(config: TransformerConfig, number: int) -> str:
    """The prefix of their names of a layer of multi-token prediction, counted from 0."""
    return f"model.layers.{config.num_layers + number}"


def _multi_token(
    config: TransformerConfig, kind: str, ours: str, theirs: str
) -> Iterator[WeightLink]:
    yield from _norm(config, f"{ours}.embedding_norm", f"{theirs}.enorm")
    yield from _norm(config, f"{ours}.hidden_norm", f"{theirs}.hnorm")
    yield from linked(f"{ours}.projection", f"{theirs}.eh_proj")
    last = config.num_layers - 1
    yield from _block(config.of_layer(last), last, kind, f"{ours}.block", theirs)
    yield from _norm(config, f"{ours}.final_norm", f"{theirs}.shared_head.norm")


def _block(
    config: TransformerConfig, at: int, kind: str, ours: str, theirs: str
) -> Iterator[WeightLink]:
    after, both = config.post_norm, config.pre_norm and config.post_norm is True
    if config.pre_norm:
        yield from _norm(config, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
    if config.pre_norm and config.parallel_mlp != "one_norm":
        name = "pre_feedforward_layernorm" if both else "post_attention_layernorm"
        yield from _norm(config, f"{ours}.mlp_norm", f"{theirs}.{name}")
    if after is True:
        name = f"{theirs}.post_attention_layernorm"
        yield from _norm(config, f"{ours}.attention_post_norm", name)
    if after:
        name = f"{theirs}.post_feedforward_layernorm"
        yield from _norm(config, f"{ours}.mlp_post_norm", name)
    attention = variant_of(config)
    yield from attention.huggingface_links(config, f"{ours}.attention", f"{theirs}.self_attn")
    inner = Experts() if config.has_experts(at) else feed_forward_of(config)
    yield from _links_of(inner, config, kind, f"{ours}.mlp", f"{theirs}.mlp")


def _links_of(
    part: LayerPart, config: TransformerConfig, kind: str, ours: str, theirs: str
) -> Iterator[WeightLink]:
    if isinstance(part, Experts) and config.moe is not None:
        return moe_links(config, config.moe, kind, ours, theirs)
    return part.huggingface_links(config, ours, theirs)


def _norm(config: TransformerConfig, ours: str, theirs: str) -> Iterator[WeightLink]:
    for name in norm_of(config).names:
        yield WeightLink(f"{ours}.{name}", (f"{theirs}.{name}",))


def _mamba2(config: TransformerConfig) -> Iterator[WeightLink]:
    for at in range(config.num_layers):
        yield from linked(f"blocks.{at}.norm", f"backbone.layers.{at}.norm")
        names = f"blocks.{at}.mixer", f"backbone.layers.{at}.mixer"
        yield from Mamba2().huggingface_links(config, *names)
