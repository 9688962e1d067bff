"""Transformer building blocks: a config, the blocks it describes, and a language model of them."""

from typing import TYPE_CHECKING, Any

from lamina.models.activation_memory.recompute import RecomputePolicy, apply_recompute
from lamina.models.attention.attention import SelfAttention
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.latent_attention import LatentAttention
from lamina.models.base.config import (
    AttentionVariant,
    LayerKind,
    LayerPart,
    LayerSpec,
    TransformerConfig,
)
from lamina.models.base.configs.elements import Activation, AttentionScores, NormPart
from lamina.models.base.configs.hyper_connections import HyperConnections
from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.configs.multi_token import MultiTokenPrediction
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.configs.rope import RopeScaling
from lamina.models.decoder.cost import matrix_parameters, training_flops_per_token
from lamina.models.decoder.generation import generate
from lamina.models.decoder.gpt import GPTModel
from lamina.models.decoder.layer_stack import (
    AttentionBlock,
    ExpertBlock,
    MambaBlock,
    MLPBlock,
    ResidualBlock,
    TransformerBlock,
    make_block,
)
from lamina.models.decoder.precision_backends import apply_precision, float8_weights
from lamina.models.decoder.presets import preset, preset_names
from lamina.models.decoder.transformer_engine import PrecisionUnavailableError
from lamina.models.huggingface.configs import config_from_huggingface, huggingface_config
from lamina.models.huggingface.conversion import from_huggingface, to_huggingface
from lamina.models.huggingface.weight_maps import WeightLink, weight_map
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.embedding import VocabParallelEmbedding
from lamina.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lamina.models.layers.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from lamina.models.layers.mlp import MLP
from lamina.models.layers.norms import LayerNorm, RMSNorm
from lamina.models.moe.dispatcher import TokenDispatcher
from lamina.models.moe.experts import GroupedExperts
from lamina.models.moe.layer import MoELayer
from lamina.models.moe.losses import RoutingContext
from lamina.models.moe.router import TopKRouter, routing_statistics
from lamina.models.pipelining.pipeline import pipeline
from lamina.models.pipelining.runner import PipelineRunner
from lamina.models.precision.fp8 import Float8Codec
from lamina.models.vision.huggingface_types import (
    vision_language_config,
    vision_language_from_huggingface,
    vision_language_to_huggingface,
)
from lamina.models.vision.language import VisionLanguageModel
from lamina.models.vision.transformer import VisionConfig

if TYPE_CHECKING:
    from lamina.models.torch_plan import tensor_parallel_plan
else:

    def __getattr__(name: str) -> Any:
        """At its first use, for torch.distributed.tensor takes longer to import than the rest."""
        if name != "tensor_parallel_plan":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lamina.models.torch_plan import tensor_parallel_plan

        return tensor_parallel_plan


__all__ = [
    "MLP",
    "Activation",
    "AttentionBlock",
    "AttentionContext",
    "AttentionScores",
    "AttentionVariant",
    "ColumnParallelLinear",
    "Dropout",
    "ExpertBlock",
    "Float8Codec",
    "GPTModel",
    "GroupedExperts",
    "HyperConnections",
    "LatentAttention",
    "LayerKind",
    "LayerNorm",
    "LayerPart",
    "LayerSpec",
    "MLPBlock",
    "MambaBlock",
    "MambaConfig",
    "MoEConfig",
    "MoELayer",
    "MultiTokenPrediction",
    "NormPart",
    "PipelineRunner",
    "Precision",
    "PrecisionUnavailableError",
    "RMSNorm",
    "RecomputePolicy",
    "ResidualBlock",
    "RopeScaling",
    "RoutingContext",
    "RowParallelLinear",
    "SelfAttention",
    "TokenDispatcher",
    "TopKRouter",
    "TransformerBlock",
    "TransformerConfig",
    "VisionConfig",
    "VisionLanguageModel",
    "VocabParallelEmbedding",
    "WeightLink",
    "apply_precision",
    "apply_recompute",
    "config_from_huggingface",
    "float8_weights",
    "from_huggingface",
    "generate",
    "huggingface_config",
    "linear_cross_entropy",
    "make_block",
    "matrix_parameters",
    "pipeline",
    "preset",
    "preset_names",
    "routing_statistics",
    "tensor_parallel_plan",
    "to_huggingface",
    "training_flops_per_token",
    "vision_language_config",
    "vision_language_from_huggingface",
    "vision_language_to_huggingface",
    "vocab_parallel_cross_entropy",
    "weight_map",
]
