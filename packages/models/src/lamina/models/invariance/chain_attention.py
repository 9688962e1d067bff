"""Attention whose rows depend on the query and the keys before it, and on nothing else.

Scores are chains over a head's elements. The largest score of a row is exact in any order. The
sums of a row's probabilities and of its values are one product with `[values, 1]`: chunks of keys,
counted from the first token of the document, one after the other. A key that a query does not
attend to has probability zero, and adding its zero changes nothing. So later tokens, padding, other
documents and other sequences of the batch leave a row's bits alone.

In backward the gradients of keys and values are sums over queries, chunk by chunk in the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.invariance.products import CHUNK, fold, product, row_sum
from lamina.models.invariance.random_keys import PairDraws
from lamina.models.invariance.token_sums import TokenCut


@dataclass(frozen=True)
class ChainAttention:
    """The attention pattern of `invariant=True`.

    Attributes:
        window: the number of tokens that a token attends to, itself included; None is all before.
        runs: int64 `[batch, sequence]`: each token's document, of whole sequences; None is one per
            sequence.
        axis: the ranks of cp, which hold two chunks of each sequence; None is whole sequences.
        draws: which probabilities are dropped; None is for attention without dropout.
    """

    window: int | None = None
    runs: Tensor | None = None
    axis: MeshAxis | None = None
    draws: PairDraws | None = None

    def with_draws(self, draws: PairDraws) -> "ChainAttention":
        """See `DrawnPattern`."""
        return replace(self, draws=draws)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        if dropout and self.draws is None:
            raise ValueError(
                f"attention_dropout {dropout} of a model with invariant=True, and the context has "
                "no token_keys, by whose places numbers are drawn: give it those of the model's "
                "forward"
            )
        (batch, tokens), keys = query.shape[:2], key.shape[1]
        sequence = keys * (1 if self.axis is None else self.axis.size)
        # With a cache there are fewer queries than keys, and they are the last of the sequence.
        own = _own_runs(tokens, self.axis) if tokens == keys else (slice(keys - tokens, keys),)
        draws = self.draws if dropout else None
        plan = _Plan(scale, self.window, self.axis, self._documents(batch, sequence), own, draws)
        return applied(_Attend, query, key, value, plan)

    def _documents(self, batch: int, sequence: int) -> "tuple[_Span, ...]":
        """Rows of the batch and pieces of sequences that are documents."""
        if self.runs is None:
            return ((slice(0, batch), slice(0, sequence)),)
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


def _pieces(queries: slice, keys: slice, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Chunks of queries, and the keys among some that any of them attends to.

    Positions are those in a document. Chunks of queries are counted from its start, and so are
    chunks of keys if `keys` begin there.
    """
    for first in range(queries.start - queries.start % CHUNK, queries.stop, CHUNK):
        rows = slice(max(first, queries.start), min(first + CHUNK, queries.stop))
        lowest = 0 if window is None else max(rows.start - window + 1, 0)
        columns = slice(max(lowest - lowest % CHUNK, keys.start), min(rows.stop, keys.stop))
        if columns.start < columns.stop:
            yield rows, columns


def _moved(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)


def _scores(query: Tensor, key: Tensor, rows: slice, columns: slice, plan: "_Plan") -> Tensor:
    """Scores of queries and keys at some places; minus infinity where one does not attend."""
    scores = product(query, key.transpose(1, 2)) * plan.scale
    distance = torch.arange(rows.start, rows.stop, device=query.device)[:, None] - torch.arange(
        columns.start, columns.stop, device=query.device
    )
    apart = distance < 0
    if plan.window is not None:
        apart |= distance >= plan.window
    return scores.masked_fill_(apart, -torch.inf)


@dataclass(frozen=True)
class _Plan:
    """Who attends to whom, and which tokens are this rank's."""

    scale: float
    window: int | None
    axis: MeshAxis | None
    documents: tuple[_Span, ...]
    own: tuple[slice, ...]
    """Runs of this rank's tokens in the whole sequence, in their order here."""
    draws: PairDraws | None = None

    def kept(self, document: _Span, rows: slice, columns: slice) -> Tensor | None:
        """Factors of the probabilities of some pairs of a document; None without dropout."""
        if self.draws is None:
            return None
        return self.draws.factors(document[0], document[1].start, rows, columns)

    def whole(self, x: Tensor) -> Tensor:
        """Gather `[batch, tokens, ...]` over the ranks, in the order of the sequence."""
        tokens = TokenCut(context=self.axis, rows=x.shape[0])
        return torch.unflatten(tokens.whole(x.flatten(0, 1)), 0, (x.shape[0], -1))

    def pieces(self) -> Iterator[tuple[_Span, _Span, slice]]:
        """This rank's runs of each document.

        Yields:
            The document in whole sequences, the run here, and the run in the document.
        """
        for rows, document in self.documents:
            start = 0
            for run in self.own:
                first, last = max(run.start, document.start), min(run.stop, document.stop)
                if first < last:
                    here = slice(start + first - run.start, start + last - run.start)
                    inside = slice(first - document.start, last - document.start)
                    yield (rows, document), (rows, here), inside
                start += run.stop - run.start


def _own_runs(tokens: int, axis: MeshAxis | None) -> tuple[slice, ...]:
    """A rank's chunks, in zigzag order; `tokens` are those that it has."""
    if axis is None:
        return (slice(0, tokens),)
    chunk = tokens // 2
    early, late = axis.rank * chunk, (2 * axis.size - 1 - axis.rank) * chunk
    return slice(early, early + chunk), slice(late, late + chunk)


