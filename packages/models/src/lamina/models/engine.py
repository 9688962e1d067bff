"""What other layers and tools build on: stages, weight maps and the pieces of blocks."""

from lamina.models.base.mesh_axes import cut_weight, join_weight
from lamina.models.decoder.generation import sample
from lamina.models.layers.embedding import OutputHead, PositionEmbedding
from lamina.models.layers.linear import Linear
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.pipelining.cuts import cut_layers
from lamina.models.pipelining.module import GPTStage

__all__ = [
    "ActivationFunction",
    "GPTStage",
    "Linear",
    "OutputHead",
    "PositionEmbedding",
    "cut_layers",
    "cut_weight",
    "join_weight",
    "sample",
]
