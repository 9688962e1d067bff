"""Attention whose rows depend on the query and the keys before it, and on nothing else.

Scores are chains over a head's elements. The largest score of a row is exact in any order. The
sums of a row's probabilities and of its values are one product with `[values, 1]`: chunks of keys,
counted from the first token of the document, one after the other. A key that a query does not
attend to has probability zero, and adding its zero changes nothing. So later tokens, padding, other
documents and other sequences of the batch leave a row's bits alone.

In backward the gradients of keys and values are sums over queries, chunk by chunk in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.models.base.applied import applied
from lamina.models.invariance.products import CHUNK, fold, product, row_sum


@dataclass(frozen=True)
class ChainAttention:
    """The attention pattern of `invariant=True`, for whole sequences.

    Attributes:
        window: the number of tokens that a token attends to, itself included; None is all before.
        runs: int64 `[batch, sequence]`: each token's document; None is one per sequence.
    """

    window: int | None = None
    runs: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        if dropout:
            raise ValueError(
                f"attention_dropout is {dropout}, and invariant=True has no random numbers by "
                "position: set it to 0"
            )
        mixed: Tensor = applied(_Attend, query, key, value, scale, self.window, self._documents())
        return mixed

    def _documents(self) -> "tuple[_Span, ...] | None":
        """Rows of the batch and pieces of sequences that are documents; None is all whole."""
        if self.runs is None:
            return None
        spans = []
        for row, runs in enumerate(self.runs):
            lengths = torch.unique_consecutive(runs, return_counts=True)[1].tolist()
            start = 0
            for length in lengths:
                spans.append((slice(row, row + 1), slice(start, start + length)))
                start += length
        return tuple(spans)


_Span = tuple[slice, slice]
"""Rows of the batch, and tokens of their sequences."""


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """`[batch, tokens, kv_heads, width]` to float32 `[batch * heads, tokens, width]`."""
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x.transpose(1, 2).flatten(0, 1).float().contiguous()


def _tokens_first(x: Tensor, heads: int) -> Tensor:
    """The inverse for `heads` heads."""
    return torch.unflatten(x, 0, (-1, heads)).transpose(1, 2)


def _query_chunks(tokens: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Chunks of queries, and the keys that any of them attends to, in whole chunks from below."""
    for first in range(0, tokens, CHUNK):
        last = min(first + CHUNK, tokens)
        lowest = 0 if window is None else max(first - window + 1, 0)
        yield slice(first, last), slice(lowest - lowest % CHUNK, last)


def _scores(
    query: Tensor, key: Tensor, rows: slice, columns: slice, scale: float, window: int | None
) -> Tensor:
    """Scores of some queries and keys; minus infinity where one does not attend to the other."""
    scores = product(query[:, rows], key[:, columns].transpose(1, 2)) * scale
    distance = torch.arange(rows.start, rows.stop, device=query.device)[:, None] - torch.arange(
        columns.start, columns.stop, device=query.device
    )
    apart = distance < 0
    if window is not None:
        apart |= distance >= window
    return scores.masked_fill_(apart, -torch.inf)


class _Attend(torch.autograd.Function):
    """Causal attention of each document; scores are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        documents: tuple[_Span, ...] | None,
    ) -> Tensor:
        batch, tokens, heads, _ = query.shape
        spans = ((slice(0, batch), slice(0, tokens)),) if documents is None else documents
        mixed = query.new_empty(batch, tokens, heads, value.shape[-1])
        # The largest score of each row, and the sum of its exponentials.
        largest = query.new_empty(batch, tokens, heads, 1, dtype=torch.float32)
        totals = torch.empty_like(largest)
        for span in spans:
            q, k, v = (_heads_first(x[span], heads) for x in (query, key, value))
            with_ones = torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)
            for rows, columns in _query_chunks(q.shape[1], window):
                scores = _scores(q, k, rows, columns, scale, window)
                top = scores.amax(dim=-1, keepdim=True)
                sums = product((scores - top).exp_(), with_ones[:, columns])
                place = span[0], slice(span[1].start + rows.start, span[1].start + rows.stop)
                total = sums[..., -1:]
                mixed[place] = _tokens_first(sums[..., :-1] / total, heads).to(mixed.dtype)
                largest[place] = _tokens_first(top, heads)
                totals[place] = _tokens_first(total, heads)
        ctx.save_for_backward(query, key, value, mixed, largest, totals)
        ctx.scale, ctx.window, ctx.spans = scale, window, spans
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, largest, totals = ctx.saved_tensors
        heads, kv_heads = query.shape[2], key.shape[2]
        grads = [torch.empty_like(x) for x in (query, key, value)]
        for span in ctx.spans:
            q, k, v, g, m, top, total = (
                _heads_first(x[span], heads)
                for x in (query, key, value, grad, mixed, largest, totals)
            )
            mean = row_sum(g * m)
            by_query, by_key, by_value = (torch.zeros_like(x) for x in (q, k, v))
            for rows, columns in _query_chunks(q.shape[1], ctx.window):
                scores = _scores(q, k, rows, columns, ctx.scale, ctx.window)
                shares = (scores - top[:, rows]).exp_() / total[:, rows]
                by_value[:, columns] += product(shares.transpose(1, 2), g[:, rows])
                by_share = product(g[:, rows], v[:, columns].transpose(1, 2))
                by_score = shares * (by_share - mean[:, rows]) * ctx.scale
                by_query[:, rows] = product(by_score, k[:, columns])
                by_key[:, columns] += product(by_score.transpose(1, 2), q[:, rows])
            for into, part in zip(grads, (by_query, by_key, by_value), strict=True):
                apart = _tokens_first(part, heads)
                if into is not grads[0] and kv_heads != heads:
                    # Query heads that share a key head are added in the tree.
                    apart = fold(torch.unflatten(apart, 2, (kv_heads, -1)), dim=3)
                into[span] = apart.to(into.dtype)
        return *grads, None, None, None
