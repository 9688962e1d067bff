"""Sums over a batch's tokens, which ranks may hold parts of, in one order.

The tokens of a batch are leaves in row-major order, and the sum is the tree of law 2 over them. If
a sequence has `GRANULE` times a power of two tokens, each sequence is a subtree. Then the sum over
a batch of a power of two of sequences is a subtree of the sum over all microbatches and
data-parallel ranks, which `reproducible=True` adds in the same tree.

See Note [Gradients over a cut sequence].
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamina.collectives.engine import start_all_gather
from lamina.ddp.engine import gradient_sink
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.configs.elements import CLAMPED
from lamina.models.invariance.products import fold

# Note [Gradients over a cut sequence]
# Ranks of cp are data-parallel ranks to a wrapper, which adds their gradients after those of the
# sequences in a microbatch. The tree wants the opposite: a sequence's tokens first. So each rank of
# cp computes the sum over whole sequences, but for its own rows of the parameter alone, and zeros
# elsewhere. The wrapper's sum then adds zeros, which is exact in any order. Parameters whose
# gradients are added over tp (`tp_grad="sum"`) have the same treatment there.


@dataclass
class TokenCut:
    """How the ranks cut a batch's tokens; all layers of a model share one.

    Attributes:
        tensor: the axis of tensor parallelism; None is one rank.
        sequence_parallel: whether its ranks have runs of the batch's tokens between the layers.
        context: the axis of context parallelism, in zigzag order; None if sequences are whole.
        rows: sequences in the batch, which a forward sets before its layers run.
    """

    tensor: MeshAxis | None = None
    sequence_parallel: bool = False
    context: MeshAxis | None = None
    rows: int = 1

    def of(self, x: Tensor) -> "TokenCut":
        """The cut of one call, whose backward may come after other forwards.

        Args:
            x: `[rows, tokens, ...]`, or `[tokens, width]` of the batch that the forward has set.
        """
        return replace(self, rows=x.shape[0] if x.ndim > 2 else self.rows)

    def whole(self, x: Tensor, *, scattered: bool = False) -> Tensor:
        """Gather `[tokens, ...]`, or sums of equally many tokens, in the batch's order.

        Args:
            x: this rank's tokens in the order of the batch.
            scattered: whether the ranks of sequence parallelism hold other tokens each.
        """
        if scattered and self.sequence_parallel and self.tensor is not None:
            x = start_all_gather(x, self.tensor.group, async_op=False).wait()
        if self.context is None:
            return x
        size = self.context.size
        x = start_all_gather(x, self.context.group, async_op=False).wait()
        # [cp, rows, 2 chunks, tokens of a chunk] to [rows, 2 cp chunks, tokens of a chunk]
        x = torch.unflatten(x, 0, (size, self.rows, 2, -1))
        early, late = x[:, :, 0], x[:, :, 1].flip(0)
        return torch.cat((early, late)).movedim(0, 1).flatten(0, 2)

    def piece(self, x: Tensor) -> Tensor:
        """This rank's part of what all have, `[rows, tokens, ...]` of whole sequences.

        `[rows, tokens / cp, ...]`, or `[tokens / tp, ...]` under sequence parallelism.
        """
        if self.context is not None:
            chunks = x.chunk(2 * self.context.size, dim=1)
            x = torch.cat((chunks[self.context.rank], chunks[-1 - self.context.rank]), dim=1)
        if self.sequence_parallel and self.tensor is not None:
            x = x.flatten(0, 1).chunk(self.tensor.size)[self.tensor.rank]
        return x

    def own_rows(self, length: int, *, partial: bool = False) -> slice:
        """The rows of a parameter of this length whose gradient this rank computes.

        Other ranks compute the others: those of cp, and with `partial` those of tp.
        """
        rank, size = 0, 1
        for axis in (self.context, self.tensor if partial else None):
            if axis is not None:
                rank, size = rank * axis.size + axis.rank, size * axis.size
        return slice(length * rank // size, length * (rank + 1) // size)

    def among_zeros(self, part: Tensor, length: int, *, partial: bool = False) -> Tensor:
        """Place the gradient of the own rows into one of zeros."""
        if len(part) == length:
            return part
        total = part.new_zeros(length, *part.shape[1:])
        total[self.own_rows(length, partial=partial)] = part
        return total


@dataclass(frozen=True)
class TokenSum:
    """Adds `[..., width]` over all tokens of the batch: the gradient of a vector parameter.

    Attributes:
        tokens: how they are cut.
        partial: whether a wrapper adds the gradients over ranks of tp, as these hold other tokens
            (or heads) each.
        per_head: the values are `[..., heads, width]`, and the heads are added within each token.
    """

    tokens: TokenCut
    partial: bool = False
    per_head: bool = False

    def __call__(self, values: Tensor) -> Tensor:
        """Sum in float32 over the tokens of all ranks: `[width]`, zeros but for the own part."""
        values = values.float()
        if self.per_head:
            values = over_heads(values, self.tokens.tensor if self.partial else None)
        values = values.flatten(0, -2)
        scattered = self.partial and not self.per_head
        runs = self._runs(values.shape[0], scattered)
        total = fold(self.tokens.whole(fold(values, leaves=runs), scattered=scattered))
        own = self.tokens.own_rows(len(total), partial=self.partial)
        return self.tokens.among_zeros(total[own], len(total), partial=self.partial)

    def _runs(self, tokens: int, scattered: bool) -> int:
        """The most neighbours that are a subtree wherever the ranks' tokens begin."""
        cut = self.tokens
        if cut.context is None:
            return tokens & -tokens
        # With sequence parallelism beside it, a rank's run may begin within a chunk.
        ranks = cut.tensor.size if scattered and cut.tensor is not None else 1
        chunk = tokens * ranks // (2 * cut.rows)
        return min(tokens & -tokens, chunk & -chunk)


