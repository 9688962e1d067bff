"""Three attention patterns for sequences that are cut over ranks, in zigzag order.

These are `ring` (Liu et al., 2023), `all_gather` (Llama 3, 2024), and `ulysses` (Jacobs et al.,
2023).
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lamina.collectives import all_to_all_tokens, gather_from
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.kernels import (
    AttentionPattern,
    DrawnPattern,
    PerHeadPattern,
    check_path,
    choose_pattern,
    document_runs,
    flex_compiles,
    over_positions,
    repeat_heads,
)
from lamina.models.attention.pieced import Block, InPieces, Piece
from lamina.models.attention.ring import Ring, positions_of
from lamina.models.base.computing_device import computes_on
from lamina.models.base.config import TransformerConfig
from lamina.models.invariance.chain_attention import ChainAttention
from lamina.models.invariance.random_keys import PairDraws
from lamina.models.layers.zigzag import cut_sequence, in_order, out_of_order


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """Every rank gathers all keys and values; `inner` is its queries' attention to all keys."""

    axis: MeshAxis
    inner: AttentionPattern

    def with_heads(self, per_head: Tensor) -> AttentionPattern:
        """See `PerHeadPattern`."""
        return replace(self, inner=cast(PerHeadPattern, self.inner).with_heads(per_head))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        both = torch.cat((key, value), dim=-1)
        gathered = gather_from(both, self.axis.group, dim=1, grad="reduce_scatter")
        widths = [key.shape[-1], value.shape[-1]]
        keys, values = torch.split(in_order(gathered, self.axis.size), widths, dim=-1)
        return self.inner(query, keys, values, scale=scale, dropout=dropout)


@dataclass(frozen=True, eq=False)
class Ulysses:
    """Each rank attends over the whole sequence by `inner`, for some of the heads."""

    axis: MeshAxis
    inner: AttentionPattern

    def with_heads(self, per_head: Tensor) -> AttentionPattern:
        """See `PerHeadPattern`; each rank takes the numbers of the heads that it is sent."""
        mine = per_head.chunk(self.axis.size)[self.axis.rank]
        return replace(self, inner=cast(PerHeadPattern, self.inner).with_heads(mine))

    def with_draws(self, draws: PairDraws) -> AttentionPattern:
        """See `DrawnPattern`; each rank draws for the heads that it is sent."""
        mine = draws.of_rank(self.axis.rank, self.axis.size)
        return replace(self, inner=cast(DrawnPattern, self.inner).with_draws(mine))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        size = self.axis.size
        if key.shape[2] % size:
            # There are fewer key heads than ranks, so ranks that share one each get a copy.
            key, value = repeat_heads(key, size), repeat_heads(value, size)
        widths = [x.shape[2] // size for x in (query, key, value)]
        if value.shape[-1] == query.shape[-1]:
            parts = [torch.unflatten(x, 2, (size, -1)) for x in (query, key, value)]
            whole = self._to_heads(torch.cat(parts, dim=3))
            query, key, value = torch.split(whole, widths, dim=2)
        else:
            query, key, value = (
                self._to_heads(torch.unflatten(x, 2, (size, -1))) for x in (query, key, value)
            )
        return self._to_tokens(self.inner(query, key, value, scale=scale, dropout=dropout))

    def _to_heads(self, x: Tensor) -> Tensor:
        """`[batch, tokens, size, heads, width]` to `[batch, sequence, heads, width]`."""
        received = all_to_all_tokens(x.movedim(2, 0), self.axis.group)
        laid = received.movedim(0, 1).flatten(1, 2)
        return in_order(laid, self.axis.size)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """`[batch, sequence, heads, width]` to `[batch, tokens, size * heads, width]`."""
        size = self.axis.size
        laid = torch.unflatten(out_of_order(x, size), 1, (size, -1))
        received = all_to_all_tokens(laid.movedim(1, 0), self.axis.group)
        return received.movedim(0, 2).flatten(2, 3)


def check_context_parallel(config: TransformerConfig, cp: MeshAxis, tp_size: int) -> None:
    """Raise ValueError if the chosen kind of context parallelism does not support a config."""
    way, heads, kv_heads = config.context_parallel, config.num_heads, config.kv_heads
    if config.mamba is not None:
        raise ValueError(
            f"layer_pattern {config.pattern!r} has Mamba layers, whose state runs through the "
            f"whole sequence, and cp {cp.size} cuts it: take cp 1, and dp_shard or tp instead"
        )
    variant = config.attention_variant
    if variant is not None and way not in variant.context_parallel:
        known = ", ".join(map(repr, variant.context_parallel)) or "none"
        raise ValueError(
            f"context_parallel {way!r} with {type(variant).__name__}, which has {known} (its "
            f"`context_parallel`): choose one of these, or take cp 1 in place of {cp.size}"
        )
    if way != "ulysses" and config.attention_path != "auto":
        raise ValueError(
            f"attention_path {config.attention_path!r} beside context_parallel {way!r}, which has "
            "kernels of its own: set attention_path to 'auto', or context_parallel to 'ulysses'"
        )
    if way == "ring" and not config.invariant:  # which gathers keys and values
        _refuse_ring_dropout(config.attention_dropout)
    if way == "ring" and config.scores is not None:
        raise ValueError(
            f"context_parallel 'ring' merges scores as they are, and scores is {config.scores}: "
            "set context_parallel to 'all_gather' or 'ulysses'"
        )
    if way != "ulysses":
        return
    local, local_kv = heads // tp_size, kv_heads // tp_size
    if config.invariant and local_kv % cp.size:
        raise ValueError(
            f"context_parallel 'ulysses' copies {local_kv} key heads of a tp rank for {cp.size} "
            "ranks, whose gradients would be rounded before they are added, and invariant=True "
            "fixes their order: choose 'ring' or 'all_gather'"
        )
    if local % cp.size or (local_kv % cp.size and cp.size % local_kv):
        raise ValueError(
            f"context_parallel 'ulysses' gives each of {cp.size} ranks a share of the heads, but a "
            f"tp rank has {heads} / {tp_size} = {local} heads and {kv_heads} / {tp_size} = "
            f"{local_kv} key heads: choose 'ring' or 'all_gather', or another cp"
        )


def _refuse_ring_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"context_parallel 'ring' has no attention_dropout (here {dropout}): set it to 0, or "
            "context_parallel to 'all_gather' or 'ulysses'"
        )


