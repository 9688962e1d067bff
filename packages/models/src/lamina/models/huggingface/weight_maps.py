"""The correspondence between a model's parameters and the tensors of Hugging Face's models."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lamina.models.attention.attention import MultiHeadAttention, variant_of
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.huggingface.moe import moe_links, moe_model_type

__all__ = ["WeightLink", "model_type", "weight_map"]


def model_type(config: TransformerConfig) -> str:
    """Name the Hugging Face architecture with the config's features; ValueError if none has all."""
    if set(config.pattern) != {"T"}:
        return _stack_type(config)
    variant = variant_of(config)
    multi_head = type(variant) is MultiHeadAttention  # a subclass may compute something else
    if not multi_head and variant.huggingface_type is None:
        raise ValueError(
            f"{type(variant).__name__} has no huggingface_type: no Hugging Face architecture known "
            "here has this attention"
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


def weight_map(config: TransformerConfig) -> tuple[WeightLink, ...]:
    """Link each parameter of a model with this config to Hugging Face's tensors.

    Raises:
        ValueError: if no architecture known here has the config's features.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> links = weight_map(config)
    """
    blocks, table, norm = {
        "gpt2": (_gpt2, "transformer.wte", "transformer.ln_f"),
        "mamba2": (_mamba2, "backbone.embeddings", "backbone.norm_f"),
    }.get(model_type(config), (_llama_like, "model.embed_tokens", "model.norm"))
    added = config.padded_vocab_size - config.vocab_size
    links = [*linked("embedding", table, rows_added=added), *blocks(config)]
    links += linked("final_norm", norm, bias=config.norm == "layernorm")
    if not config.tie_embeddings:
        links += linked("head", "lm_head", rows_added=added)
    return tuple(links)


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


def _llama_like(config: TransformerConfig) -> Iterator[WeightLink]:
    attention = variant_of(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield from linked(f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        yield from linked(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        yield from attention.huggingface_links(config, f"{ours}.attention", f"{theirs}.self_attn")
        if config.moe is not None and config.has_experts(i):
            kind = model_type(config)
            yield from moe_links(config, config.moe, kind, f"{ours}.mlp", theirs)
            continue
        names, rows = (f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"), (config.ffn_width,) * 2
        yield from linked(f"{ours}.mlp.up", *names, bias=config.mlp_bias, rows=rows)
        yield from linked(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", bias=config.mlp_bias)


def _mamba2(config: TransformerConfig) -> Iterator[WeightLink]:
    sizes = config.mamba
    if sizes is None:
        raise ValueError("the config has no mamba")
    projections = ("weight", "bias") if sizes.bias else ("weight",)
    kinds = {
        "input": ("in_proj", projections),
        "conv": ("conv1d", ("weight", "bias") if sizes.conv_bias else ("weight",)),
        "scan": ("", ("A_log", "D", "dt_bias")),
        "norm": ("norm", ("weight",)),
        "output": ("out_proj", projections),
    }
    for i in range(config.num_layers):
        yield from linked(f"blocks.{i}.norm", f"backbone.layers.{i}.norm")
        for ours, (theirs, names) in kinds.items():
            for name in names:
                path = ".".join(filter(None, (f"backbone.layers.{i}.mixer", theirs, name)))
                yield WeightLink(f"blocks.{i}.mixer.{ours}.{name}", (path,))
