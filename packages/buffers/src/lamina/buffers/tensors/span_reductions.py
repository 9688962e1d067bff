"""Sums, norms, extremes and truth values over the whole of a ShardedTensor; GradScaler's check.

Each rank reduces its span in fp64 (integers in int64), the communicator reduces the small result,
and it is rounded once to the result's dtype. All of them are collective where the tensor is cut.

`PNorm` is the one definition of a norm: `torch.nn.utils.clip_grad_norm_` over `ShardedTensor`s and
`lamina.ddp.clip_grad_norm` both add up with it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from lamina.buffers.compat import OpOverload
from lamina.buffers.tensors.span_tensor import (
    HandlerTable,
    ReduceOp,
    SpanCommunicator,
    SpanSpec,
    SpanTensor,
)

OPTIMIZER = (
    "An optimizer that looks at one tensor at a time as a whole has to be given to the wrapper, "
    "fully_shard(model, optimizer) or ShardedOptimizer, with keep_tensors_whole=True (for torch's "
    "Adafactor and Muon fully_shard needs no setting)"
)
HANDLERS = HandlerTable()
aten = torch.ops.aten

# Elements. torch converts a tensor to fp64 before it sums it in fp64. Piece by piece the copy stays
# small, and on a CPU it stays in cache.
_CHUNK = 1 << 20
_IN_DOUBLE = partial(torch.sum, dtype=torch.float64)


def reduce_over_ranks(
    spec: SpanSpec, operation: str, value: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    """Reduce a small tensor where the tensor is cut; `operation` is for the error without a way.

    A NaN wins over all other numbers, as it does in torch.
    """
    if spec.is_cut:
        value = _reduced(spec.reach(operation), value, op)
    return value if spec.beyond is None else _reduced(spec.beyond, value, op)


def _reduced(communicator: SpanCommunicator, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    if op == "sum" or not value.is_floating_point():
        return communicator.all_reduce(value, op)
    # Backends differ in what max(1, NaN) is, so a flag travels beside each number.
    flat, sign = value.reshape(-1), 1.0 if op == "max" else -1.0
    flagged = torch.cat([flat.masked_fill(flat.isnan(), -sign * math.inf), sign * flat.isnan()])
    extremes, flags = communicator.all_reduce(flagged, op).chunk(2)
    return torch.where(flags != 0, math.nan, extremes).view(value.shape)


def refuse_dims(func: OpOverload, tensor: SpanTensor, dim: Any, keep: bool) -> None:
    """Only reductions over all dimensions are right on a span."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    ndim = tensor.dim()
    if keep or (dims and len({each % max(ndim, 1) for each in dims}) < ndim):
        raise NotImplementedError(
            f"{func} over dimensions {dims} (keepdim={keep}) of a ShardedTensor of "
            f"{tensor._spec.described()}: a span holds parts of rows. Reduce over all dimensions, "
            f"or use .full_tensor(). {OPTIMIZER}"
        )


def pieces(local: torch.Tensor) -> list[torch.Tensor]:
    """Runs of a flat tensor that are small enough to be converted to fp64 one after the other."""
    length = _CHUNK if local.device.type == "cpu" else 4 * _CHUNK  # fewer launches
    return [local[start : start + length] for start in range(0, local.numel(), length)]


