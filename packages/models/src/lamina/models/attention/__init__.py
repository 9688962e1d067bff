"""Attention: patterns, rotary positions, context parallelism."""

from lamina.models.attention.attention import (
    Attention,
    AttentionCore,
    MultiHeadAttention,
    SelfAttention,
    output_projection,
)
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.gated_attention import GatedAttention
from lamina.models.attention.kernels import (
    AttentionPattern,
    choose_pattern,
    document_positions,
    document_runs,
)
from lamina.models.attention.latent_attention import LatentAttention, LatentSelfAttention
from lamina.models.attention.rotary import apply_rotary, rotary_tables
from lamina.models.attention.sparse_attention import (
    SparseLatentAttention,
    SparseLatentSelfAttention,
)
from lamina.models.base.config import AttentionVariant
from lamina.models.base.configs.elements import HeadWidths
from lamina.models.base.configs.rope import RopeScaling
from lamina.models.layers.zigzag import cut_sequence, join_sequence

__all__ = [
    "Attention",
    "AttentionContext",
    "AttentionCore",
    "AttentionPattern",
    "AttentionVariant",
    "GatedAttention",
    "HeadWidths",
    "LatentAttention",
    "LatentSelfAttention",
    "MultiHeadAttention",
    "RopeScaling",
    "SelfAttention",
    "SparseLatentAttention",
    "SparseLatentSelfAttention",
    "apply_rotary",
    "choose_pattern",
    "cut_sequence",
    "document_positions",
    "document_runs",
    "join_sequence",
    "output_projection",
    "rotary_tables",
]
