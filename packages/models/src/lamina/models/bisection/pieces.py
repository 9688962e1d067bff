"""Which elements of a whole tensor a rank has, read off the shapes and the rank's coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.mesh import Role
from lamina.models.base.mesh_axes import MeshLike, axis_of, cut_weight

Coordinate = tuple[int, int]
"""A rank along an axis, and the number of ranks along it."""

ALONE: Coordinate = (0, 1)


@dataclass(frozen=True)
class Share:
    """What a rank has of a step.

    The sequences of the batch are dealt out in order: first to the data-parallel ranks of the
    first microbatch, then to those of the second. So row `r` of microbatch `m` on data-parallel
    rank `d` is sequence `(m * ranks + d) * rows + r`, which is the order of `reproducible=True`.

    Attributes:
        sequences: in the batch, over all ranks and microbatches.
        length: tokens of a sequence.
        rows: sequences of a microbatch on a rank.
        axes: this rank's coordinate along `dp`, `cp`, `tp`, `pp`, `ep` and `expert_tp`.
        rank: its number in the job.
    """

    sequences: int
    length: int
    rows: int
    axes: dict[str, Coordinate]
    rank: int = 0

    @staticmethod
    def of(mesh: MeshLike, sequences: int, length: int, rows: int, rank: int = 0) -> Share:
        """Read this rank's coordinates off a mesh; None is one process."""
        axes = {}
        for name in ("dp", "cp", "tp", "pp", "ep", "expert_tp"):
            axis = axis_of(mesh, name)
            axes[name] = ALONE if axis is None else (axis.rank, axis.size)
        if sequences % (rows * axes["dp"][1]):
            raise ValueError(
                f"{sequences} sequences are not divisible by dp {axes['dp'][1]} x {rows} rows of a "
                "microbatch: take more sequences"
            )
        return Share(sequences, length, rows, axes, rank)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a rank."""
        return self.sequences // (self.rows * self.axes["dp"][1])

    def rows_of(self, microbatch: int) -> slice:
        """The sequences of a microbatch on this rank."""
        rank, size = self.axes["dp"]
        first = (microbatch * size + rank) * self.rows
        return slice(first, first + self.rows)

    def tokens(self, microbatch: int, *, whole: bool = False) -> Tensor:
        """The numbers in the batch of this rank's tokens, `[rows, length / cp]`; `whole` of all."""
        (rank, size), chunks = self.axes["cp"], 2 * self.axes["cp"][1]
        numbers = torch.arange(self.sequences * self.length).view(self.sequences, self.length)
        numbers = numbers[self.rows_of(microbatch)]
        if whole or size == 1:
            return numbers
        parts = numbers.chunk(chunks, dim=1)
        return torch.cat((parts[rank], parts[chunks - 1 - rank]), dim=1)

    @property
    def describe(self) -> str:
        """The rank and its coordinates, in words."""
        wide = [f"{name} {rank}" for name, (rank, size) in self.axes.items() if size > 1]
        return f"rank {self.rank}" + (f" ({', '.join(wide)})" if wide else "")


class MismatchError(ValueError):
    """A rank's tensor has a shape that no piece of the whole one has."""


def token_widths(shape: Sequence[int], share: Share) -> tuple[int, ...] | None:
    """What follows the tokens in the shape of a rank's tensor; None if it has no tokens.

    Tokens are `[rows, length]`, or flat.
    """
    for _, widths in _token_shapes(shape, share, 0):
        return widths
    return None


def _token_shapes(
    shape: Sequence[int], share: Share, microbatch: int
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield how a shape can be tokens followed by widths: the tokens' numbers, and the widths."""
    here, whole = share.tokens(microbatch), share.tokens(microbatch, whole=True)
    for numbers in (here, whole):
        if tuple(shape[:2]) == tuple(numbers.shape):
            yield numbers.flatten(), tuple(shape[2:])
    rank, size = share.axes["tp"]
    runs = here.flatten().chunk(size)
    for numbers in (runs[rank], here.flatten(), whole.flatten()):
        if shape and shape[0] == len(numbers):
            yield numbers, tuple(shape[1:])


def token_piece(
    shape: Sequence[int],
    widths: Sequence[int],
    share: Share,
    microbatch: int,
    fused: Sequence[int] | None = None,
) -> Tensor:
    """Which elements of a whole `[tokens, *widths]` a rank's activation is.

    A width may be cut over `tp`.

    Args:
        shape: of the rank's tensor.
        widths: what follows the tokens in the whole tensor.
        share: of the rank.
        microbatch: the number of the microbatch.
        fused: widths, over all ranks, of what is fused in the last dimension, each cut by itself.

    Returns:
        int64 in the rank's shape: numbers of elements of the whole tensor.

    Raises:
        MismatchError: no piece of the whole tensor has this shape.
    """
    rank, size = share.axes["tp"]
    columns = torch.arange(math.prod(widths)).view(tuple(widths))
    for numbers, here in _token_shapes(shape, share, microbatch):
        if len(here) != len(widths):
            continue
        cut = [dim for dim in range(len(here)) if here[dim] != widths[dim]]
        part = columns
        if len(cut) == 1 and here[cut[0]] * size == widths[cut[0]]:
            blocks = fused if cut[0] == len(widths) - 1 else None
            part = cut_weight(columns, cut[0], rank, size, blocks)
        if tuple(part.shape) == here:
            index = numbers[:, None] * columns.numel() + part.flatten()
            return index.view(tuple(shape))
    raise MismatchError(
        f"it has shape {tuple(shape)} on {share.describe}, and the whole has {tuple(widths)} per "
        f"token: no piece of {share.rows} x {share.length} tokens has this shape"
    )


def parameter_piece(shape: Sequence[int], whole: Sequence[int], role: Role, share: Share) -> Tensor:
    """Which elements of a whole parameter a rank's tensor is, by its role; as `token_piece`."""
    index = torch.arange(math.prod(whole)).view(tuple(whole))
    rank, size = share.axes["tp"]
    if role.expert:
        own, ranks = share.axes["ep"]
        index = index.chunk(ranks)[own]
        # Experts are cut over tp as dense layers are where no axis of their own cuts them.
        if share.axes["expert_tp"][1] > 1 or ranks > 1:
            rank, size = share.axes["expert_tp"]
    if role.tp_shard_dim is not None and size > 1:
        index = cut_weight(index, role.tp_shard_dim, rank, size, role.tp_blocks)
    if index.shape != tuple(shape):
        raise MismatchError(
            f"it has shape {tuple(shape)} on {share.describe}, and by its role {role} it should be "
            f"the piece {tuple(index.shape)} of {tuple(whole)}"
        )
    return index
