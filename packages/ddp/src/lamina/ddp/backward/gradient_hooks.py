"""Gradient sinks: a layer's backward writes its weight's gradient where the collective reads it.

Autograd hands a gradient over as a tensor of its own, which a hook then copies into the bucket. A
layer that computes its weight gradient by a matrix product can name the destination itself:

    sink = gradient_sink(weight)
    if sink is None:
        grad_weight = grad_output.t() @ x
    elif sink.accumulate:
        torch.addmm(sink.view, grad_output.t(), x, out=sink.view)
    else:
        torch.mm(grad_output.t(), x, out=sink.view)
    if sink is not None:
        sink.written()
        grad_weight = None  # what backward returns

Megatron-Core calls this gradient accumulation fusion.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge

from lamina.ddp.gradients.group_gradients import GroupGradients

if TYPE_CHECKING:
    from lamina.ddp.gradients.group_gradients import GroupGradients
    from lamina.ddp.group.group import ParameterGroup

__all__ = [
    "GradientSink",
    "gradient_mover",
    "gradient_sink",
    "has_gradient_sink",
    "main_of",
    "offer_sink",
]

_SINK = "_lamina_gradient_sink"


class GradientSink:
    """The place of one parameter's gradient in its bucket, during a backward.

    Args:
        group: the parameter's; held weakly, as the group holds the parameter. (Parameters must
            not be referred to weakly at all: `Module.to` swaps sharded ones only without.)
        index: the parameter's place in the group.
    """

    def __init__(self, group: ParameterGroup, index: int) -> None:
        self._group: weakref.ref[ParameterGroup] | None = weakref.ref(group)
        self._index = index

    @property
    def main(self) -> torch.Tensor | None:
        """What the optimizer updates; None where the wrapper is gone."""
        group = self._group() if self._group is not None else None
        return None if group is None else group.main_parameters[self._index]

    @property
    def view(self) -> torch.Tensor:
        """What to write to: shaped like the parameter, contiguous, in the bucket's dtype.

        float32 where gradients are summed in fp32, whatever the parameter's dtype.
        """
        return self._known().place(self._index)

    @property
    def accumulate(self) -> bool:
        """Whether `view` holds a gradient to add to; False: its bytes mean nothing."""
        gradients = self._known()
        return gradients.has_local and gradients.written[self._index]

    def written(self) -> None:
        """Say that `view` holds the gradient now: autograd will bring none."""
        gradients = self._known()
        gradients.written[self._index] = True
        gradients.sunk.add(self._index)

    @property
    def alive(self) -> bool:
        """Whether the parameter is still wrapped."""
        return self._group is not None and self._group() is not None

    def _known(self) -> GroupGradients:
        group = self._group() if self._group is not None else None
        if group is None:
            raise RuntimeError("the wrapper of this parameter is gone: ask gradient_sink again")
        return group.trained

    def __getstate__(self) -> dict[str, Any]:
        """A pickled parameter leaves its wrapper behind."""
        return {"_group": None, "_index": self._index}


def offer_sink(parameter: torch.Tensor, group: ParameterGroup, index: int) -> None:
    """Let layers find the place of a parameter's gradient."""
    parameter.__dict__[_SINK] = GradientSink(group, index)


def main_of(parameter: torch.Tensor) -> torch.Tensor:
    """The main parameter behind a parameter of a wrapped module: where its `.grad` is shown.

    A parameter that nobody wrapped, or that is a main parameter itself, stands for itself.
    """
    sink = parameter.__dict__.get(_SINK)
    main = sink.main if sink is not None else None
    return parameter if main is None else main


def gradient_sink(parameter: torch.Tensor) -> GradientSink | None:
    """Where a backward that is running may write a parameter's gradient; None: return it instead.

    There is one only where autograd is about to hand this backward's gradient to the wrapper: not
    for parameters that nobody wrapped, under `torch.autograd.grad`, in a backward that is itself
    differentiated, or while compiling.

    Args:
        parameter: the parameter the layer computed with.
    """
    # First of all, for the compiler cannot look into a parameter's dictionary.
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not parameter.requires_grad:
        return None
    sink = parameter.__dict__.get(_SINK)
    if sink is None or not sink.alive:
        return None
    try:
        reached = torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # the gradient is what torch.autograd.grad was asked for
        return None
    return sink if reached else None


def has_gradient_sink(parameter: torch.Tensor) -> bool:
    """Whether a wrapper keeps a place for a parameter's gradient.

    Asked in forward, by layers that use a function of their own only where its backward may find
    a sink.
    """
    sink = parameter.__dict__.get(_SINK)
    return sink is not None and sink.alive


_Method = TypeVar("_Method")
Weakly = Callable[[], _Method | None]
"""A weak reference: what holds hooks must not be held by them."""


def gradient_mover(
    gradients: GroupGradients,
    index: int,
    name: str,
    arrived: set[int],
    announce: Weakly[Callable[[GroupGradients, str, torch.Tensor | None], None]],
    complete: Callable[[], None] | None,
) -> Callable[[torch.Tensor], None]:
    """A hook that moves a gradient from autograd into its buffer.

    It must not hold the group: the group holds the parameter, and the parameter holds its hooks.

    Args:
        gradients: of the parameter's group.
        index: the parameter's place in it.
        name: the parameter's name in the model.
        arrived: places whose gradients have come in this backward.
        announce: gives what is called before anything else: a backward may begin with this.
        complete: called when each parameter of the group has got a gradient.
    """

    def move_gradient(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if (before := announce()) is not None:
            before(gradients, name, gradient)
        if gradient is None and index not in gradients.sunk:
            return
        if gradient is not None:
            _refuse_sparse(gradient, name)
            gradients.accumulate(index, gradient)
        arrived.add(index)
        if complete is not None and len(arrived) == len(gradients.layout.specs):
            complete()

    return move_gradient


def _refuse_sparse(gradient: torch.Tensor, name: str) -> None:
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"{name} has a gradient of layout {gradient.layout}; flat buffers hold strided "
            "gradients only: build the embedding with sparse=False"
        )