def over_heads(values: Tensor, axis: MeshAxis | None) -> Tensor:
    """Add `[..., heads, width]` over heads in the tree: `[..., width]`.

    Ranks of the axis hold neighbours among the heads; None is one process with all.
    """
    heads = values.shape[-2]
    values = fold(values, dim=-2, leaves=heads & -heads)
    if axis is not None:
        dim = values.ndim - 2
        values = start_all_gather(values, axis.group, dim=dim, async_op=False).wait()
    return fold(values, dim=-2)


def share_with_heads(x: Tensor, shape: tuple[int, int], heads: int, tokens: TokenCut) -> Tensor:
    """Give all heads the same vectors; their gradients are added in the tree over all heads.

    Args:
        x: `[batch, sequence, width]`, or under sequence parallelism `[tokens / tp, width]`.
        shape: of the batch, sequences and tokens.
        heads: of this rank.
        tokens: how ranks cut the batch.

    Returns:
        `[batch, sequence, heads, width]`.
    """
    return applied(_ShareWithHeads, x, shape, heads, tokens)


class _ShareWithHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: tuple[int, int], heads: int, tokens: TokenCut
    ) -> Tensor:
        ctx.tokens, ctx.shape, ctx.dtype = tokens, x.shape, x.dtype
        if tokens.sequence_parallel and tokens.tensor is not None:
            x = start_all_gather(x, tokens.tensor.group, async_op=False).wait()
        return x.reshape(*shape, 1, -1).expand(-1, -1, heads, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens: TokenCut = ctx.tokens
        total = over_heads(grad.float(), tokens.tensor).flatten(0, -2)
        if tokens.sequence_parallel and tokens.tensor is not None:
            total = total.chunk(tokens.tensor.size)[tokens.tensor.rank]
        return total.reshape(ctx.shape).to(ctx.dtype), None, None, None


def delivered(parameter: Tensor | None, gradient: Tensor) -> Tensor | None:
    """What a backward returns as the gradient `[...]`, float32, of a parameter.

    It is written into a wrapper's bucket where there is one, so that it is not rounded to the
    parameter's dtype, and the result is None then. A parameter of None is no leaf.
    """
    sink = None if parameter is None else gradient_sink(parameter)
    if sink is None:
        return gradient
    if sink.accumulate:
        sink.view.add_(gradient)
    else:
        sink.view.copy_(gradient)
    sink.written()
    return None


def add_vector(x: Tensor, vector: Tensor, total: TokenSum) -> Tensor:
    """`x + vector` whose gradient of the vector `[width]` is summed by `total`."""
    return applied(_AddVector, x, vector, total)


class _AddVector(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor, total: TokenSum) -> Tensor:
        ctx.total, ctx.parameter = total, vector if vector.is_leaf else None
        return x + vector

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_vector = None
        if ctx.needs_input_grad[1]:
            by_vector = delivered(ctx.parameter, ctx.total(grad))
        return grad, by_vector, None


def sum_by_row(ids: Tensor, values: Tensor, rows: int, own: slice | None = None) -> Tensor:
    """Add the values of the tokens that chose each row of a table, in the tree over all tokens.

    A row's tokens are leaves among zeros, which change nothing, so only sums that have a token
    exist. In each level of the tree the two halves of a sum are added, and two numbers have one sum
    in either order.

    Args:
        ids: int64 `[tokens]`, in the order of the batch.
        values: `[tokens, width]`.
        rows: of the table.
        own: the rows to compute; zeros in the others. None is all.

    Returns:
        float32 `[rows, width]`.
    """
    tokens = ids.numel()
    total = values.new_zeros(rows, values.shape[1], dtype=torch.float32)
    place = torch.arange(tokens, device=ids.device)
    if own is not None:
        chosen = (ids >= own.start) & (ids < own.stop)
        ids, values, place = ids[chosen], values[chosen], place[chosen]
    if not ids.numel():
        return total
    values = values.float()
    for _ in range((tokens - 1).bit_length()):
        place = place >> 1
        key = place * rows + ids
        keys, where = torch.unique(key, return_inverse=True)
        if len(keys) < len(key):
            values = values.new_zeros(len(keys), values.shape[1]).index_add_(0, where, values)
            place, ids = keys // rows, keys % rows
    return total.index_add_(0, ids, values)


def look_up(weight: Tensor, ids: Tensor, tokens: TokenCut, *, partial: bool = False) -> Tensor:
    """Rows `[..., width]` of a table, for int64 ids `[...]`; their gradients in the tree.

    `partial` is as of `TokenSum`.
    """
    return applied(_LookUp, weight, ids, tokens.of(ids.unsqueeze(-1)), partial)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, tokens: TokenCut, partial: bool) -> Tensor:
        ctx.parameter, ctx.rows = weight if weight.is_leaf else None, weight.shape[0]
        ctx.tokens, ctx.partial = tokens, partial
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), tokens, partial = ctx.saved_tensors, ctx.tokens, ctx.partial
        ids, values = (
            tokens.whole(x, scattered=partial) for x in (ids.flatten(), grad.flatten(0, -2))
        )
        own = tokens.own_rows(ctx.rows, partial=partial)
        total = sum_by_row(ids, values, ctx.rows, own)
        return delivered(ctx.parameter, total), None, None, None


