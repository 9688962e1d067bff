"""Norms over elements that lie in pieces, here and on other ranks, and GradScaler's finite check.

`PNorm` is the one definition of a norm: `torch.nn.utils.clip_grad_norm_` over `ShardedTensor`s and
`lamina.ddp.clip_grad_norm` both add up with it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lamina.buffers.compat import OpOverload
from lamina.buffers.tensors.handlers import HandlerTable, SpanTensor
from lamina.buffers.tensors.span_reductions import (
    extremes_over_ranks,
    pieces,
    reduce_over_ranks,
    refuse_dims,
)
from lamina.buffers.tensors.span_spec import ReduceOp

__all__ = ["HANDLERS", "PNorm"]

HANDLERS = HandlerTable()
aten = torch.ops.aten


@dataclass(frozen=True)
class PNorm:
    """A norm as shares that pieces have in it: sums of powers, counts or extremes, all in fp64.

    A norm is `root` of the shares of all pieces, combined by `join` on a rank and by a reduction
    with `op` over ranks. Only the caller rounds, once.

    Attributes:
        order: p of the norm; 0 counts, `inf` and `-inf` are the extremes of magnitudes.
    """

    order: float

    @property
    def op(self) -> ReduceOp:
        """How the shares of several ranks are combined."""
        return "max" if self.order == math.inf else "min" if self.order == -math.inf else "sum"

    def empty(self, device: torch.device) -> torch.Tensor:
        """The share of no elements: fp64, no dimensions."""
        nothing = math.inf if self.op == "min" else 0.0
        return torch.full((), nothing, dtype=torch.float64, device=device)

    def share(self, local: torch.Tensor) -> torch.Tensor:
        """The share of the elements of a plain tensor of any shape: fp64, no dimensions."""
        shares = [self._share(piece) for piece in pieces(local.reshape(-1))]
        return functools.reduce(self.join, shares) if shares else self.empty(local.device)

    def _share(self, piece: torch.Tensor) -> torch.Tensor:
        wide = piece.abs().double() if piece.is_complex() else piece.double()
        if self.order == 2:
            return torch.dot(wide, wide)
        if self.order == 0:
            return torch.count_nonzero(wide).double()
        size = wide.abs()
        if self.op == "sum":
            return size.pow(self.order).sum()
        return size.max() if self.op == "max" else size.min()

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The share of two pieces from theirs."""
        if self.op == "sum":
            return one + other
        return torch.maximum(one, other) if self.op == "max" else torch.minimum(one, other)

    def root(self, total: torch.Tensor) -> torch.Tensor:
        """The norm from the share of everything."""
        if self.op != "sum" or self.order == 0:
            return total
        return total.sqrt() if self.order == 2 else total.pow(1.0 / self.order)


def _norms(operation: str, tensors: Sequence[SpanTensor], order: float) -> list[torch.Tensor]:
    """Norms of whole tensors in fp64, with one communication for all of them.

    Raises:
        NotImplementedError: the tensors are cut over different ranks.
    """
    norm = PNorm(order)
    shares = torch.stack([norm.share(tensor._local) for tensor in tensors])
    cut = [index for index, tensor in enumerate(tensors) if tensor._spec.is_cut]
    if cut:
        spec = tensors[cut[0]]._spec
        communicator = spec.reach(operation)
        for index in cut:
            other = tensors[index]._spec
            if other.axes != spec.axes and other.communicator != communicator:
                raise NotImplementedError(
                    f"{operation} over ShardedTensors of different meshes ({spec.where()} and "
                    f"{other.where()}) in one call: use lamina.ddp.clip_grad_norm, which counts "
                    "every parameter once on every mesh"
                )
        where = torch.tensor(cut, device=shares.device)
        over_ranks = reduce_over_ranks if norm.op == "sum" else extremes_over_ranks
        shares = shares.index_copy(0, where, over_ranks(spec, operation, shares[where], norm.op))
    return list(norm.root(shares).unbind())


def _refuse_parts(operation: str, tensors: Sequence[SpanTensor]) -> None:
    """Many norms make one of a model, and these tensors are only this rank's part of theirs.

    An axis may say so: its `apart` are the names of the other axes that have cut the model.
    """
    for spec in (tensor._spec for tensor in tensors):
        names = [name for axis in spec.axes for name in getattr(axis, "apart", ())]
        if names:
            raise NotImplementedError(
                f"{operation} over ShardedTensors ({spec.where()}) of a model that is cut over "
                f"{' and '.join(dict.fromkeys(names))} too would be the norm of this rank's part: "
                "use lamina.ddp.clip_grad_norm, which counts every parameter once on every mesh"
            )


def _rounded(norm: torch.Tensor, tensor: SpanTensor, dtype: torch.dtype | None) -> torch.Tensor:
    return norm.to(dtype or torch.empty(0, dtype=tensor.dtype).abs().dtype)


@HANDLERS.handles(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
)
def _norm(
    func: OpOverload,
    tensor: SpanTensor,
    order: float | None = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    refuse_dims(func, tensor, dim, keepdim)
    (norm,) = _norms(str(func), [tensor], 2.0 if order is None else float(order))
    return _rounded(norm, tensor, dtype)


@HANDLERS.handles(aten._foreach_norm.Scalar)
def _foreach_norm(
    func: OpOverload,
    tensors: Sequence[torch.Tensor],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    sharded = [tensor for tensor in tensors if isinstance(tensor, SpanTensor)]
    _refuse_parts("torch._foreach_norm", sharded)
    norms = iter(_norms("torch._foreach_norm", sharded, float(order)))
    return [
        _rounded(next(norms), tensor, dtype)
        if isinstance(tensor, SpanTensor)
        else torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for tensor in tensors
    ]


@HANDLERS.handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(
    func: OpOverload,
    tensors: Sequence[torch.Tensor],
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """GradScaler: a span that is finite must still skip the step if another rank's is not."""
    locals_ = [one._local if isinstance(one, SpanTensor) else one for one in tensors]
    func(locals_, found_inf, inv_scale)
    reached = []
    for tensor in tensors:
        spec = tensor._spec if isinstance(tensor, SpanTensor) else None
        if spec is not None and spec.is_cut and spec.axes not in reached:
            reached.append(spec.axes)
            communicator = spec.reach("GradScaler.unscale_")
            found_inf.copy_(communicator.all_reduce(found_inf.double(), "max"))
