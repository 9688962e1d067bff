"""Attention put together from blocks of queries and keys.

Keys and values may all be here, or they may pass round a ring of ranks, whose gradients then follow
them. Pieces of a softmax over all keys are merged by the logs of their sums of exponentials
(Milakov and Gimelshein, 2018). torch's kernels return these logs. If their backward is given the
log of the whole softmax instead of the piece's own, it returns the piece's part of the gradients
(Liu et al., Ring Attention, 2023).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import send_recv
from lamina.collectives.engine import ring
from lamina.mesh.engine import group_ref, live_group
from lamina.models.attention.kernels import refuse_dropout
from lamina.models.base.applied import applied, in_dtype
from lamina.models.base.computing_device import computes_on
from lamina.models.compat import (
    flash_attention,
    flash_attention_backward,
    flash_attention_backward_for_cpu,
    flash_attention_for_cpu,
)

Gradients = tuple[Tensor, Tensor, Tensor]
Pieces = Callable[[int], Sequence["Piece"]]
"""What queries attend to of a rank's keys."""


@dataclass(frozen=True)
class Block:
    """The attention of some queries to some keys: tensors `[batch, heads, tokens, width]`.

    Keys and values may have fewer heads. Scores are multiplied by `scale`. Query i sees keys 0 .. i
    if `causal`, or those of `mask`, bool `[batch or 1, 1, queries, keys]`.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed values like `query`, and logs of sums `[batch, heads, queries]`.

        Logs are float32 or wider. For a query without any key they are -inf and its values are 0.
        """
        if computes_on(query) == "cpu":
            out, logs = flash_attention_for_cpu(
                query, key, value, 0.0, self.causal, attn_mask=self._bias(query), scale=self.scale
            )
            if self.mask is not None:
                # The kernel returns 0 for a query without any key.
                logs = logs.masked_fill(~self.mask.any(dim=-1), -torch.inf)
            return out, logs
        if _flash_on_cuda(query) and self.mask is None:
            outputs = flash_attention(query, key, value, 0.0, self.causal, False, scale=self.scale)
            return outputs[0], outputs[1]
        scores = self._scores(query, key)
        logs = scores.logsumexp(dim=-1)
        weights = (scores - _finite(logs)[..., None]).exp()
        return (weights @ _repeat(value, query).to(weights.dtype)).to(query.dtype), logs

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor
    ) -> Gradients:
        """Compute this piece's part of the gradients.

        `grad`, `out` and `logs` are those of the whole attention: the gradient of its result, the
        result, and its logs of sums.
        """
        if computes_on(query) == "cpu":
            gradients: Gradients = flash_attention_backward_for_cpu(
                grad, query, key, value, out, logs, 0.0, self.causal,
                attn_mask=self._bias(query), scale=self.scale,
            )  # fmt: skip
            return gradients
        if _flash_on_cuda(query) and self.mask is None:
            none = torch.empty(0, dtype=torch.int64, device=query.device)
            # Without dropout the kernel reads no seed and offset, nor lengths of equal sequences.
            gradients = flash_attention_backward(
                grad, query, _repeat(key, query), _repeat(value, query), out, logs.contiguous(),
                None, None,
                query.shape[2], key.shape[2], 0.0, self.causal, none, none, scale=self.scale,
            )  # fmt: skip
            by_query, by_key, by_value = gradients
            return by_query, _gather_heads(by_key, key), _gather_heads(by_value, value)
        weights = (self._scores(query, key) - _finite(logs)[..., None]).exp()
        grad, out = grad.to(weights.dtype), out.to(weights.dtype)
        keys, values = (_repeat(x, query).to(weights.dtype) for x in (key, value))
        by_weights = grad @ values.transpose(-1, -2) - (grad * out).sum(dim=-1, keepdim=True)
        by_scores = weights * by_weights * self.scale
        grad_key = by_scores.transpose(-1, -2) @ query.to(weights.dtype)
        grad_value = weights.transpose(-1, -2) @ grad
        return (
            (by_scores @ keys).to(query.dtype),
            _gather_heads(grad_key, key).to(key.dtype),
            _gather_heads(grad_value, value).to(value.dtype),
        )

    def _bias(self, query: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        bias = torch.zeros(self.mask.shape, dtype=query.dtype, device=query.device)
        return bias.masked_fill_(~self.mask, -torch.inf)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ _repeat(key, query).to(wide).transpose(-1, -2) * self.scale
        mask = self.mask
        if self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def merge(out: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor) -> None:
    """Merge another piece into `out` and `logs`, in place; both are float32 or wider."""
    total = torch.logaddexp(logs, more_logs)
    shift = _finite(total)
    out *= (logs - shift).exp()[..., None]
    out += more * (more_logs - shift).exp()[..., None]
    logs.copy_(total)


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf by 0, so that subtracting it from -inf gives -inf and not NaN."""
    return logs.masked_fill(logs == -torch.inf, 0.0)


def _flash_on_cuda(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return computes_on(query) == "cuda" and half and query.shape[-1] <= 256


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads for the queries that share them."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _gather_heads(grad: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients of heads that `_repeat` made."""
    return grad if grad.shape == x.shape else grad.view(*x.shape[:2], -1, *x.shape[2:]).sum(dim=2)


@dataclass(frozen=True)
class Piece:
    """A block of queries and a block of keys that they attend to."""

    queries: slice
    keys: slice
    block: Block

    def add_values(self, out: Tensor, logs: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Merge this piece into the result `out` and the `logs` of sums, both heads first.

        Logs are of sums of exponentials. Of the inputs the queries are heads first, keys and values
        not.
        """
        rows, columns = self.queries, self.keys
        query, keys, values = inputs[0], *(x.transpose(1, 2) for x in inputs[1:])
        more = self.block.forward(query[:, :, rows], keys[:, :, columns], values[:, :, columns])
        merge(out[:, :, rows], logs[:, :, rows], *more)

    def add_gradients(
        self,
        grad_query: Tensor,
        sums: Sequence[Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        whole: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add this piece's part of the gradients, and free what the kernel returned.

        `grad_query` and the `sums` of keys and values are `[batch, tokens, heads, width]`. Inputs
        are as of `add_values`. `whole` is the result's gradient, the result, and logs of sums,
        heads first.
        """
        rows, columns = self.queries, self.keys
        query, keys, values = inputs[0], *(x.transpose(1, 2) for x in inputs[1:])
        grad, out, logs = (x[:, :, rows] for x in whole)
        parts = self.block.backward(
            grad, query[:, :, rows], keys[:, :, columns], values[:, :, columns], out, logs
        )
        grad_query[:, rows] += parts[0].transpose(1, 2)
        for total, part in zip(sums, parts[1:], strict=True):
            total[:, columns] += part.transpose(1, 2)


def _add_each(sums: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add in place. As a function, so that no variable of the caller keeps the others alive."""
    for total, other in zip(sums, others, strict=True):
        total += other


def to_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Append zeros, as kernels need heads of one width, which is a multiple of 8 on a GPU.

    The zeros change neither scores nor values.
    """
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


@dataclass(frozen=True, eq=False)
class InPieces:
    """Attention over keys that this rank has: each allowed pair is in one of the pieces."""

    pieces: tuple[Piece, ...]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        refuse_dropout("InPieces", dropout)
        pieces = tuple(replace(p, block=replace(p.block, scale=scale)) for p in self.pieces)
        return attend_in_pieces(query, key, value, lambda _: pieces)


def attend_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend to this rank's keys and values, or over a group to those of all ranks in turn.

    Queries are `[batch, tokens, heads, width]`. Keys and values may have fewer heads, and values,
    as the result, another width. `pieces` gives what the queries attend to of the keys of a rank.
    Without a group all keys are here.
    """
    padded = to_one_width(query, key, value)
    return applied(_PiecedAttention, *padded, pieces, group)[..., : value.shape[-1]]


class _PiecedAttention(torch.autograd.Function):
    """Tensors are `[batch, tokens, heads, width]`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: Pieces,
        group: ProcessGroup | None,
    ) -> Tensor:
        mixed, logs = values_in_pieces(query, key, value, pieces, group)
        ctx.save_for_backward(query, key, value, mixed, logs)
        ctx.pieces, ctx.ref = pieces, group_ref(group)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mixed, logs = ctx.saved_tensors
        group = live_group(ctx.ref)
        return *gradients_in_pieces(grad, inputs, mixed, logs, ctx.pieces, group), None, None


# Tensors are laid out as they travel, tokens before heads; kernels see heads first.
def values_in_pieces(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Mixed values like `query`, and logs of sums `[batch, heads, queries]`, float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.transpose(1, 2)
    total = torch.zeros_like(query, dtype=wide)
    out = total.transpose(1, 2)
    logs = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    for source, (k, v) in ring((key, value), group):
        for piece in pieces(source):
            piece.add_values(out, logs, (q, k, v))
    return in_dtype(total, query.dtype), logs


def gradients_in_pieces(
    grad: Tensor,
    inputs: Sequence[Tensor],
    mixed: Tensor,
    logs: Tensor,
    pieces: Pieces,
    group: ProcessGroup | None,
) -> Gradients:
    """The gradients of the inputs (query, key, value), from what `values_in_pieces` returned."""
    query, key, value = inputs
    q, out, g = (x.transpose(1, 2) for x in (query, mixed, grad))
    grad_query = torch.zeros_like(query, dtype=logs.dtype)
    travelling: Any = None
    sums: list[Tensor] = []
    for source, (k, v) in ring((key, value), group):
        sums = [torch.zeros_like(x, dtype=logs.dtype) for x in (k, v)]
        for piece in pieces(source):
            piece.add_gradients(grad_query, sums, (q, k, v), (g, out, logs))
        if group is not None:
            # A block's gradients follow it one step behind, and end on its own rank (0606).
            if travelling is not None:
                _add_each(sums, travelling.wait())
            travelling = send_recv(sums, group)
    home = sums if travelling is None else travelling.wait()
    by_key, by_value = home
    return grad_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)
