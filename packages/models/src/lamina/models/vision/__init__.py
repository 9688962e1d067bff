"""Vision: patches, the encoder, the projector, the vision-language model."""

from lamina.models.decoder.splice import Splice, image_positions
from lamina.models.vision.language import VisionLanguageModel
from lamina.models.vision.patches import Patches, VisionConfig, cut_patches
from lamina.models.vision.transformer import Projector, VisionTransformer, WithinImages

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