Activation = Callable[[Tensor], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid`, see Note [Functions of elements]."""
    return 0.5 + 0.5 * torch.tanh(0.5 * x)


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _gelu_sigmoid(x: Tensor) -> Tensor:
    return x * sigmoid(1.702 * x)


def _clamped_gate(x: Tensor) -> Tensor:
    return _gelu_sigmoid(x.clamp(max=CLAMPED))


# Note [Functions of elements]
# torch computes `silu`, `gelu`, `sigmoid` and `softplus` with vector instructions in most of a
# tensor and with the C library at its ends and where it has gaps, so an element's bits depend on
# its place. `exp`, `log`, `tanh` and `erf` are the same everywhere. tests/test_invariant_sums.py
# compares pieces with the whole.
ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": _gelu_sigmoid,
    "relu": torch.relu,
    "relu2": _relu_squared,
    "clamped": _clamped_gate,
}
"""Activation functions whose bits do not depend on an element's place, by name."""
_GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "swiglu_clamped": "clamped",
}


def by_elements(name: str) -> Activation:
    """The activation of a config's name, or that of its gate, in float32."""
    return partial(in_float32, ACTIVATIONS[_GATED.get(name, name)])


def in_float32(function: Activation, x: Tensor) -> Tensor:
    """Apply a function in float32 and round the result to the dtype of `x`."""
    return function(x.float()).to(x.dtype)
