"""Attention: patterns, rotary positions, context parallelism."""

from lamina.models.attention.attention import AttentionCore, SelfAttention
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.kernels import (
    AttentionPattern,
    choose_pattern,
    document_positions,
    document_runs,
)
from lamina.models.attention.latent_attention import LatentSelfAttention
from lamina.models.attention.rotary import apply_rotary, rotary_tables
from lamina.models.base.config import LatentAttention, RopeScaling
from lamina.models.layers.zigzag import cut_sequence, join_sequence

__all__ = [
    "AttentionContext",
    "AttentionCore",
    "AttentionPattern",
    "LatentAttention",
    "LatentSelfAttention",
    "RopeScaling",
    "SelfAttention",
    "apply_rotary",
    "choose_pattern",
    "cut_sequence",
    "document_positions",
    "document_runs",
    "join_sequence",
    "rotary_tables",
]
