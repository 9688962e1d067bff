"""Images as sequences of patches, the vision Transformer, and the projector to a language model.

Images of different sizes are padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lamina.models.attention.context import AttentionContext
from lamina.models.attention.kernels import Masked
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.elements import ActivationName
from lamina.models.base.configs.field_checks import (
    require_at_least,
    require_divides,
    require_one_of,
)
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.decoder.layer_stack import TransformerBlock
from lamina.models.layers.embedding import PositionEmbedding
from lamina.models.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.layers.norms import LayerNorm

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
        image_size: height and width of all images, in pixels, whose patches have a learned vector
            each. None takes images of any size: a position is the sum of two vectors, of its row
            and its column.
        class_token: a learned vector stands before the patches and is left out of the result
            (CLIP, Radford et al., 2021); needs `image_size`.
        embedding_norm: normalise the patches before the first block.
        patch_bias: a bias in the projection of patches.
        activation: of the blocks' MLPs, without a gate.
        features: the layers whose results are joined, 0 for the patches themselves, negative from
            the last; None is the last, normalised. Later layers are not run.
        projector: what makes tokens from vectors: an `mlp` of two layers, the same with a `gated`
            (SwiGLU) first layer, or one `linear` layer without a bias.
        projector_width: inner width of the projector; by default that of the tokens.
        projector_bias: biases in the projector.
        projector_norm_eps: normalise the projector's input, with this number added to the variance;
            None does not.
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
    image_size: int | None = None
    class_token: bool = False
    embedding_norm: bool = False
    patch_bias: bool = True
    activation: ActivationName = "gelu"
    features: tuple[int, ...] | None = None
    projector: Literal["mlp", "gated", "linear"] = "mlp"
    projector_width: int | None = None
    projector_bias: bool = True
    projector_norm_eps: float | None = None
    dropout: float = 0.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        require_at_least(1, self, "patch_size", "channels", "merge", "max_grid")
        require_one_of("projector", self.projector, ("mlp", "gated", "linear"))
        if self.image_size is not None:
            side = self.patch_size * self.merge
            require_divides("image_size", self.image_size, "patch_size * merge", side,
                            "patches that become one token are a square")  # fmt: skip
        elif self.class_token:
            raise ValueError("class_token without image_size: its position is a row of that table")
        layers = range(-self.num_layers - 1, self.num_layers + 1)
        if strange := [each for each in self.features or () if each not in layers]:
            raise ValueError(f"features has {strange[0]}, and there are {self.num_layers} layers")
        self.transformer()

    def transformer(self) -> TransformerConfig:
        """The config of the blocks; positions are added to the patches before."""
        return TransformerConfig(
            vocab_size=1,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            ffn_size=self.ffn_size,
            activation=self.activation,
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

    @property
    def joined_width(self) -> int:
        """Numbers from which the projector makes a token."""
        return self.hidden_size * len(self.features or (-1,)) * self.merge**2

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
        if self.image_size is not None and shape[1:] != (self.image_size, self.image_size):
            raise ValueError(
                f"an image has {shape[1]} x {shape[2]} pixels, and all have {self.image_size} x "
                f"{self.image_size} by image_size: resize it"
            )
        side = self.patch_size * self.merge
        limit = self.image_size or self.max_grid * self.patch_size
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


class WithinImages(Masked):
    """Every patch attends to every patch of its image: an attention pattern.

    Attributes:
        mask: bool `[images, 1, 1, patches]`, False for padding; None where there is none.
    """


class VisionTransformer(nn.Module):
    """Images to one vector per patch (Dosovitskiy et al., 2021), without a class token.

    The position of a patch is encoded by the sum of two learned vectors, one of its row and one of
    its column, which images of all sizes share (Dehghani et al., NaViT, 2023).

    Args:
        config: the shape.
        mesh: its axis `tp`, if it has one, cuts the blocks' weights; None is one process.
    """

    def __init__(self, config: VisionConfig, mesh: MeshLike = None) -> None:
        super().__init__()
        self.config = config
        width, std = config.hidden_size, config.init_std
        shape = config.transformer()
        axis = axis_of(mesh, "tp")
        bias = config.patch_bias
        self.patch = Linear(config.patch_width, width, bias=bias, init_std=std)
        if config.image_size is None:
            self.row_embedding = PositionEmbedding(config.max_grid, width, init_std=std)
            self.column_embedding = PositionEmbedding(config.max_grid, width, init_std=std)
        else:
            self.side = config.image_size // config.patch_size
            rows = self.side**2 + config.class_token
            self.position_embedding = PositionEmbedding(rows, width, init_std=std)
        self.class_embedding = self.embedding_norm = None
        if config.class_token:
            self.class_embedding = PositionEmbedding(1, width, init_std=std)
        if config.embedding_norm:
            self.embedding_norm = LayerNorm(width, config.norm_eps)
        self.blocks = nn.ModuleList(TransformerBlock(shape, axis) for _ in range(config.num_layers))
        self.norm = LayerNorm(width, config.norm_eps)

    def forward(self, images: Images) -> Tensor:
        """Encode images.

        Args:
            images: `[images, channels, height, width]`, or a list of
                `[channels, height, width]`; of any floating-point dtype.

        Returns:
            `[patches of all images, hidden]`: image after image, in each the patches that become
            one token together.

        Raises:
            ValueError: without images, or for one whose size does not fit the patches.
        """
        patches = cut_patches(images, self.config)
        x: Tensor = self.patch(patches.pixels.to(self.patch.weight.dtype))
        x = self._placed(x, patches)
        mask = None if patches.valid is None else patches.valid[:, None, None]
        context = AttentionContext((x.shape[0], x.shape[1]), WithinImages(mask))
        wanted, layers = self.config.features, len(self.blocks)
        numbers = [layers] if wanted is None else [each % (layers + 1) for each in wanted]
        results = [x]
        for block in self.blocks[: max(numbers)]:
            results.append(block(results[-1], context))
        x = torch.cat([results[number] for number in numbers], dim=-1)
        x = self.norm(x) if wanted is None else x
        vectors = (x if self.class_embedding is None else x[:, 1:]).flatten(0, 1)
        return vectors if patches.kept is None else vectors.index_select(0, patches.kept)

    def _placed(self, x: Tensor, patches: Patches) -> Tensor:
        """Add positions to patches `[images, patches, hidden]`, after the class token if any."""
        if self.config.image_size is None:
            x = x + self.row_embedding(patches.rows) + self.column_embedding(patches.columns)
        else:
            index = patches.rows * self.side + patches.columns
            if self.class_embedding is not None:
                first = self.class_embedding(index.new_zeros(len(x), 1))
                x, index = torch.cat((first, x), dim=1), F.pad(index + 1, (1, 0))
            x = x + self.position_embedding(index)
        return x if self.embedding_norm is None else cast(Tensor, self.embedding_norm(x))


class Projector(nn.Module):
    """Vectors of patches to vectors of tokens: a two-layer MLP (Liu et al., LLaVA 1.5, 2023).

    `VisionConfig.projector` names others; one `linear` layer is whole on every rank. With `merge`
    above 1 the vectors of `merge x merge` neighbours are joined first.

    Args:
        vision: what the vectors come from.
        hidden_size: of the language model.
        mesh: its axis `tp`, if it has one, cuts the weights; None is one process.
    """

    def __init__(self, vision: VisionConfig, hidden_size: int, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        self.joined, std = vision.joined_width, vision.init_std
        eps = vision.projector_norm_eps
        self.norm = None if eps is None else LayerNorm(self.joined, eps)
        self.linear: Linear | None = None
        if vision.projector == "linear":
            self.linear = Linear(self.joined, hidden_size, init_std=std)
            return
        inner, gated = vision.projector_width or hidden_size, vision.projector == "gated"
        widths = (inner, inner) if gated else (inner,)
        how: dict[str, Any] = {"bias": vision.projector_bias, "init_std": std}
        self.up = ColumnParallelLinear(self.joined, sum(widths), axis, blocks=widths, **how)
        self.activation = ActivationFunction("swiglu" if gated else "gelu")
        self.down = RowParallelLinear(inner, hidden_size, axis, **how)

    def forward(self, x: Tensor) -> Tensor:
        """`[patches, vision hidden]` to `[patches / merge^2, hidden]`."""
        x = x.reshape(-1, self.joined)
        x = x if self.norm is None else self.norm(x)
        if self.linear is not None:
            return cast(Tensor, self.linear(x))
        return cast(Tensor, self.down(self.activation(self.up(x))))
