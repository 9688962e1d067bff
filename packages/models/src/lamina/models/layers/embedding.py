"""Embeddings of tokens and positions, and the head that turns hidden states into logits."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.collectives import gather_from, reduce_from, reduce_scatter_to
from lamina.ddp.engine import gradient_sink
from lamina.mesh import mark
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.computing_device import computes_on
from lamina.models.base.config import Reduction, TransformerConfig
from lamina.models.base.initialise import fill, normal
from lamina.models.base.mesh_axes import MeshLike, axis_of, require_divisible
from lamina.models.invariance import token_sums
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.layer_products import InvariantProducts
from lamina.models.invariance.products import cut_blocks
from lamina.models.invariance.token_sums import TokenCut
from lamina.models.invariance.vocabulary import VocabularyLoss
from lamina.models.layers.linear import CutProduct, for_cut_layers, multiply
from lamina.models.layers.loss import (
    IGNORED,
    check_ids,
    check_reduction,
    linear_cross_entropy,
    softcapped,
    tokens_at_a_time,
)
from lamina.models.layers.matmul_products import may_sink


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows `[..., width]` of a table, for int64 ids `[...]`."""
    # On CUDA torch's backward sorts the ids, so that sums have one order. `index_add_` in `_LookUp`
    # would add in any order there.
    if computes_on(weight) == "cuda" or not may_sink(weight):
        return F.embedding(ids, weight)
    return applied(_LookUp, weight, ids)


class _LookUp(torch.autograd.Function):
    """`F.embedding` whose gradient is added into the bucket of the table's wrapper."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.parameter, ctx.rows = weight, weight.shape[0]
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        sink = gradient_sink(ctx.parameter)
        if sink is None:
            return torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False), None
        if not sink.accumulate:
            sink.view.zero_()
        sink.view.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(sink.view.dtype))
        sink.written()
        return None, None


class _Table(FixedSums, nn.Module):
    """A table of vectors, whole or with its rows cut over ranks, that draws its own weight."""

    axis: MeshAxis | None = None
    partial = False
    init_std: float
    init_seed: int | None = None
    weight: nn.Parameter

    def rows_of(self, ids: Tensor) -> Tensor:
        """Rows `[..., width]` of this rank's table, for int64 ids `[...]` of its rows."""
        if self.tokens is None:
            return look_up(self.weight, ids)
        return token_sums.look_up(self.weight, ids, self.tokens, partial=self.partial)

    def reset_parameters(self) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2); mark its role."""
        dim = None if self.axis is None else 0
        mark(self.weight, tp_shard_dim=dim, tp_grad="sum" if self.partial else None)
        fill(self.weight, normal(self.init_std), self.init_seed, self.axis)

    def extra_repr(self) -> str:
        """Sizes of this rank's rows, for printing."""
        (rows, width), size = self.weight.shape, 1 if self.axis is None else self.axis.size
        return f"{rows} x {width}, rows cut by {size}, partial={self.partial}"


