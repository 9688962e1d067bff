"""The types of transformers that are read by tables, beside those that `configs.py` reads."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lamina.models.base.config import TransformerConfig
from lamina.models.huggingface.model_types import REQUIRED, Field, ModelType

NO_ROPE = {"positions": "none", "rope_theta": 10_000.0, "rope_scaling": None,
           "rotary_fraction": 1.0}  # fmt: skip
WINDOWS = {"sliding_attention": {}, "full_attention": {"sliding_window": None}}
"""Layers that see a window, and layers that see everything."""
TURNED_IN_WINDOWS = {"sliding_attention": {}, "full_attention": {"sliding_window": None, **NO_ROPE}}
WHERE_EXPERTS = {"dense": {"moe": None}, "sparse": {}}
WINDOW = {"sliding_window": Field("sliding_window")}
NO_BIASES: dict[str, Field | None] = {"attention_bias": None, "mlp_bias": None}
LAYERNORM = {"norm": "layernorm"}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_embeddings": Field("tie_word_embeddings", True)}
FUSED_MLP = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}
SCALES: dict[str, Field] = {
    "embedding_scale": Field("embedding_multiplier", 1.0, float),
    "residual_scale": Field("residual_multiplier", 1.0, float),
    "logit_scale": Field("logits_scaling", 1.0, lambda x: 1.0 / x, lambda x: 1.0 / x),
    "attention_scale": Field("attention_multiplier", 1.0, float),
}
"""The multipliers of Granite."""
SIGMOID = {"scores": "sigmoid", "bias_rate": 0.0}
SIGMOID_GROUPS = {**SIGMOID, "group_best": 2}
NO_GROUPS: dict[str, Field | None] = {"num_groups": None, "groups_kept": None}
ONE_KIND: dict[str, Field | None] = {**NO_GROUPS, "shared_ffn_size": None, "first_dense": None,
                                     "weight_scale": None}  # fmt: skip
ROOT_OF_WIDTH = Field("hidden_size", REQUIRED, math.sqrt, lambda scale: round(scale * scale))
GRANITE_EXPERTS = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
GRANITE_IN_MEMORY = {
    "mlp.gate": "block_sparse_moe.router",
    "mlp.experts.gate_up_proj": "block_sparse_moe.experts.gate_up_proj",
    "mlp.experts.down_proj": "block_sparse_moe.experts.down_proj",
}
AFTER = {"pre_norm": False, "post_norm": True}
GPT_NAMES = {
    "mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def fused_by_head(config: TransformerConfig) -> list[int]:
    """Rows that stand as query, key and value of the first head, then of the next."""
    width, heads = config.head_width, config.num_heads
    return [(h * 3 + kind) * width + i
            for kind in range(3) for h in range(heads) for i in range(width)]  # fmt: skip


def _first_layers(dense: Sequence[int]) -> int:
    """The number of dense layers, if these are the first."""
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense}: only the first layers may be dense here")
    return len(dense)


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
    ModelType(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        latent=True,
        experts={**NO_GROUPS, "normalize_weights": None},
        expert_constants={"normalize_weights": False},
        refused={"topk_method": "greedy"},
        # Its greedy router knows neither groups nor a sum of the weights, whatever its config says.
        ignored=("qk_head_dim", "head_dim", "n_group", "topk_group", "norm_topk_prob"),
    ),
    ModelType(
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        latent=True,
        fields={"mlp_bias": None},
        experts={"first_dense": None},
        expert_constants=SIGMOID_GROUPS,
        layers={"mlp_layer_types": WHERE_EXPERTS},
        ignored=("qk_head_dim", "head_dim"),
    ),
    ModelType(
        name="hy_v3",
        architecture="HYV3ForCausalLM",
        constants={"qk_norm": True},
        experts={
            **NO_GROUPS,
            "num_experts": Field("num_experts"),
            "shared_ffn_size": Field("num_shared_experts", 1),
            "weight_scale": Field("router_scaling_factor", 1.0),
            "normalize_weights": None,
            "first_dense": None,
        },
        expert_constants=SIGMOID,
        layers={"mlp_layer_types": WHERE_EXPERTS},
        names={
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.gate": "mlp.router.gate",
            "mlp.shared_experts": "mlp.shared_mlp",
        },
        memory={
            "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
            "mlp.gate": "mlp.gate",
            "mlp.shared_experts": "mlp.shared_experts",
        },
        ignored=("enable_moe_fp32_combine",),
    ),
    ModelType(
        name="dots1",
        architecture="Dots1ForCausalLM",
        constants={"qk_norm": True},
        fields={**WINDOW, "mlp_bias": None},
        experts={},
        expert_constants=SIGMOID_GROUPS,
        layers={"layer_types": WINDOWS},
        ignored=("max_window_layers",),
    ),
    ModelType(
        name="solar_open",
        architecture="SolarOpenForCausalLM",
        constants={"attention_output_bias": False},
        fields={"ffn_size": None, "mlp_bias": None},
        experts={"first_dense": None},
        expert_constants=SIGMOID_GROUPS,
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
    ModelType(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        constants={"attention_output_bias": False},
        fields={
            "head_dim": Field("head_dim", None),
            "mlp_bias": None,
            "qk_norm": Field("use_qk_norm", False),
        },
        experts={},
        expert_constants=SIGMOID_GROUPS,
    ),
    # ------------------------------------------------------------- multipliers
    ModelType(
        name="granite",
        architecture="GraniteForCausalLM",
        fields={**SCALES, "head_dim": None},
    ),
    ModelType(
        name="granitemoe",
        architecture="GraniteMoeForCausalLM",
        fields={**SCALES, "head_dim": None, "mlp_bias": None},
        experts={
            **ONE_KIND,
            "num_experts": Field("num_local_experts"),
            "ffn_size": None,
            "normalize_weights": None,
        },
        stacked_experts=True,
        names=GRANITE_EXPERTS,
        memory=GRANITE_IN_MEMORY,
    ),
    ModelType(
        name="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        fields={**SCALES, "head_dim": None, "mlp_bias": None},
        experts={
            **ONE_KIND,
            "num_experts": Field("num_local_experts"),
            "shared_ffn_size": Field("shared_intermediate_size", 0),
            "ffn_size": None,
            "normalize_weights": None,
        },
        stacked_experts=True,
        names={
            **GRANITE_EXPERTS,
            "mlp.shared_experts.gate_proj": "shared_mlp.input_linear",
            "mlp.shared_experts.up_proj": "shared_mlp.input_linear",
            "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        },
        memory=GRANITE_IN_MEMORY,
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
    ModelType(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        constants={"attention_output_bias": False},
        fields={
            "head_dim": None,
            "mlp_bias": None,
            "attention_bias": Field("qkv_bias", True),
            "sliding_window": Field("sliding_window", None, lambda window: window or None),
        },
        experts={
            **ONE_KIND,
            "num_experts": Field("num_experts"),
            "shared_ffn_size": Field("shared_expert_intermediate_size"),
            "normalize_weights": Field("norm_topk_prob", False),
            "every": Field("decoder_sparse_step", 1),
            "first_dense": Field("mlp_only_layers", (), _first_layers, lambda n: list(range(n))),
        },
        expert_constants={"shared_gate": True},
        layers={"layer_types": WINDOWS},
        names={"mlp.shared_experts": "mlp.shared_expert"},
        ignored=("use_sliding_window", "max_window_layers"),
    ),
    # ------------------------------------------------------------- stacks of several kinds
    ModelType(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        gated=False,
        rope=False,
        constants={"positions": "none"},
        fields={
            "num_layers": Field("layers_block_type", REQUIRED, len),
            "norm_eps": Field("layer_norm_epsilon", 1e-5),
            "activation": Field("mlp_hidden_act", "relu2"),
            "sliding_window": Field("sliding_window", None),
            "dropout": Field("hidden_dropout", 0.0),
        },
        experts={
            "shared_ffn_size": Field("moe_shared_expert_intermediate_size", 0),
            "first_dense": None,
        },
        expert_constants=SIGMOID_GROUPS,
        mamba={
            "state_size": Field("ssm_state_size"),
            "head_dim": Field("mamba_head_dim"),
            "num_heads": Field("mamba_num_heads"),
            "groups": Field("n_groups"),
            "conv_kernel": Field("conv_kernel", 4),
            "conv_bias": Field("use_conv_bias", True),
            "bias": Field("mamba_proj_bias", False),
            "chunk_size": Field("chunk_size", 128),
            "dt_min": Field("time_step_min", 0.001),
            "dt_limit": Field(
                "time_step_min", 0.001, lambda least: (least, math.inf), lambda limit: limit[0]
            ),
            "dt_max": Field("time_step_max", 0.1),
        },
        layers={
            "layers_block_type": {
                "linear_attention": {"letter": "M"},
                "full_attention": {"letter": "*"},
                "mlp": {"letter": "-"},
                "moe": {"letter": "E"},
            }
        },
        refused={"moe_latent_size": None, "use_bias": False, "mamba_hidden_act": "silu"},
        names={
            "model.embed_tokens": "backbone.embeddings",
            "model.layers": "backbone.layers",
            "model.norm": "backbone.norm_f",
        },
        memory={
            "model.embed_tokens": "model.embeddings",
            "model.layers": "model.layers",
            "model.norm": "model.norm_f",
        },
        ignored=(
            *("num_logits_to_keep", "use_mamba_kernels", "expand", "time_step_limit"),
            *("n_shared_experts", "mtp_layers_block_type", "moe_shared_expert_overlap"),
            *("mamba_ssm_cache_dtype", "hybrid_override_pattern"),
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
        name="olmoe",
        architecture="OlmoeForCausalLM",
        constants={"qk_norm": "whole"},
        fields={"head_dim": None, "mlp_bias": None},
        experts={
            **ONE_KIND,
            "num_experts": Field("num_experts"),
            "ffn_size": None,
            "normalize_weights": Field("norm_topk_prob", False),
        },
        refused={"clip_qkv": None},
    ),
    ModelType(
        name="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        constants={**AFTER, "qk_norm": "whole"},
        fields={"head_dim": None, "mlp_bias": None},
        experts={
            **ONE_KIND,
            "num_experts": Field("num_experts"),
            "ffn_size": None,
            "normalize_weights": Field("norm_topk_prob", False),
        },
    ),
    ModelType(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        constants={**AFTER, "qk_norm": True},
        fields={**NO_BIASES, **WINDOW, "head_dim": None},
        layers={"layer_types": TURNED_IN_WINDOWS},
        ignored=("sliding_window_pattern",),
    ),
    ModelType(
        name="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        constants={"qk_norm": True},
        fields={**NO_BIASES, **WINDOW, "head_dim": None},
        experts={
            "num_experts": Field("num_experts"),
            "first_dense": None,
            "shared_ffn_size": Field("num_shared_experts", 1),
        },
        expert_constants=SIGMOID_GROUPS,
        layers={"layer_types": TURNED_IN_WINDOWS, "mlp_layer_types": WHERE_EXPERTS},
        names={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
        memory={"mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
        ignored=("sliding_window_pattern", "first_k_dense_replace"),
    ),
    ModelType(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        constants={"qk_norm": "whole"},
        fields=NO_BIASES,
        experts={
            **ONE_KIND,
            "num_experts": Field("num_local_experts"),
            "ffn_size": None,
            "normalize_weights": None,
            "jitter": Field("router_jitter_noise", 0.0),
        },
        expert_constants=SIGMOID,
        names={
            "mlp": "block_sparse_moe",
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
        memory={
            "mlp": "mlp",
            "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
        },
        expert_names=("w1", "w3", "w2"),
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
    ModelType(
        name="mellum",
        architecture="MellumForCausalLM",
        constants={"qk_norm": True},
        fields={"sliding_window": Field("sliding_window", None), "mlp_bias": None},
        experts={**ONE_KIND, "num_experts": Field("num_local_experts")},
        layers={"layer_types": WINDOWS, "mlp_layer_types": WHERE_EXPERTS},
        nested_rope=True,
        ignored=("mtp_layer_types", "mtp_mlp_layer_types"),
    ),
)
KNOWN: dict[str, ModelType] = {each.name: each for each in _TYPES}


def type_of(name: Any, types: Sequence[ModelType] = ()) -> ModelType | None:
    """The type of this name, of those given and those known; None if there is none."""
    mine: Mapping[str, ModelType] = {each.name: each for each in types}
    return mine.get(name) or KNOWN.get(name)
