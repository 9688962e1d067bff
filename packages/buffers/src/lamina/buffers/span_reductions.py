"""Sums, norms, extremes and truth values over the whole of a ShardedTensor.

Each rank reduces its span in fp64 (integers in int64), the communicator reduces the small result,
and it is rounded once to the result's dtype. All of them are collective where the tensor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .span_spec import ReduceOp, SpanSpec

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

__all__ = ["HANDLERS"]

Handler: TypeAlias = Callable[..., Any]
HANDLERS: dict[torch._ops.OpOverload, Handler] = {}
aten = torch.ops.aten

# torch converts a tensor to fp64 before it sums it in fp64: piece by piece, the copy stays small.
_CHUNK = 1 << 22


def _handles(*overloads: torch._ops.OpOverload) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for overload in overloads:
            HANDLERS[overload] = handler
        return handler

    return register


def _reduce(spec: SpanSpec, operation: str, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    if not spec.is_cut:
        return value
    return spec.reach(operation).all_reduce(value, op)


def _rest(args: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """Positional arguments completed by the schema's defaults, which torch leaves out."""
    return args + defaults[len(args) :]


def _refuse_dims(func: torch._ops.OpOverload, tensor: ShardedTensor, dim: Any, keep: bool) -> None:
    """Only reductions over all dimensions are right on a span."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    ndim = tensor.dim()
    if keep or (dims and len({one % max(ndim, 1) for one in dims}) < ndim):
        raise NotImplementedError(
            f"{func} over dimensions {dims} (keepdim={keep}) of a ShardedTensor of shape "
            f"{list(tensor.shape)}: a span holds parts of rows. Reduce over all dimensions, or use "
            ".full_tensor()"
        )


def _pieces(local: torch.Tensor) -> Iterator[torch.Tensor]:
    for at in range(0, local.numel(), _CHUNK):
        yield local[at : at + _CHUNK]


def _partial_sum(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum of a span in `dtype`, a 0-d tensor."""
    total = torch.zeros((), dtype=dtype, device=local.device)
    for piece in _pieces(local):
        total += piece.sum(dtype=dtype)
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        raise NotImplementedError(
            f"reductions of {dtype} ShardedTensors: use torch.view_as_real on .full_tensor()"
        )
    return torch.float64 if dtype.is_floating_point else torch.int64