class VocabParallelEmbedding(_Table):
    """A table of vectors whose rows are cut over ranks (Shoeybi et al., 2019).

    Args:
        rows: number of ids.
        width: of a vector.
        mesh: has an axis `tp`, or is that axis; None is one process.
        sequence_parallel: return this rank's tokens only, `[tokens / size, width]`.
        init_std: standard deviation of the initial weight.
        vocab_size: ids that exist; rows from there on are padding. None: all rows are ids.
        reduction: who sums over the ranks, see `TransformerConfig.tp_reduction`.

    Raises:
        ValueError: if `rows` is not divisible by the number of ranks, or fewer than the ids.

    Examples:
        >>> VocabParallelEmbedding(256, 64)(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 64])
    """

    def __init__(
        self,
        rows: int,
        width: int,
        mesh: MeshLike = None,
        *,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        vocab_size: int | None = None,
        reduction: Reduction = "ordered",
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.axis = axis_of(mesh, "tp")
        self.rows = rows
        self.vocab_size = rows if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= rows:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, the table has {rows} rows: "
                f"it must be 1 to {rows}"
            )
        self.sequence_parallel = sequence_parallel and self.axis is not None
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(require_divisible("rows", rows, self.axis), width))
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up int64 ids `[batch, sequence]`: `[batch, sequence, width]`.

        Raises:
            ValueError: on a CPU, for ids that do not exist. On a GPU their vectors are NaN if the
                table is cut; if it is whole, the device's own check ends the program.
        """
        check_ids("tokens", ids, self.vocab_size)
        if self.axis is None:
            if self.vocab_size < self.rows:  # torch would return rows of the padding
                ids = torch.where(ids < self.vocab_size, ids, self.rows)
            return self.rows_of(ids)
        row = ids - self.axis.rank * self.weight.shape[0]
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        strange = (ids < 0) | (ids >= self.vocab_size)
        vectors = self.rows_of(row.masked_fill(elsewhere, 0))
        # All ranks but one contribute zeros, so the sum is exact in any dtype.
        filler = torch.where(strange, torch.nan, 0.0).to(vectors.dtype)
        vectors = torch.where((elsewhere | strange)[..., None], filler[..., None], vectors)
        if self.sequence_parallel:
            return reduce_scatter_to(
                vectors.flatten(0, 1), self.axis.group, reduction=self.reduction
            )
        return reduce_from(vectors, self.axis.group, reduction=self.reduction)


class PositionEmbedding(_Table):
    """A table of learned vectors, one per position, whole on every rank.

    With `partial` each tensor-parallel rank sees other tokens, so that gradients are summed.
    """

    def __init__(
        self, rows: int, width: int, *, partial: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.partial = partial
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def forward(self, positions: Tensor) -> Tensor:
        """Look up int64 positions `[...]`: `[..., width]`."""
        return self.rows_of(positions)


class OutputHead(_Table):
    """Hidden states to logits, or to the loss if labels are given.

    The axis `tp` cuts the vocabulary. `tied` is the weight of an embedding to use instead of an own
    one.
    """

    def __init__(
        self, config: TransformerConfig, mesh: MeshLike = None, tied: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.axis = axis_of(mesh, "tp")
        self.fixed: InvariantProducts | None = None
        self.init_std = config.init_std
        self.tied = tied is not None
        if tied is None:
            rows = require_divisible("padded vocabulary", config.padded_vocab_size, self.axis)
            tied = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.weight = tied
        bias = torch.empty(tied.shape[0]) if config.head_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, unless it is tied: then the embedding draws it. Set a bias to zeros."""
        if self.bias is not None:
            mark(self.bias, tp_shard_dim=None if self.axis is None else 0)
            nn.init.zeros_(self.bias)
        if not self.tied:
            super().reset_parameters()

    def fix_sums(self, tokens: TokenCut) -> None:
        """See `FixedSums`; ValueError if the ranks do not divide the blocks of a width."""
        super().fix_sums(tokens)
        config, size = self.config, 1 if self.axis is None else self.axis.size
        inner, outer = (
            cut_blocks((config.hidden_size,)),
            cut_blocks((config.padded_vocab_size,), size),
        )
        self.fixed = InvariantProducts(tokens, inner, outer)

    def _fixed_logits(self, hidden: Tensor, products: InvariantProducts) -> Tensor:
        """Logits `[..., rows / size]` of all tokens."""
        ref = None if self.axis is None else self.axis.ref
        cut = CutProduct(ref, "output", products.tokens.sequence_parallel, "ordered")
        return multiply(hidden, self.weight, None, cut, products)

    def _fixed_loss(self, hidden: Tensor, labels: Tensor, products: InvariantProducts) -> Tensor:
        """The sum of the cross-entropies of labels `[tokens]`."""
        config = self.config
        chunk = config.loss_chunk or tokens_at_a_time(self.weight.shape[0])
        sizes = config.padded_vocab_size, config.vocab_size, IGNORED, chunk
        return VocabularyLoss(products, self.axis, *sizes)(hidden, self.weight, labels)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Compute logits `[..., vocabulary]`, or with labels the cross-entropy.

        `hidden` is `[..., hidden]`, or `[tokens / size, hidden]` under sequence parallelism, which
        gives logits of all tokens. Labels, int64, are of all tokens in the same order; -100 is left
        out. Logits are equal on every rank. The loss, a `mean` over the labels that count or a
        `sum`, is a scalar in float32 (float64 for float64). ValueError: another reduction, or
        labels that are not one per token.
        """
        check_reduction(reduction)
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
        products = None if self.fixed is None else self.fixed.of(hidden)
        if products is None:
            hidden = for_cut_layers(hidden, self.config, self.axis)
        if labels is None:
            logits = (
                softcapped(F.linear(hidden, self.weight, self.bias), self.config.logit_softcap)
                if products is None
                else self._fixed_logits(hidden, products)
            )
            if self.axis is not None:
                logits = gather_from(logits, self.axis.group, dim=-1)
            return logits[..., : self.config.vocab_size]
        flat, labels = hidden.flatten(0, -2), labels.flatten()
        if products is not None:
            total = self._fixed_loss(flat, labels, products)
        else:
            total = linear_cross_entropy(
                flat,
                self.weight,
                labels,
                self.axis,
                vocab_size=self.config.vocab_size,
                chunk=self.config.loss_chunk,
                bias=self.bias,
                softcap=self.config.logit_softcap,
            )
        return total / (labels != IGNORED).sum().clamp(min=1) if reduction == "mean" else total
