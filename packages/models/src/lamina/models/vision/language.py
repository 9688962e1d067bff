"""A language model that reads images: encoder, projector, decoder."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from lamina.mesh import derive_seed
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import TokenCache
from lamina.models.base.config import TransformerConfig
from lamina.models.base.initialise import assign_seeds, draw_seed
from lamina.models.base.kept_roles import KeepsRoles
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.decoder.gpt import GPTModel
from lamina.models.decoder.splice import Splice, image_positions
from lamina.models.vision.transformer import Images, Projector, VisionConfig, VisionTransformer

LayerPart = Literal["vision", "projector", "language"]


class VisionLanguageModel(KeepsRoles):
    """Text with images in it (Liu et al., LLaVA, 2023).

    In the text an image is a run of one special token, one for each vector of the image
    (`model.vision.config.tokens_of(image)` of them). The embeddings of these tokens are replaced by
    the vectors. A sequence may hold any number of images.

    Args:
        vision: shape of the encoder.
        language: shape of the decoder.
        mesh: as of `GPTModel`: its axis `tp` cuts encoder, projector and decoder, its axis
            `cp` the text's sequences; None is one process.
        image_token: the id of the special token, in `0 .. vocab_size - 1`.
        seed: of the initial weights, the same on all ranks; by default drawn from torch's
            generator.

    Raises:
        ValueError: if `image_token` is not an id, and for configs that the parts refuse.

    Examples:
        >>> vision = VisionConfig(hidden_size=64, num_layers=2, num_heads=4, patch_size=8)
        >>> language = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> model = VisionLanguageModel(vision, language, image_token=255)
    """

    def __init__(
        self,
        vision: VisionConfig,
        language: TransformerConfig,
        mesh: MeshLike = None,
        *,
        image_token: int,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if language.mtp is not None:
            raise ValueError(
                f"mtp of the language model is {language.mtp}: its layers read embeddings of later "
                "tokens, and an image's vectors are none; set mtp=None"
            )
        if not 0 <= image_token < language.vocab_size:
            raise ValueError(
                f"image_token is {image_token}: it must be one of the vocabulary's ids, 0 to "
                f"{language.vocab_size - 1}"
            )
        self.image_token = image_token
        self.huggingface_type: str | None = None
        self.seed = draw_seed() if seed is None else seed
        device = torch.get_default_device()
        with torch.device("meta"):
            self.vision = VisionTransformer(vision, mesh)
            self.projector = Projector(vision, language.hidden_size, mesh)
            self.language = GPTModel(language, mesh, seed=derive_seed(self.seed, "language"))
        assign_seeds(self.vision, derive_seed(self.seed, "vision"))
        assign_seeds(self.projector, derive_seed(self.seed, "projector"))
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @property
    def config(self) -> TransformerConfig:
        """The config of the decoder."""
        return self.language.config

    @property
    def auxiliary_scale(self) -> float:
        """The decoder's weight of auxiliary losses beside a loss made from its logits."""
        return self.language.auxiliary_scale

    @auxiliary_scale.setter
    def auxiliary_scale(self, scale: float) -> None:
        self.language.auxiliary_scale = scale

    def freeze(self, *parts: LayerPart) -> VisionLanguageModel:
        """Freeze these parts, and train all others, including parts that an earlier call froze.

        Call this before `fully_shard` and before the optimizer is made. Then frozen parts have
        neither gradients nor optimizer state, and nothing of them is reduced. A frozen encoder
        saves no activations. The biases of a frozen decoder's routers do not change.

        Args:
            parts: of `vision`, `projector`, `language`.

        Returns:
            The model.

        Raises:
            ValueError: for another part.
        """
        unknown = sorted(set(parts) - set(get_args(LayerPart)))
        if unknown:
            raise ValueError(f"parts {unknown} do not exist: take of {get_args(LayerPart)}")
        for name in get_args(LayerPart):
            self.get_submodule(name).requires_grad_(name not in parts)
        return self

    def encode(self, images: Images) -> Tensor:
        """Turn images into vectors of the decoder's width: `[vectors of all images, hidden]`."""
        trained = any(parameter.requires_grad for parameter in self.vision.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            patches = self.vision(images)
        return cast(Tensor, self.projector(patches))

    def forward(
        self,
        tokens: Tensor,
        images: Images | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        padding_mask: Tensor | None = None,
        cache: TokenCache | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: int64 `[batch, sequence]`, with the image token where images are.
            images: `[images, channels, height, width]`, or a list of `[channels, height, width]`
                of any sizes; in the order of the text, first sequence first. None or empty if the
                text has no images. Then the encoder reads a blank image, whose vectors are not
                used, because all ranks that share the encoder must run it.
            labels: as of `GPTModel`; -100 at image tokens.
            positions: as of `GPTModel`.
            document_ids: as of `GPTModel`.
            reduction: as of `GPTModel`.
            padding_mask: as of `GPTModel`, where the decoder has experts.
            cache: as of `GPTModel`.

        Returns:
            Logits or loss, as `GPTModel`.

        Raises:
            ValueError: if the number of image tokens is not that of the images' vectors.
        """
        shape = self.vision.config
        counts: list[int] = []
        if images is None or len(images) == 0:
            side = shape.patch_size * shape.merge
            images = torch.zeros(1, shape.channels, side, side, device=tokens.device)
        else:
            counts = [shape.tokens_of(image) for image in images]
        index = image_positions(tokens, self.image_token, counts)
        output: Tensor = self.language(
            tokens,
            labels,
            positions,
            document_ids,
            reduction=reduction,
            padding_mask=padding_mask,
            splice=Splice(self.encode(images), index),
            cache=cache,
        )
        return output

    @property
    def caches(self) -> bool:
        """Whether the decoder takes a `TokenCache`."""
        return self.language.caches

    @property
    def length_multiple(self) -> int:
        """What a sequence's length must be divisible by, over the ranks that share it."""
        return self.language.length_multiple

    @property
    def sequence_axes(self) -> tuple[MeshAxis, ...]:
        """Along which ranks work on the same sequences."""
        return self.language.sequence_axes
