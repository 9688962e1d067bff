"""Norms of whole ShardedTensors, many with one communication, and GradScaler's finite check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lamina.buffers.tensors.handlers import HandlerTable, SpanTensor
from lamina.buffers.tensors.span_reductions import pieces, reduce_over_ranks, refuse_dims
from lamina.buffers.tensors.span_spec import ReduceOp, SpanSpec

__all__ = ["HANDLERS"]

HANDLERS = HandlerTable()
aten = torch.ops.aten


def _norm_op(order: float) -> ReduceOp:
    return "max" if order == math.inf else "min" if order == -math.inf else "sum"


def _partial_norm(local: torch.Tensor, order: float) -> torch.Tensor:
    """A span's share of a norm in fp64: sum of powers, or the extreme."""
    shares = [_share(piece, order) for piece in pieces(local)]
    if not shares:
        start = math.inf if order == -math.inf else 0.0
        return torch.full((), start, dtype=torch.float64, device=local.device)
    if len(shares) == 1:
        return shares[0]
    together = torch.stack(shares)
    op = _norm_op(order)
    return together.sum() if op == "sum" else together.max() if op == "max" else together.min()


def _share(piece: torch.Tensor, order: float) -> torch.Tensor:
    wide = piece.abs().double() if piece.is_complex() else piece.double()
    if order == 2:
        return torch.dot(wide, wide)
    if order == 0:
        return torch.count_nonzero(wide).double()
    size = wide.abs()
    if order == math.inf:
        return size.max()
    return size.min() if order == -math.inf else size.pow(order).sum()


def _norms(operation: str, tensors: Sequence[SpanTensor], order: float) -> list[torch.Tensor]:
    """Norms of whole tensors in fp64, with one communication for all of them.

    Raises:
        NotImplementedError: the tensors are cut over different ranks.
    """
    partial = torch.stack([_partial_norm(tensor._local, order) for tensor in tensors])
    cut = [place for place, tensor in enumerate(tensors) if tensor._spec.is_cut]
    if cut:
        spec = tensors[cut[0]]._spec
        communicator = spec.reach(operation)
        for place in cut:
            other = tensors[place]._spec
            if other.axes != spec.axes and other.communicator != communicator:
                raise NotImplementedError(
                    f"{operation} over ShardedTensors of different meshes ({spec.where()} and "
                    f"{other.where()}) in one call: use lamina.ddp.clip_grad_norm, which counts "
                    "every parameter once on every mesh"
                )
        where = torch.tensor(cut, device=partial.device)
        partial = partial.index_copy(
            0, where, _all_reduce_norms(spec, operation, partial[where], _norm_op(order))
        )
    if order not in (0.0, math.inf, -math.inf):
        partial = partial.sqrt() if order == 2 else partial.pow(1.0 / order)
    return list(partial.unbind())


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


def _all_reduce_norms(
    spec: SpanSpec, operation: str, partial: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    if op == "sum":
        return reduce_over_ranks(spec, operation, partial, op)
    # As in _extremes: the flag travels beside a number.
    is_nan = torch.isnan(partial)
    lost = 0.0 if op == "max" else math.inf
    flag = is_nan.to(partial.dtype) if op == "max" else -is_nan.to(partial.dtype)
    both = reduce_over_ranks(
        spec, operation, torch.cat([partial.masked_fill(is_nan, lost), flag]), op
    )
    value, flags = both.chunk(2)
    return torch.where(flags != 0, math.nan, value)


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
    func: torch._ops.OpOverload,
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
    func: torch._ops.OpOverload,
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
    func: torch._ops.OpOverload,
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