class _Attend(torch.autograd.Function):
    """Causal attention of each document; scores are computed again in backward.

    Ranks that share a sequence gather keys and values, and each computes the rows of its queries.
    In backward they gather queries too, and each computes the gradients of its keys and values from
    all of them. So no sum is cut.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        heads = query.shape[2]
        mixed = query.new_empty(*query.shape[:3], value.shape[-1])
        # The largest score of each row, and the sum of its exponentials.
        largest = query.new_empty(*query.shape[:3], 1, dtype=torch.float32)
        totals = torch.empty_like(largest)
        keys, values = plan.whole(key), plan.whole(value)
        for document, here, inside in plan.pieces():
            q = _heads_first(query[here], heads)
            k, v = (_heads_first(x[document], heads) for x in (keys, values))
            with_ones = torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)
            for rows, columns in _pieces(inside, slice(0, inside.stop), plan.window):
                own = _moved(rows, -inside.start)
                scores = _scores(q[:, own], k[:, columns], rows, columns, plan)
                top = scores.amax(dim=-1, keepdim=True)
                weights = (scores - top).exp_()
                sums = product(weights, with_ones[:, columns])
                place = here[0], _moved(own, here[1].start)
                total = sums[..., -1:]
                kept = plan.kept(document, rows, columns)
                if kept is not None:  # the total is that of all keys, dropped ones too
                    sums = product(weights * kept, with_ones[:, columns])
                mixed[place] = _tokens_first(sums[..., :-1] / total, heads).to(mixed.dtype)
                largest[place] = _tokens_first(top, heads)
                totals[place] = _tokens_first(total, heads)
        ctx.save_for_backward(query, key, value, mixed, largest, totals)
        ctx.plan = plan
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, largest, totals = ctx.saved_tensors
        plan: _Plan = ctx.plan
        mean = row_sum(grad.float() * mixed.float())
        given = _Rows(query, grad, mean, largest, totals)
        grads = [torch.empty_like(x) for x in (query, key, value)]
        if plan.axis is None:
            for document, here, inside in plan.pieces():
                pieces = _gradients(
                    given.at(here), key[document], value[document], inside, inside, document, plan
                )
                _store(grads, pieces, here)
            return *grads, None
        keys, values = plan.whole(key), plan.whole(value)
        everyone = _Rows(*(plan.whole(x) for x in given))
        for document, here, inside in plan.pieces():
            before = slice(0, inside.stop)
            rows, tokens = document
            reached = rows, slice(tokens.start, tokens.start + inside.stop)
            own = _gradients(
                given.at(here), keys[reached], values[reached], inside, before, document, plan
            )
            # Queries from the first of these keys on.
            first = inside.start - inside.start % CHUNK
            after = slice(first, tokens.stop - tokens.start)
            later = everyone.at((rows, slice(tokens.start + first, tokens.stop)))
            theirs = _gradients(later, key[here], value[here], after, inside, document, plan)
            _store(grads, (own[0], *theirs[1:]), here)
        return *grads, None


class _Rows(NamedTuple):
    """Rows of attention in backward, `[batch, tokens, heads, width]`."""

    query: Tensor
    grad: Tensor
    mean: Tensor
    """Of the gradients by a row's probabilities, weighted by these."""
    largest: Tensor
    totals: Tensor

    def at(self, span: _Span) -> "_Rows":
        """Some of them."""
        return _Rows(*(x[span] for x in self))


def _gradients(
    given: _Rows,
    key: Tensor,
    value: Tensor,
    queries: slice,
    keys: slice,
    document: _Span,
    plan: _Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of some queries, and of some keys and values, by the pairs of them.

    `queries` and `keys` are their places in the document. Results are float32, with heads and
    tokens in the order of attention's inputs; all query heads have keys of their own.
    """
    heads = given.query.shape[2]
    q, g, mean, top, total = (_heads_first(x, heads) for x in given)
    k, v = _heads_first(key, heads), _heads_first(value, heads)
    by_query, by_key, by_value = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns in _pieces(queries, keys, plan.window):
        r, c = _moved(rows, -queries.start), _moved(columns, -keys.start)
        scores = _scores(q[:, r], k[:, c], rows, columns, plan)
        shares = (scores - top[:, r]).exp_() / total[:, r]
        by_share = product(g[:, r], v[:, c].transpose(1, 2))
        kept = plan.kept(document, rows, columns)
        used = shares if kept is None else shares * kept
        by_share = by_share if kept is None else by_share * kept
        by_value[:, c] += product(used.transpose(1, 2), g[:, r])
        by_score = shares * (by_share - mean[:, r]) * plan.scale
        by_query[:, r] = product(by_score, k[:, c])
        by_key[:, c] += product(by_score.transpose(1, 2), q[:, r])
    by_query, by_key, by_value = (_tokens_first(x, heads) for x in (by_query, by_key, by_value))
    return by_query, by_key, by_value


def _store(grads: Sequence[Tensor], pieces: Sequence[Tensor], here: _Span) -> None:
    """Write gradients; those of query heads that share a key head are added in the tree."""
    for into, part in zip(grads, pieces, strict=True):
        if part.shape[2] != into.shape[2]:
            part = fold(torch.unflatten(part, 2, (into.shape[2], -1)), dim=3)
        into[here] = part.to(into.dtype)