def check_pattern(
    config: TransformerConfig,
    axis: MeshAxis | None,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool,
    dropout: float = 0.0,
) -> None:
    """Raise ValueError for attention without a kernel; arguments as of `parallel_pattern`.

    An `axis` of None is one process.
    """
    if axis is None or config.context_parallel == "ulysses":
        check_path(config, device, dtype, dropout)
    elif config.context_parallel == "ring" and not config.invariant:
        _refuse_ring_dropout(dropout)
        if computes_on(device) == "cuda" and (documents or config.sliding_window is not None):
            raise ValueError(
                "context_parallel 'ring' has neither documents nor a sliding window on a GPU, "
                "where no kernel takes a mask and returns what merging needs: set it to "
                "'all_gather' or 'ulysses'"
            )


def parallel_pattern(
    config: TransformerConfig,
    axis: MeshAxis | None,
    tokens: Tensor,
    dtype: torch.dtype,
    document_ids: Tensor | None,
    dropout: float = 0.0,
) -> AttentionPattern:
    """Build the pattern that the config names; without an axis, that of one process.

    `tokens` `[batch, sequence, ...]` and `document_ids` `[batch, sequence]` are of whole sequences;
    `dtype` is that of queries, keys and values.

    ValueError: that kind does not support the case.
    """
    if config.invariant:
        return _in_order(config, axis, document_ids)
    if axis is None:
        return choose_pattern(config, tokens, dtype, document_ids, dropout)
    check_pattern(config, axis, tokens.device, dtype, document_ids is not None, dropout)
    window = config.sliding_window
    if config.context_parallel == "ulysses":
        return Ulysses(axis, choose_pattern(config, tokens, dtype, document_ids, dropout))
    runs = None if document_ids is None else document_runs(document_ids)
    if config.context_parallel == "ring":
        return Ring(axis, window, runs)
    sequence, device = tokens.shape[1], tokens.device
    # A kernel that stores no scores has to return the logs that merging needs.
    half = dtype in (torch.float16, torch.bfloat16)
    merges = computes_on(device) == "cpu" or (
        half and max(config.head_width, config.value_width) <= 256
    )
    plain = runs is None and window is None and config.scores is None
    if plain and not dropout and merges:
        return GatheredKeys(axis, InPieces(causal_pieces(axis, sequence, config.score_scale)))
    mine = positions_of(axis.rank, axis.size, sequence, device)
    keys = torch.arange(sequence, device=device)
    my_runs = None if runs is None else cut_sequence(runs, axis)
    flex = computes_on(tokens) == "cuda" and not dropout and flex_compiles(config)
    pattern = over_positions(config.scores, mine, keys, window, runs, my_runs, flex=flex)
    return GatheredKeys(axis, pattern)


def _in_order(
    config: TransformerConfig, axis: MeshAxis | None, document_ids: Tensor | None
) -> AttentionPattern:
    """The pattern of `invariant=True`.

    `ring` gathers keys as `all_gather` does: they arrive in an order that depends on the ranks.
    """
    runs = None if document_ids is None else document_runs(document_ids)
    if axis is not None and config.context_parallel == "ulysses":
        return Ulysses(axis, ChainAttention(config.sliding_window, runs))
    return ChainAttention(config.sliding_window, runs, axis)


def causal_pieces(axis: MeshAxis, sequence: int, scale: float) -> tuple[Piece, ...]:
    """Pieces of this rank's two chunks: all chunks before, and the chunk itself causally."""
    chunk = sequence // (2 * axis.size)
    pieces = []
    for half, number in enumerate((axis.rank, 2 * axis.size - 1 - axis.rank)):
        rows, first = slice(half * chunk, (half + 1) * chunk), number * chunk
        if first:
            pieces.append(Piece(rows, slice(0, first), Block(scale)))
        pieces.append(Piece(rows, slice(first, first + chunk), Block(scale, causal=True)))
    return tuple(pieces)
