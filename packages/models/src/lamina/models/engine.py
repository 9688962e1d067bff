"""What other layers and tools build on: stages, weight maps and the pieces of blocks."""

from lamina.models.base.mesh_axes import cut_weight, join_weight
from lamina.models.decoder.generation import sample
from lamina.models.huggingface.sources import (
    BLOCK,
    FP4_VALUES,
    belong_together,
    coded_weights,
    dequantised,
    spread,
)
from lamina.models.layers.embedding import OutputHead, PositionEmbedding
from lamina.models.layers.linear import Linear
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.pipelining.cuts import cut_layers
from lamina.models.pipelining.module import GPTStage

__all__ = [
    "BLOCK",
    "FP4_VALUES",
    "ActivationFunction",
    "GPTStage",
    "Linear",
    "OutputHead",
    "PositionEmbedding",
    "belong_together",
    "coded_weights",
    "cut_layers",
    "cut_weight",
    "dequantised",
    "join_weight",
    "sample",
    "spread",
]
