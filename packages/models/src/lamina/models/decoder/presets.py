"""Public architectures by name."""

import math
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import cycle, islice
from typing import Any

from lamina.models.attention.gated_attention import GatedAttention
from lamina.models.attention.latent_attention import LatentAttention
from lamina.models.base.config import LayerSpec, TransformerConfig
from lamina.models.base.configs.elements import AttentionScores
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.configs.rope import RopeScaling, yarn_magnitude
from lamina.models.mamba.delta_net import GatedDeltaNet


def _sized(*sizes: int, **shape: Any) -> TransformerConfig:
    """Hidden size, layers, heads and inner width of one model, with the shape of its family."""
    shape |= zip(("hidden_size", "num_layers", "num_heads", "ffn_size"), sizes, strict=False)
    return TransformerConfig(**shape)


_gpt2 = partial(  # Radford et al., 2019, by the released checkpoints
    _sized,
    vocab_size=50257,
    max_sequence_length=1024,
    activation="gelu_tanh",
    norm="layernorm",
    positions="learned",
    attention_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
    dropout=0.1,
    attention_dropout=0.1,
)
_llama3 = partial(  # Meta, 2024
    _sized, vocab_size=128256, num_kv_heads=8, max_sequence_length=8192, rope_theta=500_000.0
)
_llama31 = partial(
    _llama3,
    max_sequence_length=131072,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0),
)
_llama32 = partial(
    _llama31, rope_scaling=RopeScaling(kind="llama3", factor=32.0), tie_embeddings=True
)
_qwen3 = partial(  # Qwen team, 2025
    _sized,
    vocab_size=151936,
    num_kv_heads=8,
    head_dim=128,
    max_sequence_length=40960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qk_norm=True,
)


def _qwen3_moe(hidden_size: int, num_layers: int, num_heads: int, inner: int) -> TransformerConfig:
    """Qwen 3 with experts (Qwen team, 2025)."""
    moe = MoEConfig(num_experts=128, top_k=8, ffn_size=inner, global_loss=1e-3)
    sizes = hidden_size, num_layers, num_heads, 3 * hidden_size
    return _qwen3(*sizes, num_kv_heads=4, moe=moe)


def _gpt_oss(num_layers: int, num_experts: int) -> TransformerConfig:
    """Attention in windows of 128 tokens and over all of them, in turns (OpenAI, 2025)."""
    return _sized(
        *(2880, num_layers, 64, 2880),
        vocab_size=201088,
        num_kv_heads=8,
        head_dim=64,
        max_sequence_length=131072,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(
            kind="yarn", factor=32.0, original_length=4096, beta_fast=32.0, beta_slow=1.0,
            truncate=False,
        ),
        attention_bias=True,
        scores=AttentionScores(sinks=True),
        activation="swiglu_clamped",
        sliding_window=128,
        layers=(LayerSpec(), LayerSpec(sliding_window=None)) * (num_layers // 2),
        moe=MoEConfig(
            num_experts=num_experts, top_k=4, ffn_size=2880, bias=True, router_bias=True,
            chosen_by="logits", global_loss=1e-3,
        ),
        huggingface_type="gpt_oss",
    )  # fmt: skip


_PRESETS: dict[str, TransformerConfig] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
    "llama3.1-8b": _llama31(4096, 32, 32, 14336),
    "llama3.1-70b": _llama31(8192, 80, 64, 28672),
    "llama3.1-405b": _llama31(16384, 126, 128, 53248),
    "llama3-405b": _llama31(16384, 126, 128, 53248),
    "llama3.2-1b": _llama32(2048, 16, 32, 8192),
    "llama3.2-3b": _llama32(3072, 28, 24, 8192),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "mixtral-8x7b": _sized(  # Jiang et al., 2024
        *(4096, 32, 32, 14336),
        vocab_size=32000,
        num_kv_heads=8,
        max_sequence_length=32768,
        rope_theta=1_000_000.0,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_size=14336, switch_loss=0.02),
    ),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 1536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3-next-80b-a3b": _sized(  # Qwen team, 2025, without its module for further tokens
        *(2048, 48, 16, 5632),
        vocab_size=151936,
        num_kv_heads=2,
        head_dim=256,
        max_sequence_length=262144,
        norm="rmsnorm_zero",
        norm_eps=1e-6,
        rope_theta=10_000_000.0,
        rotary_fraction=0.25,
        qk_norm=True,
        attention=GatedAttention(in_queries=True),
        layers=(*(LayerSpec(attention=GatedDeltaNet()),) * 3, LayerSpec()) * 12,
        moe=MoEConfig(
            num_experts=512,
            top_k=10,
            ffn_size=512,
            shared_ffn_size=512,
            shared_gate=True,
            global_loss=1e-3,
        ),
        huggingface_type="qwen3_next",
    ),
    "deepseek-v3": _sized(  # DeepSeek-AI, 2024, without its module that predicts further tokens
        *(7168, 61, 128, 18432),
        vocab_size=129280,
        max_sequence_length=163840,
        norm_eps=1e-6,
        rope_scaling=RopeScaling(
            kind="yarn", factor=40.0, original_length=4096, attention_factor=1.0
        ),
        attention_scale=yarn_magnitude(40.0) ** 2 / math.sqrt(192),
        mla=LatentAttention(kv_lora_rank=512, q_lora_rank=1536),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            ffn_size=2048,
            shared_ffn_size=2048,
            first_dense=3,
            scores="sigmoid",
            weight_scale=2.5,
            num_groups=8,
            groups_kept=4,
            bias_rate=1e-3,
            sequence_loss=1e-4,
        ),
    ),
}


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows.

    Examples:
        >>> "llama3-8b" in preset_names()
        True
    """
    return tuple(_PRESETS)


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Look up a public architecture.

    Args:
        name: one of `preset_names`. The 405B model exists as Llama 3.1 only; both names give
            it.
        changes: fields to set otherwise. Where layers differ, `num_layers` gives the first so many
            of them, and begins again where there are fewer, unless `layers` are given too.

    Raises:
        ValueError: for a name that does not exist, with the nearest that do.
        TypeError: for a field that does not exist.

    Examples:
        >>> preset("llama3-8b").num_layers
        32
    """
    if name not in _PRESETS:
        near = get_close_matches(name, _PRESETS, n=3) or preset_names()
        raise ValueError(f"no preset {name!r}: did you mean {', '.join(near)}?")
    chosen = _PRESETS[name]
    if "num_layers" in changes and chosen.layers is not None and "layers" not in changes:
        changes["layers"] = tuple(islice(cycle(chosen.layers), changes["num_layers"]))
    return replace(chosen, **changes)
