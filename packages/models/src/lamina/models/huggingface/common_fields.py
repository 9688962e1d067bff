"""Fields, layers and names that several types of transformers have in common."""

import math
from collections.abc import Sequence

from lamina.models.base.config import TransformerConfig
from lamina.models.huggingface.model_types import REQUIRED, Field

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


def first_layers(dense: Sequence[int]) -> int:
    """The number of dense layers, if these are the first."""
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense}: only the first layers may be dense here")
    return len(dense)
