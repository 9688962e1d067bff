"""Transformer building blocks: a config, the blocks it describes, and a language model of them."""

from typing import TYPE_CHECKING, Any

from lamina.models.attention import AttentionCore, SelfAttention
from lamina.models.block import TransformerBlock
from lamina.models.config import LatentAttention, RopeScaling, TransformerConfig
from lamina.models.context import AttentionContext
from lamina.models.cost import matrix_parameters, training_flops_per_token
from lamina.models.cutting import cut_weight, join_weight
from lamina.models.dropout import Dropout
from lamina.models.embedding import OutputHead, PositionEmbedding, VocabParallelEmbedding
from lamina.models.generation import generate, sample
from lamina.models.gpt import GPTModel
from lamina.models.huggingface import from_huggingface, to_huggingface
from lamina.models.huggingface_configs import config_from_huggingface, huggingface_config
from lamina.models.latent_attention import LatentSelfAttention
from lamina.models.layer_pattern import (
    AttentionBlock,
    ExpertBlock,
    MambaBlock,
    MLPBlock,
    ResidualBlock,
    make_block,
)
from lamina.models.linear import ColumnParallelLinear, Linear, RowParallelLinear
from lamina.models.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from lamina.models.mamba.block import MambaMixer, MambaState
from lamina.models.mamba.config import MambaConfig
from lamina.models.mamba.scan import chunked_scan, scan_step
from lamina.models.mlp import MLP, ActivationFunction
from lamina.models.moe.axes import ExpertAxes
from lamina.models.moe.config import MoEConfig
from lamina.models.moe.dispatcher import Dispatch, ExpertRows, TokenDispatcher
from lamina.models.moe.experts import GroupedExperts
from lamina.models.moe.layer import MoELayer
from lamina.models.moe.losses import AuxiliaryScale, RoutingContext
from lamina.models.moe.router import TopKRouter
from lamina.models.moe.routing import Routing
from lamina.models.moe.statistics import LayerRouting, routing_statistics
from lamina.models.norms import LayerNorm, RMSNorm
from lamina.models.patterns import (
    AttentionPattern,
    choose_pattern,
    document_positions,
    document_runs,
)
from lamina.models.pipelining.build import pipeline
from lamina.models.pipelining.cuts import cut_layers
from lamina.models.pipelining.module import GPTStage
from lamina.models.pipelining.runner import PipelineRunner
from lamina.models.precision.backends import apply_precision, float8_weights
from lamina.models.precision.fp8_codec import Float8Codec
from lamina.models.precision.settings import Precision
from lamina.models.precision.transformer_engine import PrecisionUnavailableError
from lamina.models.presets import preset, preset_names
from lamina.models.recompute import RecomputePolicy, apply_recompute
from lamina.models.rotary import apply_rotary, rotary_tables
from lamina.models.vision.language import VisionLanguageModel
from lamina.models.vision.patches import Patches, VisionConfig, cut_patches
from lamina.models.vision.splice import Splice, image_places
from lamina.models.vision.transformer import Projector, VisionTransformer, WithinImages
from lamina.models.weight_maps import WeightLink, weight_map
from lamina.models.zigzag import cut_sequence, join_sequence

if TYPE_CHECKING:
    from lamina.models.torch_plan import CutOverRanks, tensor_parallel_plan
else:

    def __getattr__(name: str) -> Any:
        """At its first use, for torch.distributed.tensor takes longer to import than the rest."""
        if name not in ("CutOverRanks", "tensor_parallel_plan"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lamina.models import torch_plan

        return getattr(torch_plan, name)


__all__ = [
    "MLP",
    "ActivationFunction",
    "AttentionBlock",
    "AttentionContext",
    "AttentionCore",
    "AttentionPattern",
    "AuxiliaryScale",
    "ColumnParallelLinear",
    "CutOverRanks",
    "Dispatch",
    "Dropout",
    "ExpertAxes",
    "ExpertBlock",
    "ExpertRows",
    "Float8Codec",
    "GPTModel",
    "GPTStage",
    "GroupedExperts",
    "LatentAttention",
    "LatentSelfAttention",
    "LayerNorm",
    "LayerRouting",
    "Linear",
    "MLPBlock",
    "MambaBlock",
    "MambaConfig",
    "MambaMixer",
    "MambaState",
    "MoEConfig",
    "MoELayer",
    "OutputHead",
    "Patches",
    "PipelineRunner",
    "PositionEmbedding",
    "Precision",
    "PrecisionUnavailableError",
    "Projector",
    "RMSNorm",
    "RecomputePolicy",
    "ResidualBlock",
    "RopeScaling",
    "Routing",
    "RoutingContext",
    "RowParallelLinear",
    "SelfAttention",
    "Splice",
    "TokenDispatcher",
    "TopKRouter",
    "TransformerBlock",
    "TransformerConfig",
    "VisionConfig",
    "VisionLanguageModel",
    "VisionTransformer",
    "VocabParallelEmbedding",
    "WeightLink",
    "WithinImages",
    "apply_precision",
    "apply_recompute",
    "apply_rotary",
    "choose_pattern",
    "chunked_scan",
    "config_from_huggingface",
    "cut_layers",
    "cut_patches",
    "cut_sequence",
    "cut_weight",
    "document_positions",
    "document_runs",
    "float8_weights",
    "from_huggingface",
    "generate",
    "huggingface_config",
    "image_places",
    "join_sequence",
    "join_weight",
    "linear_cross_entropy",
    "make_block",
    "matrix_parameters",
    "pipeline",
    "preset",
    "preset_names",
    "rotary_tables",
    "routing_statistics",
    "sample",
    "scan_step",
    "tensor_parallel_plan",
    "to_huggingface",
    "training_flops_per_token",
    "vocab_parallel_cross_entropy",
    "weight_map",
]
