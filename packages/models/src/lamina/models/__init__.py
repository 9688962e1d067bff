"""Transformer building blocks: a config, the blocks it describes, and a language model of them."""

from lamina.models.attention import SelfAttention
from lamina.models.block import TransformerBlock
from lamina.models.config import TransformerConfig
from lamina.models.embedding import Embedding, OutputHead
from lamina.models.gpt import GPTModel, generate, sample
from lamina.models.linear import Linear
from lamina.models.masking import AttentionContext, document_positions
from lamina.models.mlp import MLP
from lamina.models.norms import LayerNorm, RMSNorm
from lamina.models.rotary import apply_rotary, rotary_tables

__all__ = [
    "MLP",
    "AttentionContext",
    "Embedding",
    "GPTModel",
    "LayerNorm",
    "Linear",
    "OutputHead",
    "RMSNorm",
    "SelfAttention",
    "TransformerBlock",
    "TransformerConfig",
    "apply_rotary",
    "document_positions",
    "generate",
    "rotary_tables",
    "sample",
]
