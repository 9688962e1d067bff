"""Transformer building blocks: a config, the blocks it describes, and a language model of them."""

from lamina.models.attention import AttentionCore, LatentSelfAttention, SelfAttention
from lamina.models.block import TransformerBlock
from lamina.models.config import LatentAttention, RopeScaling, TransformerConfig
from lamina.models.context import AttentionContext
from lamina.models.embedding import Embedding, OutputHead
from lamina.models.gpt import GPTModel, generate, sample
from lamina.models.linear import Linear
from lamina.models.mlp import MLP, ActivationFunction
from lamina.models.norms import LayerNorm, RMSNorm
from lamina.models.patterns import (
    AttentionPattern,
    choose_pattern,
    document_positions,
    document_runs,
)
from lamina.models.rotary import apply_rotary, rotary_tables

__all__ = [
    "MLP",
    "ActivationFunction",
    "AttentionContext",
    "AttentionCore",
    "AttentionPattern",
    "Embedding",
    "GPTModel",
    "LatentAttention",
    "LatentSelfAttention",
    "LayerNorm",
    "Linear",
    "OutputHead",
    "RMSNorm",
    "RopeScaling",
    "SelfAttention",
    "TransformerBlock",
    "TransformerConfig",
    "apply_rotary",
    "choose_pattern",
    "document_positions",
    "document_runs",
    "generate",
    "rotary_tables",
    "sample",
]
