"""Collectives that torch.compile can see: in a graph each is one operator, elsewhere a call.

The compiler traces Python, and what a collective does (lanes, sockets, threads) cannot be traced.
So a graph has an operator in its place. When the graph runs, the operator makes the same call as
without a graph, with the same bits, ledger and watchdog. It names its group as torch names it, and
says its size where shapes depend on it: torch caches compiled graphs from job to job by their text.

Note [The order of compiled collectives]
A compiler may exchange operators that do not depend on each other. Ranks whose graphs are equal
exchange the same ones, and ranks of a group run the same program, but for numbers such as their
rank. If their programs differ, they communicate in different orders, as without a compiler. What
torch offers to chain operators cannot be compiled inside `torch.utils.checkpoint`: decision 0311.
"""

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.compat import group_named
from lamina.collectives.move.shaped import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from lamina.collectives.reduction.reduce import ReductionName


# The results have a name, because torch's types do not say what an operator returns.
def gathered(tensor: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    """`start_all_gather`, waited for."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = _all_gather(tensor, group.group_name, group.size(), dim)
        return made
    return start_all_gather(tensor, group, dim=dim, async_op=False).wait()


def summed(tensor: torch.Tensor, group: ProcessGroup, reduction: ReductionName) -> torch.Tensor:
    """`start_all_reduce`, waited for."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = _all_reduce(tensor, group.group_name, reduction)
        return made
    return start_all_reduce(tensor, group, reduction=reduction, async_op=False).wait()


def summed_piece(
    tensor: torch.Tensor, group: ProcessGroup, dim: int, reduction: ReductionName
) -> torch.Tensor:
    """`start_reduce_scatter`, waited for."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = _reduce_scatter(tensor, group.group_name, group.size(), dim, reduction)
        return made
    return start_reduce_scatter(tensor, group, dim=dim, reduction=reduction, async_op=False).wait()


def exchanged(
    tensor: torch.Tensor, group: ProcessGroup, receives: list[int], sends: list[int]
) -> torch.Tensor:
    """`start_all_to_all`, waited for."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = _all_to_all(tensor, group.group_name, receives, sends)
        return made
    return start_all_to_all(
        tensor, group, output_splits=receives, input_splits=sends, async_op=False
    ).wait()


# ------------------------------------------------------------------------------ the operators


@torch.library.custom_op("lamina::all_gather", mutates_args=())
def _all_gather(tensor: torch.Tensor, group: str, size: int, dim: int) -> torch.Tensor:
    return gathered(tensor, group_named(group), dim)


@_all_gather.register_fake
def _(tensor: torch.Tensor, group: str, size: int, dim: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] *= size
    return tensor.new_empty(shape)


@torch.library.custom_op("lamina::all_reduce", mutates_args=())
def _all_reduce(tensor: torch.Tensor, group: str, reduction: str) -> torch.Tensor:
    return summed(tensor, group_named(group), reduction)  # type: ignore[arg-type]


@_all_reduce.register_fake
def _(tensor: torch.Tensor, group: str, reduction: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@torch.library.custom_op("lamina::reduce_scatter", mutates_args=())
def _reduce_scatter(
    tensor: torch.Tensor, group: str, size: int, dim: int, reduction: str
) -> torch.Tensor:
    return summed_piece(tensor, group_named(group), dim, reduction)  # type: ignore[arg-type]


@_reduce_scatter.register_fake
def _(tensor: torch.Tensor, group: str, size: int, dim: int, reduction: str) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] //= size
    return tensor.new_empty(shape)


@torch.library.custom_op("lamina::all_to_all", mutates_args=())
def _all_to_all(
    tensor: torch.Tensor, group: str, receives: list[int], sends: list[int]
) -> torch.Tensor:
    return exchanged(tensor, group_named(group), receives, sends)


@_all_to_all.register_fake
def _(tensor: torch.Tensor, group: str, receives: list[int], sends: list[int]) -> torch.Tensor:
    return tensor.new_empty([sum(receives), *tensor.shape[1:]])
