"""Replacing the embeddings of image tokens by the vectors of images."""

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
from lamina.models.base.computing_device import has_values
from lamina.models.layers.zigzag import cut_sequence


@dataclass(frozen=True)
class Splice:
    """Vectors that replace the embeddings of some tokens.

    Attributes:
        features: `[n, hidden]`, equal on all tensor-parallel ranks.
        index: int64 `[batch, sequence]`: the vector of each token, -1 for its own embedding.
    """

    features: Tensor
    index: Tensor

    def cut(self, axis: MeshAxis | None) -> Splice:
        """Keep the part of the index that belongs to a context-parallel rank."""
        return Splice(self.features, cut_sequence(self.index, axis))

    def into(self, x: Tensor, scattered_over: MeshAxis | None) -> Tensor:
        """Replace embeddings.

        Args:
            x: `[batch, sequence, hidden]`, or this rank's run of the tokens,
                `[tokens / tp, hidden]`.
            scattered_over: the ranks that hold runs of the tokens; None if each holds all.
        """
        features, index = self.features, self.index
        if scattered_over is not None:
            # Each rank uses the features of its own run, so gradients are summed over ranks.
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
        ValueError: if the number of image tokens is not that of the vectors, or if a run of image
            tokens begins inside an image. To find this the host waits for the device, once.
    """
    is_image = tokens == image_token
    number = is_image.flatten().cumsum(dim=0).view_as(tokens) - 1
    if not has_values(tokens):  # there is nothing to check
        return number
    starts = is_image.clone()
    starts[:, 1:] &= ~is_image[:, :-1]
    # If every run begins with the first vector of an image, every run also ends with the last
    # vector of one. So each run, and each sequence, holds whole images.
    # Pinned: a copy from other memory would make the host wait once more.
    inside = torch.ones(sum(counts) + 1, dtype=torch.bool, device="cpu", pin_memory=tokens.is_cuda)
    inside[list(accumulate(counts, initial=0))] = False
    inside = inside.to(tokens.device, non_blocking=True)
    wrong = starts & inside[number.clamp(0, sum(counts))]
    *tokens_per_sequence, misplaced = torch.cat((is_image.sum(dim=1), wrong.sum().view(1))).tolist()
    if sum(tokens_per_sequence) != sum(counts):
        raise ValueError(
            f"the text has {_sum(tokens_per_sequence)} image tokens (id {image_token}) in its "
            f"{len(tokens_per_sequence)} sequences, and {len(counts)} images give "
            f"{_sum(counts)} vectors: put as many image tokens in a sequence as "
            "vision.tokens_of(image) says, image by image"
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
    return torch.where(is_image, number, -1)


def _sum(terms: Sequence[int]) -> str:
    shown = " + ".join(map(str, terms[:8])) + (" + ..." if len(terms) > 8 else "")
    return f"{shown} = {sum(terms)}" if len(terms) > 1 else str(sum(terms))
