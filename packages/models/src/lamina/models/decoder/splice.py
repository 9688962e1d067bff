"""Putting vectors of images in the places that the text keeps for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.collectives import copy_to, scatter_to
from lamina.mesh.engine import MeshAxis
from lamina.models.layers.zigzag import cut_sequence

__all__ = ["Splice", "image_positions"]


@dataclass(frozen=True)
class Splice:
    """What takes the place of some tokens' embeddings.

    Attributes:
        features: `[n, hidden]`, equal on all tensor-parallel ranks.
        index: int64 `[batch, sequence]`: which of them a token takes, -1 for its own embedding.
    """

    features: Tensor
    index: Tensor

    def cut(self, axis: MeshAxis | None) -> Splice:
        """Keep the places of a context-parallel rank."""
        return Splice(self.features, cut_sequence(self.index, axis))

    def into(self, x: Tensor, scattered_over: MeshAxis | None) -> Tensor:
        """Replace embeddings.

        Args:
            x: `[batch, sequence, hidden]`, or this rank's run of the tokens,
                `[tokens / tp, hidden]`.
            scattered_over: the ranks that hold runs of the tokens; None: each holds all.
        """
        features, index = self.features, self.index
        if scattered_over is not None:
            # Each rank uses the features of its own run: their gradients have to be summed.
            features = copy_to(features, scattered_over.group)
            index = scatter_to(index.flatten(), scattered_over.group)
        chosen = F.embedding(index.clamp(min=0), features).to(x.dtype)
        return torch.where((index >= 0).unsqueeze(-1), chosen, x)


def image_positions(tokens: Tensor, image_token: int, counts: Sequence[int]) -> Tensor:
    """Number the tokens that stand for images, in reading order.

    Args:
        tokens: int64 `[batch, sequence]`.
        image_token: the id that stands for one vector of an image.
        counts: vectors of each image, in the order of the text, first sequence first.

    Returns:
        int64 `[batch, sequence]`: a running number, -1 for other tokens.

    Raises:
        ValueError: if the text keeps another number of places than the images fill, or a run of
            places begins inside an image. Waits for the device, once.
    """
    place = tokens == image_token
    number = place.flatten().cumsum(dim=0).view_as(tokens) - 1
    starts = place.clone()
    starts[:, 1:] &= ~place[:, :-1]
    # Where every run begins with an image's first vector, every run ends with an image's last: it
    # holds whole images, and so does its sequence.
    inside = torch.ones(sum(counts) + 1, dtype=torch.bool)
    inside[list(accumulate(counts, initial=0))] = False
    inside = inside.to(tokens.device, non_blocking=True)
    wrong = starts & inside[number.clamp(0, sum(counts))]
    *held, misplaced = torch.cat((place.sum(dim=1), wrong.sum().view(1))).tolist()
    if sum(held) != sum(counts):
        raise ValueError(
            f"the text has {_sum(held)} image tokens (id {image_token}) in its "
            f"{len(held)} sequences, and {len(counts)} images give {_sum(counts)} vectors: put as "
            "many image tokens in a sequence as vision.tokens_of(image) says, image by image"
        )
    if misplaced:
        row, column = wrong.nonzero()[0].tolist()
        reached = int(number[row, column])
        image = bisect_right(list(accumulate(counts)), reached)
        raise ValueError(
            f"the run of image tokens (id {image_token}) at token {column} of sequence {row} "
            f"begins inside image {image}: {reached} tokens lie before it, and the images give "
            f"{_sum(counts)} vectors, in the order of the text: an image is one unbroken run of "
            "vision.tokens_of(image) tokens in one sequence"
        )
    return torch.where(place, number, -1)


def _sum(terms: Sequence[int]) -> str:
    shown = " + ".join(map(str, terms[:8])) + (" + ..." if len(terms) > 8 else "")
    return f"{shown} = {sum(terms)}" if len(terms) > 1 else str(sum(terms))
