"""Collectives on tensors of any shape along any dimension, in flight beside the caller's compute.

These are the forms that a hand-written backward needs: start the all-reduce of the input gradient,
run the weight-gradient GEMM, then take the result. They know nothing of autograd;
`autograd_regions` puts derivatives on top. Each returns a `Pending`, whose `wait` gives the result.

torch.compile breaks the graph at each of them, once, and looks no further: `one_graph_break` is
`torch.compiler.disable` without its import of torch._dynamo at the time of decoration, which takes
longer than importing the rest of torch.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_divisible
from lamina.collectives.call.collective import Pending
from lamina.collectives.compat import one_graph_break
from lamina.collectives.move.all_gather import all_gather_into
from lamina.collectives.move.all_to_all import all_to_all, row_splits
from lamina.collectives.reduction.reduce import ReductionName, reduction_class
from lamina.collectives.transport.groups import where
from lamina.collectives.transport.lanes import lane_of


@one_graph_break
def start_all_gather(
    tensor: torch.Tensor, group: ProcessGroup | None, *, dim: int = 0, async_op: bool = True
) -> Pending[torch.Tensor]:
    """Concatenate the ranks' tensors along `dim`, in rank order.

    Along the first dimension (of size above one) the pieces arrive where they belong; along
    another one, `wait` makes one copy to put them there.

    The tensor [..., n, ...] has the same shape and dtype (any) on every rank; `dim`, along which
    they are concatenated, becomes N*n. Of one rank the result is the tensor itself. IndexError: no
    such dimension.
    """
    size, dim = lane_of(group).size, dimension("all-gather", tensor, dim)
    if size == 1:
        return Pending(None, lambda: tensor)
    source = tensor.detach().contiguous()
    gathered = source.new_empty((size, *source.shape))
    handle = all_gather_into(gathered.view(-1), source.view(-1), group, async_op=async_op)
    return Pending(handle, lambda: gathered.movedim(0, dim).flatten(dim, dim + 1))


@one_graph_break
def start_reduce_scatter(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    dim: int = 0,
    reduction: ReductionName = "ordered",
    async_op: bool = True,
) -> Pending[torch.Tensor]:
    """Sum over the ranks and keep this rank's piece along `dim`.

    Sent in the tensor's dtype, summed in fp32 (fp64 for fp64) in the fixed tree of
    `reduce_scatter_fp32`, rounded once to the tensor's dtype.

    The tensor [..., N*n, ...] is float32, bfloat16, float16 or float64, and unchanged until `wait`;
    `dim` becomes n. Along any but the first dimension (of size above one) it is copied once. Of one
    rank the result is the tensor itself. The reduction "native" leaves the sum to the backend, with
    a tolerance (docs/collectives.md) in place of fixed bits. IndexError: no such dimension.
    ValueError: it is not divisible by N, the dtype cannot be summed, or an unknown reduction.
    """
    kind = reduction_class(reduction)
    size, dim = lane_of(group).size, dimension("reduce-scatter", tensor, dim)
    if size == 1:
        return Pending(None, lambda: tensor)
    require_divisible("reduce-scatter", tensor, dim, group)
    cut = (*tensor.shape[:dim], size, tensor.shape[dim] // size, *tensor.shape[dim + 1 :])
    pieces = tensor.detach().view(cut).movedim(dim, 0).contiguous()
    output = pieces.new_empty(pieces.shape[1:])
    target, source = output.view(-1), pieces.view(-1)
    handle = kind(target, source, group, scatter=True).start(target, source, async_op=async_op)
    return Pending(handle, lambda: output)


@one_graph_break
def start_all_reduce(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    in_place: bool = False,
    reduction: ReductionName = "ordered",
    async_op: bool = True,
) -> Pending[torch.Tensor]:
    """Sum over the ranks; every rank gets the whole sum, with the same bits.

    Sent in the tensor's dtype, summed in fp32 (fp64 for fp64) in the fixed tree, rounded once.

    The tensor, of any shape, is float32, bfloat16, float16 or float64, and unchanged until `wait`,
    unless the sum is written into it (`in_place`, if it is contiguous). Of one rank the result is
    the tensor itself. Reductions are as of `start_reduce_scatter`. ValueError: the dtype cannot be
    summed, `in_place` with strides, or an unknown reduction.
    """
    kind = reduction_class(reduction)
    if lane_of(group).size == 1:
        return Pending(None, lambda: tensor)
    if in_place and not tensor.is_contiguous():
        raise ValueError(
            f"all-reduce {where(group)}: in_place needs a contiguous tensor, but shape "
            f"{tuple(tensor.shape)} has strides {tensor.stride()}; leave in_place off"
        )
    source = tensor.detach().contiguous()
    output = source if in_place else torch.empty_like(source)
    target, flat = output.view(-1), source.view(-1)
    handle = kind(target, flat, group, scatter=False).start(target, flat, async_op=async_op)
    return Pending(handle, lambda: output)


@one_graph_break
def start_all_to_all(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = True,
) -> Pending[torch.Tensor]:
    """Send `input_splits[r]` rows to every rank r and receive `output_splits[r]` rows from it.

    The tensor [rows, ...], of any dtype, is equal on all ranks but for the number of rows. Without
    splits each rank sends, or receives, rows/N. They may be 0, and `input_splits` sum to the rows.
    The rows received are [sum(output_splits), ...]. Of one rank the result is the tensor itself.
    ValueError: splits that are not one count >= 0 per rank, that do not sum to the rows, or rows
    that do not divide equally where splits are left out.
    """
    if tensor.dim() == 0:
        raise ValueError(
            f"all-to-all {where(group)}: the tensor needs a dimension of rows, got a 0-d tensor"
        )
    sends = row_splits("input_splits", input_splits, tensor, group)
    alone = lane_of(group).size == 1
    receives = row_splits("output_splits", output_splits, tensor, group, add_up=alone)
    if alone:
        return Pending(None, lambda: tensor)
    source = tensor.detach().contiguous()
    output = source.new_empty((sum(receives), *source.shape[1:]))
    handle = all_to_all(
        output, source, group, output_splits=receives, input_splits=sends, async_op=async_op
    )
    return Pending(handle, lambda: output)


def dimension(what: str, tensor: torch.Tensor, dim: int) -> int:
    """Return `dim` counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(
            f"{what}: dim={dim} is out of range for a tensor of shape {tuple(tensor.shape)} "
            f"({tensor.dim()} dimensions)"
        )
    return dim % tensor.dim()
