"""The types of transformers that are read by tables, beside those that `configs.py` reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from lamina.models.huggingface.common_fields import (
    AFTER,
    BIASES,
    FUSED_MLP,
    GPT_NAMES,
    LAYERNORM,
    NO_BIASES,
    NO_ROPE,
    ROOT_OF_WIDTH,
    SCALES,
    TIED,
    TURNED_IN_WINDOWS,
    WINDOW,
    WINDOWS,
    fused_by_head,
)
from lamina.models.huggingface.expert_types import EXPERT_TYPES
from lamina.models.huggingface.model_types import Field, ModelType

_TYPES = (
    # ------------------------------------------------------------- names alone
    ModelType(
        name="ministral",
        architecture="MinistralForCausalLM",
        fields={**NO_BIASES, **WINDOW},
        layers={"layer_types": WINDOWS},
    ),
    ModelType(
        name="phi3",
        architecture="Phi3ForCausalLM",
        fields={
            **NO_BIASES,
            "head_dim": None,
            "sliding_window": Field("sliding_window", None),
            "dropout": Field("resid_pdrop", 0.0),
            "embedding_dropout": Field("embd_pdrop", 0.0),
        },
        names={
            **FUSED_MLP,
            **dict.fromkeys([f"self_attn.{part}_proj" for part in "qkv"], "self_attn.qkv_proj"),
        },
    ),
    ModelType(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        constants=LAYERNORM,
        gated=False,
        fields={
            **TIED,
            "head_dim": None,
            "norm_eps": Field("norm_epsilon", 1e-5),
            "attention_bias": Field("use_bias", True),
            "mlp_bias": Field("use_bias", True),
            "sliding_window": Field("sliding_window", None),
            "dropout": Field("residual_dropout", 0.0),
            "embedding_dropout": Field("embedding_dropout", 0.0),
        },
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    ),
    ModelType(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        constants={"embedding_dropout": 0.0},
        fields={
            "attention_bias": Field("attention_bias", True),
            "attention_output_bias": Field("attention_out_bias", False),
            "dropout": Field("residual_dropout", 0.1),
        },
    ),
    ModelType(name="arcee", architecture="ArceeForCausalLM", gated=False),
    ModelType(
        name="jais2",
        architecture="Jais2ForCausalLM",
        constants=LAYERNORM,
        gated=False,
        fields={"norm_eps": Field("layer_norm_eps", 1e-5)},
    ),
    *(
        ModelType(name=name, architecture="LlamaForCausalLM")
        for name in ("internlm3", "iquestcoder")
    ),
    ModelType(
        name="youtu",
        architecture="YoutuForCausalLM",
        latent=True,
        fields={**TIED, "mlp_bias": None},
        ignored=("embedding_initializer_range", "qk_head_dim", "head_dim"),
    ),
    # ------------------------------------------------------------- RoPE of neighbours, or of a part
    ModelType(
        name="helium",
        architecture="HeliumForCausalLM",
        interleaved=True,
        constants={"attention_output_bias": False},
    ),
    ModelType(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        interleaved=True,
        fields={
            **TIED,
            "attention_bias": Field("use_bias", False),
            "mlp_bias": Field("use_bias", False),
            "attention_dropout": None,
        },
    ),
    ModelType(
        name="glm",
        architecture="GlmForCausalLM",
        interleaved=True,
        constants={"attention_output_bias": False},
        fields={"mlp_bias": None},
        names=FUSED_MLP,
    ),
    ModelType(
        name="glm4",
        architecture="Glm4ForCausalLM",
        interleaved=True,
        constants={"attention_output_bias": False, "post_norm": True},
        fields={"mlp_bias": None},
        names={
            **FUSED_MLP,
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    ModelType(
        name="stablelm",
        architecture="StableLmForCausalLM",
        constants={**LAYERNORM, "attention_output_bias": False, "embedding_dropout": 0.0},
        fields={
            "head_dim": None,
            "mlp_bias": None,
            "norm_eps": Field("layer_norm_eps", 1e-5),
            "attention_bias": Field("use_qkv_bias", False),
            "dropout": Field("hidden_dropout", 0.0),
        },
        refused={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    ModelType(
        name="nemotron",
        architecture="NemotronForCausalLM",
        constants={"norm": "layernorm_zero"},
        gated=False,
        fields={"norm_eps": Field("norm_eps", 1e-5)},
    ),
    # ------------------------------------------------------------- multipliers
    ModelType(
        name="granite",
        architecture="GraniteForCausalLM",
        fields={**SCALES, "head_dim": None},
    ),
    ModelType(
        name="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        constants={"post_norm": True},
        # Granite divides by `logits_scaling`, and this type multiplies.
        fields={**SCALES, "logit_scale": Field("logits_scaling", 1.0, float)},
        refused={"use_post_norm": True},
        names={
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        },
    ),
    ModelType(
        name="gemma",
        architecture="GemmaForCausalLM",
        constants={"norm": "rmsnorm_zero"},
        fields={**TIED, "mlp_bias": None, "embedding_scale": ROOT_OF_WIDTH},
        refused={"use_bidirectional_attention": None},
    ),
    ModelType(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        constants={"norm": "rmsnorm_zero", "post_norm": True, "qk_norm": True},
        fields={
            **TIED,
            **WINDOW,
            "mlp_bias": None,
            "activation": Field("hidden_activation"),
            "embedding_scale": ROOT_OF_WIDTH,
            "attention_scale": Field(
                "query_pre_attn_scalar", 256, lambda x: x**-0.5, lambda x: round(x**-2)
            ),
        },
        layers={"layer_types": WINDOWS},
        nested_rope=True,
        refused={
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        ignored=("sliding_window_pattern", "_sliding_window_pattern"),
    ),
    # ------------------------------------------------------------- attention and MLP side by side
    ModelType(
        name="cohere",
        architecture="CohereForCausalLM",
        interleaved=True,
        constants={"norm": "layernorm_unbiased", "parallel_mlp": "one_norm"},
        fields={
            **TIED,
            "head_dim": None,
            "mlp_bias": None,
            "norm_eps": Field("layer_norm_eps", 1e-5),
            "logit_scale": Field("logit_scale", 0.0625),
        },
        refused={"use_qk_norm": False},
    ),
    ModelType(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        interleaved=True,
        constants={"norm": "layernorm_unbiased", "parallel_mlp": "one_norm"},
        fields={
            **TIED,
            **WINDOW,
            "mlp_bias": None,
            "norm_eps": Field("layer_norm_eps", 1e-5),
            "logit_scale": Field("logit_scale", 0.0625),
        },
        layers={"layer_types": TURNED_IN_WINDOWS},
    ),
    ModelType(
        name="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        gated=False,
        constants={**LAYERNORM, "mlp_bias": True},
        fields={
            "num_kv_heads": None,
            "head_dim": None,
            "mlp_bias": None,
            "norm_eps": Field("layer_norm_eps", 1e-5),
            "attention_bias": Field("attention_bias", True),
            "dropout": Field("hidden_dropout", 0.0),
            "parallel_mlp": Field(
                "use_parallel_residual",
                True,
                lambda parallel: "two_norms" if parallel else None,
                lambda parallel: parallel is not None,
            ),
        },
        names={
            **GPT_NAMES,
            **dict.fromkeys(
                [f"self_attn.{part}_proj" for part in "qkv"], "attention.query_key_value"
            ),
            "self_attn.o_proj": "attention.dense",
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.layers": "gpt_neox.layers",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
        memory={"lm_head": "lm_head"},
        fused={"attention.qkv": fused_by_head},
    ),
    ModelType(
        name="falcon",
        architecture="FalconForCausalLM",
        gated=False,
        constants={
            **LAYERNORM,
            "num_kv_heads": 1,
            "parallel_mlp": "one_norm",
            "embedding_dropout": 0.0,
        },
        fields={
            **TIED,
            "num_kv_heads": None,
            "head_dim": None,
            "norm_eps": Field("layer_norm_epsilon", 1e-5),
            "ffn_size": Field("ffn_hidden_size"),
            "attention_bias": Field("bias", False),
            "mlp_bias": Field("bias", False),
            "activation": Field("activation", "gelu"),
            "dropout": Field("hidden_dropout", 0.0),
            "max_sequence_length": Field("max_position_embeddings", 2048),
        },
        refused={
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": False,
            "num_ln_in_parallel_attn": None,
        },
        names={
            **GPT_NAMES,
            **dict.fromkeys(
                [f"self_attn.{part}_proj" for part in "qkv"], "self_attention.query_key_value"
            ),
            "self_attn.o_proj": "self_attention.dense",
            "model.embed_tokens": "transformer.word_embeddings",
            "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f",
        },
        ignored=("num_kv_heads",),
    ),
    ModelType(
        name="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        gated=False,
        rope=False,
        constants={**LAYERNORM, **BIASES, "num_kv_heads": 1, "positions": "learned"},
        fields={
            **TIED,
            **NO_BIASES,
            "num_kv_heads": None,
            "head_dim": None,
            "hidden_size": Field("n_embd"),
            "num_layers": Field("n_layer"),
            "num_heads": Field("n_head"),
            "ffn_size": Field("n_inner", None),
            "max_sequence_length": Field("n_positions"),
            "norm_eps": Field("layer_norm_epsilon", 1e-5),
            "activation": Field("activation_function"),
            "dropout": Field("resid_pdrop", 0.1),
            "embedding_dropout": Field("embd_pdrop", 0.1),
            "attention_dropout": Field("attn_pdrop", 0.1),
        },
        refused={"multi_query": True, "scale_attn_weights": True},
        names={
            **dict.fromkeys([f"self_attn.{part}_proj" for part in "qkv"], "attn.c_attn"),
            "self_attn.o_proj": "attn.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.layers": "transformer.h",
            "model.norm": "transformer.ln_f",
        },
        ignored=(
            "num_key_value_heads",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        ),
    ),
    # ------------------------------------------------------------- norms of results, of all heads
    ModelType(
        name="olmo",
        architecture="OlmoForCausalLM",
        constants={"norm": "layernorm_plain", "norm_eps": 1e-5},
        fields={"head_dim": None, "norm_eps": None, "mlp_bias": None},
        refused={"clip_qkv": None},
    ),
    ModelType(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        constants={**AFTER, "qk_norm": "whole"},
        fields={"head_dim": None, "mlp_bias": None},
    ),
    ModelType(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        constants={**AFTER, "qk_norm": "whole"},
        fields={**WINDOW, "head_dim": None, "mlp_bias": None},
        layers={"layer_types": WINDOWS},
        nested_rope=True,
    ),
    ModelType(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        constants={**AFTER, "qk_norm": True},
        fields={**NO_BIASES, **WINDOW, "head_dim": None},
        layers={"layer_types": TURNED_IN_WINDOWS},
        ignored=("sliding_window_pattern",),
    ),
    # ------------------------------------------------------------- windows and positions by layer
    ModelType(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        fields={**TIED, "head_dim": None, "sliding_window": Field("sliding_window", None)},
        layers={"layer_types": WINDOWS, "no_rope_layers": {1: {}, 0: NO_ROPE}},
        ignored=("no_rope_layer_interval", "use_sliding_window", "max_window_layers"),
    ),
    ModelType(
        name="cwm",
        architecture="CwmForCausalLM",
        fields={**NO_BIASES, **WINDOW},
        layers={"layer_types": WINDOWS},
        refused={"mlp_bias": False},
        ignored=("pretraining_tp",),
    ),
)
KNOWN: dict[str, ModelType] = {each.name: each for each in (*_TYPES, *EXPERT_TYPES)}


def type_of(name: Any, types: Sequence[ModelType] = ()) -> ModelType | None:
    """The type of this name, of those given and those known; None if there is none."""
    mine: Mapping[str, ModelType] = {each.name: each for each in types}
    return mine.get(name) or KNOWN.get(name)
