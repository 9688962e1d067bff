"""Collectives on tensors of any shape along any dimension, in flight beside the caller's compute.

These are the forms that a hand-written backward needs: start the all-reduce of the input gradient,
run the weight-gradient GEMM, then take the result. They know nothing of autograd;
`autograd_regions` puts derivatives on top. Each returns a `Pending`, whose `wait` gives the result.

torch.compile breaks the graph at each of them, once, and looks no further: `one_graph_break` is
`torch.compiler.disable` without its import of torch._dynamo at the time of decoration, which takes
longer than importing the rest of torch.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_divisible
from lamina.collectives.call.collective import Pending
from lamina.collectives.compat import one_graph_break
from lamina.collectives.move.all_gather import all_gather_into
from lamina.collectives.move.all_to_all import all_to_all, row_splits
from lamina.collectives.move.small import all_reduce_small
from lamina.collectives.reduction.reduce import ReductionName, reduction_class
from lamina.collectives.transport.groups import size_of, where
from lamina.mesh.engine import group_ref, live_group


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
    size, dim = size_of(group), dimension("all-gather", tensor, dim)
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
    size, dim = size_of(group), dimension("reduce-scatter", tensor, dim)
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
    if size_of(group) == 1:
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
    alone = size_of(group) == 1
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


class SpanGroups:
    """The ranks of the product of some axes: how a `ShardedTensor` reaches its other spans.

    It meets `lamina.buffers.engine.SpanCommunicator`.

    There is one process group per axis that cuts the tensor, outer axis first; None is an axis of
    one rank.
    """

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        self._refs = tuple(group_ref(group) for group in groups)

    def __eq__(self, other: object) -> bool:
        """Whether two communicators reach the same ranks over the same groups."""
        return isinstance(other, SpanGroups) and self._refs == other._refs

    def __hash__(self) -> int:
        return hash(self._refs)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size_of(live_group(ref)) for ref in self._refs)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max", "min"]) -> torch.Tensor:
        """Reduce a small tensor in place, inner axis first; integers and float64 as such."""
        for ref in reversed(self._refs):
            all_reduce_small([tensor], live_group(ref), op=op)
        return tensor

    def all_gather(self, local: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' flat tensors, of `numels[rank]` elements, in rank order.

        Pieces travel padded to the longest, so that one equal-sized gather per axis serves.
        """
        width = max(numels)
        piece = torch.zeros(width, dtype=local.dtype, device=local.device)
        piece[: local.numel()].copy_(local.detach())
        # The inner axis first: the outer one concatenates what it has gathered.
        for ref in reversed(self._refs):
            piece = start_all_gather(piece, live_group(ref), async_op=False).wait()
        rows = piece.view(len(numels), width)
        return torch.cat([row[:numel] for row, numel in zip(rows, numels, strict=True)])
