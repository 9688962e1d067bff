"""Images as sequences of patches; images of different sizes are padded to the longest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.field_checks import require_at_least

__all__ = ["Images", "Patches", "VisionConfig", "cut_patches"]

Images: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The shape of a vision Transformer (Dosovitskiy et al., 2021).

    Args:
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads.
        patch_size: height and width of a patch in pixels.
        channels: of an image.
        ffn_size: inner width of the MLP, by default `4 * hidden_size`.
        merge: `merge x merge` neighbouring patches become one token of the text.
        max_grid: the largest number of patches in a row or a column.
        dropout: as of `TransformerConfig`.
        norm_eps: added to the variance under the root.
        init_std: standard deviation of initial weights.

    Raises:
        ValueError: for sizes below 1, and for sizes that `TransformerConfig` refuses.

    Examples:
        >>> vision = VisionConfig(hidden_size=64, num_layers=2, num_heads=4, patch_size=8)
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    patch_size: int = 16
    channels: int = 3
    ffn_size: int | None = None
    merge: int = 1
    max_grid: int = 64
    dropout: float = 0.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        require_at_least(1, self, "patch_size", "channels", "merge", "max_grid")
        self.transformer()

    def transformer(self) -> TransformerConfig:
        """The config of the blocks; positions are added to the patches before."""
        return TransformerConfig(
            vocab_size=1,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            ffn_size=self.ffn_size,
            activation="gelu",
            norm="layernorm",
            norm_eps=self.norm_eps,
            positions="none",
            attention_bias=True,
            mlp_bias=True,
            dropout=self.dropout,
            init_std=self.init_std,
        )

    @property
    def patch_width(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch_size**2

    def grid(self, image: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of an image `[channels, height, width]`.

        Raises:
            ValueError: if the image has another number of channels, or a side is no multiple of
                `patch_size * merge`, or too long.
        """
        shape = tuple(image.shape)
        if len(shape) != 3 or shape[0] != self.channels:
            raise ValueError(
                f"an image has shape {shape}: need [channels, height, width] with {self.channels} "
                "channels"
            )
        side, limit = self.patch_size * self.merge, self.max_grid * self.patch_size
        for name, length in zip(("height", "width"), shape[1:], strict=True):
            if length % side or not 0 < length <= limit:
                raise ValueError(
                    f"an image's {name} is {length} pixels: need a multiple of {side} (patch_size "
                    f"{self.patch_size} x merge {self.merge}), {limit} at most: resize or pad it"
                )
        return shape[1] // self.patch_size, shape[2] // self.patch_size

    def tokens_of(self, image: Tensor) -> int:
        """How many tokens of the text an image `[channels, height, width]` takes."""
        rows, columns = self.grid(image)
        return rows * columns // self.merge**2


@dataclass(frozen=True)
class Patches:
    """Patches of some images. Each image is a row, padded to the longest one.

    Patches that become one token are adjacent, and tokens are in reading order.

    Attributes:
        pixels: `[images, patches, channels * patch_size^2]`.
        rows: int64 `[images, patches]`: the row of a patch in its image's grid.
        columns: int64 `[images, patches]`: the column.
        valid: bool `[images, patches]`, False for padding; None if there is none.
        kept: int64: the indexes of those of the `images * patches` that are not padding, in
            order; None if there is no padding.
    """

    pixels: Tensor
    rows: Tensor
    columns: Tensor
    valid: Tensor | None
    kept: Tensor | None = None


def cut_patches(images: Images, config: VisionConfig) -> Patches:
    """Cut images into patches.

    Args:
        images: `[images, channels, height, width]`, or one `[channels, height, width]` each.
        config: the patches' size.

    Raises:
        ValueError: without images, or for one that `VisionConfig.grid` refuses.
    """
    if len(images) == 0:
        raise ValueError("no images: there is nothing to encode")
    if isinstance(images, Tensor) or len({tuple(image.shape) for image in images}) == 1:
        whole = images if isinstance(images, Tensor) else torch.stack(list(images))
        pixels, rows, columns = _cut(whole, config)
        return Patches(
            pixels, rows.expand(len(whole), -1), columns.expand(len(whole), -1), valid=None
        )
    each = [_cut(image[None], config) for image in images]
    lengths = torch.tensor([len(rows) for _, rows, _ in each])
    valid = torch.arange(int(lengths.max())) < lengths[:, None]
    # On the host, which knows the lengths. nonzero on the device would make the host wait.
    kept = valid.flatten().nonzero().squeeze(1)
    device = images[0].device
    return Patches(
        pad_sequence([pixels[0] for pixels, _, _ in each], batch_first=True),
        pad_sequence([rows for _, rows, _ in each], batch_first=True),
        pad_sequence([columns for _, _, columns in each], batch_first=True),
        valid.to(device, non_blocking=True),
        kept.to(device, non_blocking=True),
    )


def _cut(images: Tensor, config: VisionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Patches `[images, patches, width]` of images of one size, and their rows and columns."""
    height, width = config.grid(images[0])
    side, merge = config.patch_size, config.merge
    blocks = images.reshape(
        len(images), config.channels, height // merge, merge, side, width // merge, merge, side
    )
    # [images, block rows, block columns, rows in it, columns in it, channels, side, side]
    pixels = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(images), height * width, -1)
    index = torch.arange(height * width, device=images.device).view(height, width)
    order = index.view(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()
    return pixels, order // width, order % width