@_handles(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor: ShardedTensor = args[0]
    if func is aten.sum.dim_IntList:
        dim, keep = _rest(args, None, None, False)[1:]
        _refuse_dims(func, tensor, dim, bool(kwargs.get("keepdim", keep)))
    dtype = kwargs.get("dtype") or (tensor.dtype if tensor.dtype.is_floating_point else torch.int64)
    local = tensor._local.to(dtype) if dtype != tensor.dtype else tensor._local
    total = _partial_sum(local, _wide(dtype))
    return _reduce(tensor._spec, "sum()", total, "sum").to(dtype)


@_handles(aten.mean.default)
def _mean(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor: ShardedTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        raise RuntimeError(f"mean() needs a floating dtype, got {dtype}: pass dtype=")
    total = _reduce(tensor._spec, "mean()", _partial_sum(tensor._local, torch.float64), "sum")
    return (total / tensor._spec.numel).to(dtype)


@_handles(aten.var.correction, aten.std.correction)
def _variance(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Two passes, as differences of large sums lose digits."""
    tensor, dim = _rest(args, None, None)
    _refuse_dims(func, tensor, dim, bool(kwargs.get("keepdim", False)))
    correction = kwargs.get("correction")
    spec, local = tensor._spec, tensor._local
    mean = _reduce(spec, str(func), _partial_sum(local, torch.float64), "sum") / spec.numel
    squares = torch.zeros((), dtype=torch.float64, device=local.device)
    for piece in _pieces(local):
        squares += (piece.double() - mean).square().sum()
    total = _reduce(spec, str(func), squares, "sum")
    variance = total / max(spec.numel - (1 if correction is None else correction), 0)
    return (variance.sqrt() if func is aten.std.correction else variance).to(tensor.dtype)


@_handles(aten.dot.default, aten.vdot.default)
def _dot(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    left, right = args
    if not (isinstance(left, cls) and isinstance(right, cls) and left._spec.matches(right._spec)):
        raise ValueError(f"{func}: both operands must be ShardedTensors cut alike")
    total = torch.zeros((), dtype=_wide(left.dtype), device=left.device)
    for a, b in zip(_pieces(left._local), _pieces(right._local), strict=True):
        total += (a.to(total.dtype) * b.to(total.dtype)).sum()
    return _reduce(left._spec, "dot()", total, "sum").to(left.dtype)


@_handles(aten.count_nonzero.default)
def _count_nonzero(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor: ShardedTensor = args[0]
    return _reduce(tensor._spec, "count_nonzero()", torch.count_nonzero(tensor._local), "sum")


@_handles(aten.all.default, aten.any.default)
def _truth(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor: ShardedTensor = args[0]
    op: ReduceOp = "min" if func is aten.all.default else "max"
    mine = func(tensor._local).to(torch.int64)
    return _reduce(tensor._spec, f"{func}", mine, op).to(torch.bool)


@_handles(aten.equal.default)
def _equal(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    left, right = args
    if not (isinstance(left, cls) and isinstance(right, cls)):
        raise NotImplementedError(
            "torch.equal of a ShardedTensor and a plain tensor: compare .full_tensor()"
        )
    if left.shape != right.shape:
        return False
    if not left._spec.matches(right._spec):
        raise ValueError("torch.equal: operands are cut differently: compare .full_tensor()")
    mine = torch.tensor(int(torch.equal(left._local, right._local)), device=left.device)
    return bool(_reduce(left._spec, "torch.equal", mine, "min").item())


@_handles(aten.allclose.default)
def _allclose(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    return bool(torch.isclose(*args, **kwargs).all().item())


@_handles(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
def _extreme(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor: ShardedTensor = args[0]
    if func in (aten.amax.default, aten.amin.default):
        dim, keep = _rest(args, None, (), False)[1:]
        _refuse_dims(func, tensor, kwargs.get("dim", dim), bool(kwargs.get("keepdim", keep)))
    if not tensor._spec.numel:
        raise RuntimeError(f"{func} of an empty tensor of shape {list(tensor.shape)}")
    op: ReduceOp = "max" if func in (aten.max.default, aten.amax.default) else "min"
    return _extremes(tensor._spec, str(func), tensor._local, op).to(tensor.dtype)


def _extremes(spec: SpanSpec, name: str, local: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The largest or smallest element of the whole; NaN wins, as in torch."""
    wide = _wide(local.dtype)
    if wide is torch.int64:
        info = torch.iinfo(torch.int64)
        bound: float | int = info.min if op == "max" else info.max
    else:
        bound = -math.inf if op == "max" else math.inf
    mine = torch.full((2,), bound, dtype=wide, device=local.device)
    if local.numel():
        mine[0] = (local.max() if op == "max" else local.min()).to(wide)
    # Backends differ in what max(1, NaN) is: send the flag beside a number.
    is_nan = torch.isnan(mine[0])
    mine[0] = torch.where(is_nan, torch.full_like(mine[0], bound), mine[0])
    mine[1] = is_nan.to(wide) if op == "max" else -is_nan.to(wide)
    value, flag = _reduce(spec, name, mine, op).unbind()
    return torch.where(flag != 0, math.nan, value) if wide is torch.float64 else value


@_handles(aten._local_scalar_dense.default)
def _item(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    tensor: ShardedTensor = args[0]
    if tensor._spec.numel != 1:
        raise RuntimeError(f"a tensor of {tensor._spec.numel} elements is no Python scalar")
    # Exactly one rank holds the element, the others add nothing.
    total = _partial_sum(tensor._local, _wide(tensor.dtype))
    value = _reduce(tensor._spec, "item()", total, "sum").item()
    return bool(value) if tensor.dtype is torch.bool else value


# -- norms --------------------------------------------------------------------------------------


def _norm_op(order: float) -> ReduceOp:
    return "max" if order == math.inf else "min" if order == -math.inf else "sum"


def _partial_norm(local: torch.Tensor, order: float) -> torch.Tensor:
    """A span's share of a norm in fp64: sum of powers, or the extreme."""
    start = math.inf if order == -math.inf else 0.0
    total = torch.full((), start, dtype=torch.float64, device=local.device)
    for piece in _pieces(local):
        wide = piece.to(torch.float64).abs() if not piece.is_complex() else piece.abs().double()
        if order == math.inf:
            total = torch.maximum(total, wide.max())
        elif order == -math.inf:
            total = torch.minimum(total, wide.min())
        elif order == 0:
            total += torch.count_nonzero(wide)
        elif order == 2:
            total += torch.dot(wide, wide)
        else:
            total += wide.pow(order).sum()
    return total


def _norms(operation: str, tensors: Sequence[ShardedTensor], order: float) -> list[torch.Tensor]:
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


def _all_reduce_norms(
    spec: SpanSpec, operation: str, partial: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    if op == "sum":
        return _reduce(spec, operation, partial, op)
    # As in _extremes: the flag travels beside a number.
    is_nan = torch.isnan(partial)
    lost = 0.0 if op == "max" else math.inf
    flag = is_nan.to(partial.dtype) if op == "max" else -is_nan.to(partial.dtype)
    both = _reduce(spec, operation, torch.cat([partial.masked_fill(is_nan, lost), flag]), op)
    value, flags = both.chunk(2)
    return torch.where(flags != 0, math.nan, value)


def _rounded(norm: torch.Tensor, tensor: ShardedTensor, dtype: torch.dtype | None) -> torch.Tensor:
    return norm.to(dtype or torch.empty(0, dtype=tensor.dtype).abs().dtype)


@_handles(aten.linalg_vector_norm.default)
def _vector_norm(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor, order, dim, keep = _rest(args, None, 2, None, False)
    _refuse_dims(func, tensor, dim, bool(keep))
    return _rounded(_norms(str(func), [tensor], float(order))[0], tensor, kwargs.get("dtype"))


@_handles(
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
)
def _norm(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    tensor, order, dim, keep = _rest(args, None, 2, None, False)
    _refuse_dims(func, tensor, dim, bool(keep))
    order = 2.0 if order is None else float(order)
    return _rounded(_norms(str(func), [tensor], order)[0], tensor, kwargs.get("dtype"))


@_handles(aten._foreach_norm.Scalar)
def _foreach_norm(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[torch.Tensor]:
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    sharded = [tensor for tensor in tensors if isinstance(tensor, cls)]
    norms = iter(_norms("torch._foreach_norm", sharded, order))
    return [
        _rounded(next(norms), tensor, dtype)
        if isinstance(tensor, cls)
        else torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for tensor in tensors
    ]


@_handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """GradScaler: a span that is finite must still skip the step if another rank's is not."""
    tensors, found_inf, inv_scale = args
    locals_ = [one._local if isinstance(one, cls) else one for one in tensors]
    func(locals_, found_inf, inv_scale)
    reached = []
    for tensor in tensors:
        if isinstance(tensor, cls) and tensor._spec.is_cut:
            communicator = tensor._spec.reach("GradScaler.unscale_")
            if communicator not in reached:
                reached.append(communicator)
                found_inf.copy_(communicator.all_reduce(found_inf.double(), "max"))
