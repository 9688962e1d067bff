"""Configs that cannot be are refused, with the arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from lamina.models import LatentAttention, Precision, RopeScaling, TransformerConfig

BASE = {"vocab_size": 10, "hidden_size": 48, "num_layers": 2, "num_heads": 6}
MLA = LatentAttention(kv_lora_rank=4)
LINEAR = RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"hidden_size 48 is not divisible by num_heads 5 \(remainder 3\)"),
        ({"num_kv_heads": 4}, r"num_heads 6 is not divisible by num_kv_heads 4 \(remainder 2\)"),
        ({"head_dim": 7}, "head width 7 is not divisible by 2"),
        ({"vocab_size": 0}, "vocab_size is 0: it must be at least 1"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"dropout": 1.0}, r"dropout is 1.0: it must be in \[0, 1\)"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0: it must be positive"),
        ({"activation": "tanh"}, "activation is 'tanh': it must be one of 'gelu'"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'"),
        ({"positions": "sine"}, "positions is 'sine'"),
        ({"attention_path": "fast"}, "attention_path is 'fast'"),
        ({"mla": MLA, "num_kv_heads": 2}, "num_kv_heads is 2 beside mla"),
        ({"mla": MLA, "qk_norm": True}, "qk_norm beside mla"),
        ({"mla": MLA, "positions": "none"}, "positions is 'none' beside mla"),
        ({"rope_scaling": LINEAR, "positions": "learned"}, "rope_scaling=.* positions='learned'"),
        ({"rope_scaling": LINEAR, "positions": "none"}, "rope_scaling=.* positions='none'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**BASE, **change})


def test_optional_sizes_come_to_what_the_docstring_says():
    config = TransformerConfig(**BASE)
    assert (config.kv_heads, config.head_width, config.value_width) == (6, 8, 8)
    assert config.ffn_width == 128
    assert dataclasses.replace(config, activation="gelu").ffn_width == 192
    assert dataclasses.replace(config, vocab_multiple=8).padded_vocab_size == 16
    assert dataclasses.replace(config, attention_bias=True).output_bias


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig(**BASE).num_layers = 3


def test_rope_scaling_is_validated():
    with pytest.raises(ValueError, match=r"factor is 0\.5: it must be at least 1"):
        RopeScaling(kind="linear", factor=0.5)
    with pytest.raises(ValueError, match="kind is 'ntk'"):
        RopeScaling(kind="ntk", factor=2.0)
    with pytest.raises(ValueError, match="must be above low_freq_factor"):
        RopeScaling(kind="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0)
    with pytest.raises(ValueError, match="original_length is 0: it must be at least 1"):
        RopeScaling(kind="yarn", factor=2.0, original_length=0)


def test_latent_attention_is_validated():
    with pytest.raises(ValueError, match="q_lora_rank is 0: it must be at least 1, or None"):
        LatentAttention(kv_lora_rank=4, q_lora_rank=0)
    with pytest.raises(ValueError, match=r"norm_eps is 0\.0: it must be positive"):
        LatentAttention(kv_lora_rank=4, norm_eps=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fp8"}, "backend is 'fp8'"),
        ({"scaling": "rowwise"}, "scaling of backend 'torch' is 'rowwise'"),
        ({"backend": "torch-fp8", "scaling": "mxfp8"}, "it must be one of 'tensorwise', 'rowwise'"),
        ({"backend": "torch-fp8", "scaling": "rowwise", "amax": "delayed"}, "remembers one number"),
        ({"backend": "torch-fp8", "history": 0}, "history is 0"),
        ({"num_layers_at_end_in_bf16": -1}, "num_layers_at_end_in_bf16 is -1"),
        ({"backend": "torch-fp8", "quantized_weights": True}, "only Transformer Engine"),
        ({"amax": "delayed"}, "amax='delayed' with backend='torch', which multiplies"),
        ({"num_layers_at_end_in_bf16": 1}, "num_layers_at_end_in_bf16=1 with backend='torch'"),
        ({"keep_transpose": True, "history": 4}, "history=4, keep_transpose=True with backend"),
        ({"backend": "torch-fp8", "history": 4}, "history=4, amax='current': only delayed"),
        ({"backend": "transformer_engine", "keep_transpose": True}, "only torch-fp8 is told here"),
    ],
)
def test_precisions_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Precision(**options)
