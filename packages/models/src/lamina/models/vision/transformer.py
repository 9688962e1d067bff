"""The vision Transformer, and the projector to the width of a language model."""

import torch
from torch import Tensor, nn

from lamina.models.attention.context import AttentionContext
from lamina.models.attention.kernels import Masked
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.decoder.layer_stack import TransformerBlock
from lamina.models.layers.embedding import PositionEmbedding
from lamina.models.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.layers.norms import LayerNorm
from lamina.models.vision.patches import Images, VisionConfig, cut_patches

__all__ = ["Projector", "VisionTransformer", "WithinImages", "blank_image"]


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
        self.patch = Linear(config.patch_width, width, bias=True, init_std=std)
        self.row_embedding = PositionEmbedding(config.max_grid, width, init_std=std)
        self.column_embedding = PositionEmbedding(config.max_grid, width, init_std=std)
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
        x = x + self.row_embedding(patches.rows) + self.column_embedding(patches.columns)
        mask = None if patches.valid is None else patches.valid[:, None, None]
        context = AttentionContext((x.shape[0], x.shape[1]), WithinImages(mask))
        for block in self.blocks:
            x = block(x, context)
        vectors: Tensor = self.norm(x).flatten(0, 1)
        return vectors if patches.kept is None else vectors.index_select(0, patches.kept)


class Projector(nn.Module):
    """Vectors of patches to vectors of tokens: a two-layer MLP (Liu et al., LLaVA 1.5, 2023).

    With `merge` above 1 the vectors of `merge x merge` neighbours are joined first.

    Args:
        vision: what the vectors come from.
        hidden_size: of the language model.
        mesh: its axis `tp`, if it has one, cuts the weights; None is one process.
    """

    def __init__(self, vision: VisionConfig, hidden_size: int, mesh: MeshLike = None) -> None:
        super().__init__()
        axis = axis_of(mesh, "tp")
        self.joined = vision.hidden_size * vision.merge**2
        std = vision.init_std
        self.up = ColumnParallelLinear(self.joined, hidden_size, axis, bias=True, init_std=std)
        self.activation = ActivationFunction("gelu")
        self.down = RowParallelLinear(hidden_size, hidden_size, axis, bias=True, init_std=std)

    def forward(self, x: Tensor) -> Tensor:
        """`[patches, vision hidden]` to `[patches / merge^2, hidden]`."""
        projected: Tensor = self.down(self.activation(self.up(x.reshape(-1, self.joined))))
        return projected


def blank_image(config: VisionConfig, device: torch.device) -> Tensor:
    """A black image of the smallest size: `[1, channels, side, side]`."""
    side = config.patch_size * config.merge
    return torch.zeros(1, config.channels, side, side, device=device)