def _total(
    operation: object,
    *tensors: SpanTensor,
    of: Callable[..., Any] = _IN_DOUBLE,
    wide: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The sum of `of(elements)` over the whole of tensors that are cut alike: `wide`, 0-d."""
    total = torch.zeros((), dtype=wide, device=tensors[0].device)
    for runs in zip(*(pieces(tensor._local) for tensor in tensors), strict=True):
        total += of(*runs)
    return reduce_over_ranks(tensors[0]._spec, str(operation), total, "sum")


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        raise NotImplementedError(
            f"reductions of {dtype} ShardedTensors: use torch.view_as_real on .full_tensor()"
        )
    return torch.float64 if dtype.is_floating_point else torch.int64


@HANDLERS.handles(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    func: OpOverload,
    tensor: SpanTensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    refuse_dims(func, tensor, dim, keepdim)
    dtype = dtype or (tensor.dtype if tensor.dtype.is_floating_point else torch.int64)
    wide = _wide(dtype)
    total = _total("sum()", tensor, of=lambda run: run.to(dtype).sum(dtype=wide), wide=wide)
    return total.to(dtype)


@HANDLERS.handles(aten.mean.default)
def _mean(
    func: OpOverload, tensor: SpanTensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if not dtype.is_floating_point:
        raise RuntimeError(f"mean() needs a floating dtype, got {dtype}: pass dtype=")
    return (_total("mean()", tensor) / _elements(tensor)).to(dtype)


def _elements(tensor: SpanTensor) -> torch.Tensor | int:
    """Elements of what reductions go over; over parts that tp has cut a tensor on the device."""
    numel, beyond = tensor._spec.numel, tensor._spec.beyond
    if beyond is None:
        return numel
    return beyond.all_reduce(torch.full((), numel, dtype=torch.int64, device=tensor.device), "sum")


@HANDLERS.handles(aten.var.correction, aten.std.correction)
def _variance(
    func: OpOverload,
    tensor: SpanTensor,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    """Two passes, as differences of large sums lose digits."""
    refuse_dims(func, tensor, dim, keepdim)
    numel = _elements(tensor)
    mean = _total(func, tensor) / numel
    squares = _total(func, tensor, of=lambda run: (run.double() - mean).square().sum())
    free = numel - (1 if correction is None else correction)
    variance = squares / (free.clamp(min=0) if isinstance(free, torch.Tensor) else max(free, 0))
    result = variance.sqrt() if func is aten.std.correction else variance
    rounded: torch.Tensor = result.to(tensor.dtype)
    return rounded


@HANDLERS.handles(aten.dot.default, aten.vdot.default)
def _dot(func: OpOverload, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not isinstance(left, SpanTensor) or not isinstance(right, SpanTensor):
        raise ValueError(f"{func}: both operands must be ShardedTensors")
    left._spec.must_match(right._spec, func)
    wide = _wide(left.dtype)
    products = partial(_total, "dot()", of=lambda a, b: (a.to(wide) * b.to(wide)).sum(), wide=wide)
    return products(left, right).to(left.dtype)


@HANDLERS.handles(aten.count_nonzero.default, aten.all.default, aten.any.default)
def _count_nonzero(func: OpOverload, tensor: SpanTensor, dim: Any = None) -> torch.Tensor:
    refuse_dims(func, tensor, dim, False)
    count = _total(func, tensor, of=torch.count_nonzero, wide=torch.int64)
    if func is aten.count_nonzero.default:
        return count
    return count == _elements(tensor) if func is aten.all.default else count > 0


@HANDLERS.handles(aten.equal.default)
def _equal(func: OpOverload, left: torch.Tensor, right: torch.Tensor) -> bool:
    if not (isinstance(left, SpanTensor) and isinstance(right, SpanTensor)):
        raise NotImplementedError(
            "torch.equal of a ShardedTensor and a plain tensor: compare .full_tensor()"
        )
    if left.shape != right.shape:
        return False
    left._spec.must_match(right._spec, "torch.equal")
    # A rank sees its own span alone, so the ranks are counted that see a difference.
    differing = partial(_total, of=lambda a, b: int(not torch.equal(a, b)), wide=torch.int64)
    return not differing("torch.equal", left, right).item()


@HANDLERS.handles(aten.allclose.default)
def _allclose(func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all().item())


@HANDLERS.handles(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
def _extreme(
    func: OpOverload, tensor: SpanTensor, dim: Any = (), keepdim: bool = False
) -> torch.Tensor:
    """The largest or smallest element of the whole."""
    refuse_dims(func, tensor, dim, keepdim)
    spec, local, wide = tensor._spec, tensor._local, _wide(tensor.dtype)
    if not spec.numel:
        raise RuntimeError(f"{func} of an empty tensor of shape {list(tensor.shape)}")
    largest = func in (aten.max.default, aten.amax.default)
    if local.numel():
        mine = (local.max() if largest else local.min()).to(wide)
    else:  # what any element of the other ranks beats
        bounds = torch.iinfo(wide) if wide is torch.int64 else None
        lowest, highest = (bounds.min, bounds.max) if bounds else (-math.inf, math.inf)
        mine = torch.tensor(lowest if largest else highest, dtype=wide, device=local.device)
    return reduce_over_ranks(spec, str(func), mine, "max" if largest else "min").to(tensor.dtype)


@HANDLERS.handles(aten._local_scalar_dense.default)
def _item(func: OpOverload, tensor: SpanTensor) -> Any:
    if tensor._spec.numel != 1:
        raise RuntimeError(f"a tensor of {tensor._spec.numel} elements is no Python scalar")
    wide = _wide(tensor.dtype)
    # Exactly one rank holds the element, the others add nothing.
    value = _total("item()", tensor, of=partial(torch.sum, dtype=wide), wide=wide).item()
    return bool(value) if tensor.dtype is torch.bool else value


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
        runs = pieces(local.reshape(-1))
        if not runs:
            return self.empty(local.device)
        # No Python call per run, so that a tensor of many costs the host no more (law 10).
        wide = map(torch.Tensor.double, map(torch.abs, runs) if local.is_complex() else runs)
        sizes = wide if self.order in (0, 2) else map(torch.abs, wide)
        if self.order == 2:
            shares = [torch.dot(each, each) for each in sizes]
        elif self.order == 0:
            shares = [torch.count_nonzero(each).double() for each in sizes]
        elif self.op == "sum":
            shares = [each.pow(self.order).sum() for each in sizes]
        else:
            shares = list(map(torch.max if self.op == "max" else torch.min, sizes))
        return reduce(self.join, shares)

    def shares(self, locals: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shares of several plain tensors: fp64, [tensors].

        On a GPU the squares of all of them are added by one kernel, in fp64 as well.
        """
        filled = [each for each in locals if each.numel()]
        on_gpu = all(each.is_cuda and each.is_floating_point() for each in filled)
        if self.order != 2 or not on_gpu or not filled:
            return torch.stack([self.share(each) for each in locals])
        # Its roots are squared again: in fp64 that is far below what the one rounding leaves.
        norms = iter(aten._foreach_norm.Scalar(filled, 2, torch.float64))
        nothing = self.empty(filled[0].device)  # torch would fill one for each empty tensor
        return torch.stack([next(norms) if each.numel() else nothing for each in locals]).square_()

    @property
    def join(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Makes the share of two pieces from theirs."""
        if self.op == "sum":
            return torch.add
        return torch.maximum if self.op == "max" else torch.minimum

    def root(self, total: torch.Tensor) -> torch.Tensor:
        """The norm from the share of everything."""
        if self.op != "sum" or self.order == 0:
            return total
        return total.sqrt() if self.order == 2 else total.pow(1.0 / self.order)


def _norms(operation: str, tensors: Sequence[SpanTensor], order: float) -> torch.Tensor:
    """Norms of whole tensors in fp64, [tensors], with one communication for all of them.

    NotImplementedError says that the tensors are cut over different ranks.
    """
    norm = PNorm(order)
    shares = norm.shares([tensor._local for tensor in tensors])
    specs = [tensor._spec for tensor in tensors]
    cut = [index for index, spec in enumerate(specs) if spec.is_cut or spec.beyond is not None]
    if cut:
        spec = specs[cut[0]]
        for index in cut:
            other = specs[index]
            same = other.axes == spec.axes or other.communicator == spec.communicator
            if not same or other.beyond != spec.beyond:
                raise NotImplementedError(
                    f"{operation} over ShardedTensors of different meshes ({spec.where()} and "
                    f"{other.where()}) in one call: use lamina.ddp.clip_grad_norm, which counts "
                    "every parameter once on every mesh"
                )
        if len(cut) == len(tensors):
            return norm.root(reduce_over_ranks(spec, operation, shares, norm.op))
        # Picked in Python: an index tensor would be copied from pageable memory, and the host
        # would wait for the device.
        rows = list(shares.unbind())
        of_cut = torch.stack([rows[index] for index in cut])
        whole = reduce_over_ranks(spec, operation, of_cut, norm.op)
        for index, share in zip(cut, whole.unbind(), strict=True):
            rows[index] = share
        shares = torch.stack(rows)
    return norm.root(shares)


def _refuse_parts(operation: str, tensors: Sequence[SpanTensor]) -> None:
    """Many norms make one of a model, and these tensors are only this rank's part of theirs.

    An axis says so: its `apart` are the names of the other axes that have cut the model.
    """
    for spec in (tensor._spec for tensor in tensors):
        names = [name for axis in spec.axes for name in axis.apart]
        if names:
            raise NotImplementedError(
                f"{operation} over ShardedTensors ({spec.where()}) of a model that is cut over "
                f"{' and '.join(dict.fromkeys(names))} too would be the norm of this rank's part: "
                "use lamina.ddp.clip_grad_norm, which counts every parameter once on every mesh"
            )


def _rounded(
    norms: torch.Tensor, tensors: Sequence[SpanTensor], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Each of the norms of tensors in its dtype: rounded at once where that is one."""
    kinds = [dtype or tensor.dtype.to_real() for tensor in tensors]
    if len(set(kinds)) == 1:
        return list(norms.to(kinds[0]).unbind())
    return [norm.to(kind) for norm, kind in zip(norms.unbind(), kinds, strict=True)]


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
    norms = _norms(str(func), [tensor], 2.0 if order is None else float(order))
    return _rounded(norms, [tensor], dtype)[0]


@HANDLERS.handles(aten._foreach_norm.Scalar)
def _foreach_norm(
    func: OpOverload,
    tensors: Sequence[torch.Tensor],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    sharded = [tensor for tensor in tensors if isinstance(tensor, SpanTensor)]
    _refuse_parts("torch._foreach_norm", sharded)
    rounded = _rounded(_norms("torch._foreach_norm", sharded, float(order)), sharded, dtype)
    norms = iter(rounded)
    return [
        next(norms)
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
    locals_ = [each._local if isinstance(each, SpanTensor) else each for each in tensors]
    func(locals_, found_inf, inv_scale)
    # Once for each set of axes: the flag is one for all tensors.
    reached = []
    for tensor in tensors:
        spec = tensor._spec if isinstance(tensor, SpanTensor) else None
        if spec is not None and spec.is_cut and spec.axes not in reached:
            reached.append(spec.axes)
            communicator = spec.reach("GradScaler.unscale_")
            found_inf.copy_(communicator.all_reduce(found_inf.double(), "max"))
