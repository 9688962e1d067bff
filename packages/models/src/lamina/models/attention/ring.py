"""Ring attention: keys and values pass round the ranks, and pieces of attention are merged.

In a compiled graph all of it is one operator, because its messages travel beside its kernels.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lamina.collectives.engine import group_named
from lamina.mesh.engine import MeshAxis, group_ref
from lamina.models.attention.kernels import allowed_pairs, refuse_dropout
from lamina.models.attention.pieced import (
    Block,
    Piece,
    Pieces,
    attend_in_pieces,
    gradients_in_pieces,
    to_one_width,
    values_in_pieces,
)


def positions_of(rank: int, size: int, sequence: int, device: torch.device) -> Tensor:
    """Positions of a rank's tokens in the whole sequence: int64 `[sequence / size]`."""
    chunks = torch.arange(sequence, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


@dataclass(frozen=True, eq=False)
class Ring:
    """Keys and values are sent round a ring; pieces of attention are merged in float32.

    `runs`, int64 `[batch, sequence]`, is each token's document, of the whole sequence.
    """

    axis: MeshAxis
    window: int | None = None
    runs: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        refuse_dropout("Ring", dropout)
        if torch.compiler.is_compiling():
            group = cast(ProcessGroup, self.axis.group)
            padded = to_one_width(query, key, value)
            how = (self.runs, self.window, scale, group.group_name)
            mixed: Tensor = _attend(*padded, *how)[0]
            return mixed[..., : value.shape[-1]]
        return attend_in_pieces(query, key, value, self.of(query, scale), self.axis.group)

    def of(self, query: Tensor, scale: float) -> Pieces:
        """The pieces of these queries' attention, by the rank whose keys they are of."""
        return partial(self.pieces, tokens=query.shape[1], scale=scale, device=query.device)

    def pieces(
        self, source: int, tokens: int, scale: float, device: torch.device
    ) -> tuple[Piece, ...]:
        """The pairs of this rank's queries and another rank's keys that attend to each other."""
        rank, half = self.axis.rank, tokens // 2
        everything = slice(0, tokens)
        if self.window is not None or self.runs is not None:
            mask = self._mask(source, tokens * self.axis.size, device)
            return (Piece(everything, everything, Block(scale, mask=mask)),) if mask.any() else ()
        if source == rank:
            return (Piece(everything, everything, Block(scale, causal=True)),)
        if source < rank:
            # The early chunk of that rank comes before both of ours, its late chunk after both.
            return (Piece(everything, slice(0, half), Block(scale)),)
        return (Piece(slice(half, tokens), everything, Block(scale)),)

    def _mask(self, source: int, sequence: int, device: torch.device) -> Tensor:
        mine = positions_of(self.axis.rank, self.axis.size, sequence, device)
        theirs = positions_of(source, self.axis.size, sequence, device)
        runs = () if self.runs is None else (self.runs[:, mine], self.runs[:, theirs])
        return allowed_pairs(mine, theirs, self.window, *runs)


# ------------------------------------------------------------------------------ as operators

# A compiler relies on the strides of results, which here are those of contiguous tensors.


def _ring(group: str, window: int | None, runs: Tensor | None) -> Ring:
    ranks = group_named(group)
    axis = MeshAxis("cp", ranks.size(), ranks.rank(), (), group_ref(ranks))
    return Ring(axis, window, runs)


@torch.library.custom_op("lamina::ring_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Tensor | None,
    window: int | None,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Mixed values `[batch, tokens, heads, width]`, and logs of sums `[batch, heads, tokens]`."""
    pieces = _ring(group, window, runs).of(query, scale)
    mixed, logs = values_in_pieces(query, key, value, pieces, group_named(group))
    return mixed.contiguous(), logs


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, tokens, heads, _width = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, tokens), dtype=wide)


@torch.library.custom_op("lamina::ring_attention_gradients", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    logs: Tensor,
    runs: Tensor | None,
    window: int | None,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pieces, inputs = _ring(group, window, runs).of(query, scale), (query, key, value)
    made = gradients_in_pieces(grad, inputs, mixed, logs, pieces, group_named(group))
    by_query, by_key, by_value = (each.contiguous() for each in made)
    return by_query, by_key, by_value


@_gradients.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, runs, mixed, logs = ctx.saved_tensors
    how = (runs, ctx.window, ctx.scale, ctx.group)
    return *_gradients(grad, query, key, value, mixed, logs, *how), None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)
