"""Looking at a wrapped model from outside: whole parameters and whole gradients, by name."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lamina.buffers import FlatBuffer
from lamina.collectives.engine import start_all_gather
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.axes import DataParallelAxes


@runtime_checkable
class HasGroups(Protocol):
    """What every wrapper offers to inspection, clipping and checkpointing."""

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All groups, in an order that is the same on every rank."""
        ...


@runtime_checkable
class InspectsItself(Protocol):
    """What a wrapper over another engine, which has no groups of ours, offers instead."""

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by qualified name (collective)."""
        ...

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by qualified name (collective)."""
        ...

    def memory_plan(self) -> Any:
        """Its `MemoryPlan`."""
        ...


def groups_of(module: nn.Module) -> list[ParameterGroup]:
    """The groups of a wrapped module.

    TypeError: Lamina has not wrapped it.
    """
    if not isinstance(module, HasGroups):
        raise TypeError(
            f"{type(module).__name__} is not wrapped by Lamina: pass what "
            "DistributedDataParallel(...) or fully_shard(...) returned, not the module inside it "
            "nor a part of it"
        )
    return list(module.parameter_groups())


def full_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole main weights by qualified name, on every rank (frozen ones in the compute dtype).

    Collective over the data-parallel ranks; makes one whole group at a time besides the result.
    For inspection and tests: it holds the whole model.

    Returns:
        Copies, in the parameters' shapes, in the order of `named_parameters`' groups.

    Raises:
        RuntimeError: a parameter's `.data` was assigned, so its values are elsewhere.

    Examples:
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> full_parameters(model)["weight"].shape
        torch.Size([1, 4])
    """
    if isinstance(module, InspectsItself):
        return module.full_parameters()

    def weights(group: ParameterGroup) -> FlatBuffer:
        """Main weights of a group; RuntimeError: a parameter was taken out."""
        group.writes.refuse_assigned(group.refs)
        return group.main_weights

    return _collect(groups_of(module), weights, None)


def full_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole main grads by qualified name, on every rank; collective like `full_parameters`.

    Parameters that have no gradient (frozen, or used on no rank) are left out.

    Examples:
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> full_gradients(model)["weight"]
        tensor([[1., 1., 1., 1.]])
    """
    if isinstance(module, InspectsItself):
        return module.full_gradients()

    def grads(group: ParameterGroup) -> FlatBuffer | None:
        """Main grads of a group that is trained."""
        return None if group.gradients is None else group.gradients_to_step

    return _collect(groups_of(module), grads, lambda group, i: group.trained.produced_gradient[i])


def whole_of(buffer: FlatBuffer, axes: DataParallelAxes) -> torch.Tensor:
    """A buffer's whole content as a new flat tensor; collective over the axes it is cut along."""
    outer, inner = buffer.cuts
    piece = buffer.data
    # The outer axis cuts what the inner one left: put the pieces together in the reverse order.
    for cut, axis in ((outer, axes.outer), (inner, axes.inner)):
        if cut:
            piece = start_all_gather(piece, axis.sibling("gather"), async_op=False).wait()
    return piece.clone() if piece is buffer.data else piece


def _collect(
    groups: list[ParameterGroup],
    buffer_of: Callable[[ParameterGroup], FlatBuffer | None],
    wanted: Callable[[ParameterGroup, int], bool] | None,
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for group in groups:
            buffer = buffer_of(group)
            if buffer is None:
                continue
            views = group.layout.views(whole_of(buffer, group.axes))
            for index, (ref, view) in enumerate(zip(group.refs, views, strict=True)):
                if wanted is None or wanted(group, index):
                    tensors[ref.name] = view.clone()
    return tensors
