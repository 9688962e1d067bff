"""Vision: patches, the encoder, the projector, the vision-language model."""

from lamina.models.decoder.splice import Splice, image_positions
from lamina.models.vision.language import VisionLanguageModel
from lamina.models.vision.transformer import (
    Patches,
    Projector,
    VisionConfig,
    VisionTransformer,
    WithinImages,
    cut_patches,
)

__all__ = [
    "Patches",
    "Projector",
    "Splice",
    "VisionConfig",
    "VisionLanguageModel",
    "VisionTransformer",
    "WithinImages",
    "cut_patches",
    "image_positions",
]
