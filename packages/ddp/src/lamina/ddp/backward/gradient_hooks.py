"""How gradients reach their buffers: from autograd through hooks, or from layers through sinks.

A hook on each leaf takes what autograd brings, and hands it to the reducer. A wrapped parameter
has two leaves where its main weights are apart: the compute parameter that modules read in forward,
and the main parameter that everybody reads at other times. Both have the same hook, so whatever a
loss depends on arrives in one place. See Note [Two leaves of a parameter].

Autograd hands a gradient over as a tensor of its own, which a hook then copies into the bucket. A
layer that computes its weight gradient by a matrix product can name the destination itself: it asks
`gradient_sink` (docs/ddp.md has an example). Megatron-Core calls this gradient accumulation fusion.

Note [Two leaves of a parameter]
    A hook sits before the node that would accumulate into `.grad`, takes the gradient, and leaves
    that node nothing to do. So `.grad` belongs to the engine and the user alone: what it shows
    (earlier microbatches, or a final gradient) is never mixed with what the backward at hand
    brings. The engine has to hold these nodes, since autograd makes a new one, without hooks, as
    soon as nothing refers to the old one. A main parameter of which each rank has a span gets a
    gradient for that span alone; `LocalGradients.add_span` says how it is summed. See
    docs/decisions/0411.

Note [Streams of leaves]
    Autograd runs a node on the stream that was current when the node was made, and makes the
    streams that exchange gradients wait for each other. The nodes of leaves are made where the
    wrapper is, so a hook on one runs on that stream, whatever stream training runs on. Autograd
    knows only of gradients. It does not know of the buffers that hooks write and that reductions,
    queued from the stream of the backward, read. So the hooks go over to that stream first. See
    docs/decisions/0421.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from lamina.buffers import ShardedTensor
from lamina.collectives.engine import current_stream

if TYPE_CHECKING:
    from lamina.ddp.gradients.group_gradients import GroupGradients
    from lamina.ddp.group.group import ParameterGroup
    from lamina.ddp.parameters.parameters import ParameterRef

from lamina.ddp.compat import will_execute

LeafHook = Callable[[tuple[torch.Tensor | None]], object]
"""Takes the gradient that autograd brings to a leaf, if any; what it returns goes to `.grad`."""

_SINK = "_lamina_gradient_sink"
_LEAF = "_lamina_compute_leaf"
NO_STREAM = nullcontext()
_WRAPPERS = {
    *("DataParallel", "DistributedDataParallel", "DDP"),  # the last is what `replicate` mixes in
    *("FullyShardedDataParallel", "FSDPModule", "ShardedModule"),
    *("MegatronFSDP", "DeepSpeedEngine"),
}
"""Names of classes that sum the gradients of what they hold."""
_MAKERS = {"lamina", "torch", "megatron", "megatron_fsdp", "deepspeed", "fairscale", "apex"}
"""Packages whose classes of these names do so."""


class GradientSink:
    """Where one parameter's gradient lies in its bucket, during a backward.

    The group is held weakly, as it holds the parameter. (Parameters must not be referred to weakly
    at all: `Module.to` swaps sharded ones only without.) `index` is the number of the parameter in
    it.
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
    def ref(self) -> ParameterRef | None:
        """The parameter that modules compute with; None where the wrapper is gone."""
        group = self._group() if self._group is not None else None
        return None if group is None else group.refs[self._index]

    @property
    def view(self) -> torch.Tensor:
        """What to write to: shaped like the parameter, contiguous, in the bucket's dtype.

        float32 where gradients are summed in fp32, whatever the parameter's dtype.
        """
        return self._known().local.view_for_layer(self._index)

    @property
    def accumulate(self) -> bool:
        """Whether `view` holds a gradient to add to; False: its bytes mean nothing."""
        return self._known().local.written[self._index]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `view`, which is not made for this."""
        return self._known().sum_dtype

    def adopt(self, gradient: torch.Tensor) -> bool:
        """Make a gradient `view` itself, without a copy, if the parameter has a bucket to itself.

        The caller owns the gradient, and lets go of it where the answer is True. Otherwise nothing
        has happened.
        """
        return self._known().local.adopt(self._index, gradient)

    def written(self) -> None:
        """Say that `view` holds the gradient now: autograd will bring none."""
        self._known().local.written_by_layer(self._index)

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


class BackwardStream:
    """The stream on which gradients are taken, see Note [Streams of leaves]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """A backward begins, on the current stream."""
        self.stream = current_stream(self._device)

    @property
    def elsewhere(self) -> torch.cuda.Stream | None:
        """It, if the caller is on another one; None too between backwards (`late_gradients`)."""
        return None if current_stream(self._device) == self.stream else self.stream

    def entered(self, gradient: torch.Tensor | None) -> AbstractContextManager[object]:
        """Make it the current stream, after the one that has the gradient."""
        stream = self.elsewhere
        if stream is None:
            return NO_STREAM
        # Where a layer has written the gradient there is nothing here to wait for. In a capture the
        # leaf's stream may then be one that takes no part in it, and waiting would end the capture.
        if gradient is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device.index))
            # Its memory must not be given to others on its own stream before this one has read it.
            local = gradient.to_local() if isinstance(gradient, ShardedTensor) else gradient
            local.record_stream(stream)
        return torch.cuda.stream(stream)

    def end(self) -> None:
        """The backward has ended: what the current stream does next comes after it."""
        stream, self.stream = self.elsewhere, None
        if stream is not None:
            torch.cuda.current_stream(self._device.index).wait_stream(stream)


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
    """
    # First of all, for the compiler cannot look into a parameter's dictionary.
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not parameter.requires_grad:
        return None
    sink = parameter.__dict__.get(_SINK)
    if sink is None or not sink.alive:
        return None
    try:
        # Autograd brings a gradient to the leaf, or (asked for by its user) hands it to somebody
        # else.
        reached = will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # the gradient is what torch.autograd.grad was asked for
        return None
    return sink if reached else None


def has_gradient_sink(parameter: torch.Tensor) -> bool:
    """Whether a wrapper keeps room for a parameter's gradient.

    Asked in forward, by layers that use a function of their own only where its backward may find
    a sink.
    """
    sink = parameter.__dict__.get(_SINK)
    return sink is not None and sink.alive


def refuse_wrapped(what: str, module: nn.Module, inside: tuple[type[nn.Module], ...] = ()) -> None:
    """Raise RuntimeError if somebody, we or another library, sums gradients in a module already.

    Two would each take gradients that the other waits for. Every wrapper asks this, and nothing
    else, before it changes anything; `what` is its name for the message. Modules of the classes
    `inside` may be parts of the module, as `shard_module` goes from blocks to the root.
    """
    # What is sharded inside already has its own hooks, and this wrapper leaves it alone.
    apart = {
        id(below)
        for child in module.modules()
        if child is not module and isinstance(child, inside)
        for below in child.modules()
    }
    for name, child in module.named_modules():
        if id(child) in apart:
            continue
        owner = next((cls for cls in type(child).__mro__ if _sums_gradients(cls)), None)
        by = "" if owner is None else f"{owner.__module__.split('.')[0]}'s {owner.__name__}"
        for attribute, parameter in child._parameters.items():
            marks = () if parameter is None else (parameter.__dict__.get(m) for m in (_SINK, _LEAF))
            if not by and any(mark is not None and mark.alive for mark in marks):
                by = f"another wrapper, which takes the gradients of {attribute}"
        if by:
            raise RuntimeError(
                f"{what}: {name or type(module).__name__} is wrapped or sharded already, by {by}: "
                "gradients would come to one of the two only. Wrap a model once, as a whole (only "
                "shard_module goes block by block, and then to the root): pass the plain module "
                "inside, or build the model anew (in a notebook, in this cell)"
            )


def _sums_gradients(cls: type) -> bool:
    return cls.__name__ in _WRAPPERS and cls.__module__.partition(".")[0] in _MAKERS


def hook_leaves(group: ParameterGroup, hook_of: Callable[[int], LeafHook]) -> list[Node]:
    """Have hooks called with every gradient that autograd brings to a group's parameters.

    `hook_of` gives the hook by the number of the parameter in the group; both leaves of a parameter
    have the same one. It must not keep who holds the nodes alive. From here on the engine calls the
    hooks that users have registered on the parameters.

    The nodes with the hooks, which come back, are to be held as long as gradients are to be taken.
    """
    nodes = []
    for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True)):
        # Where main weights are apart, both leaves bring gradients to one place in the buffer.
        hook = hook_of(index)
        for leaf in (ref.parameter,) if main is ref.parameter else (ref.parameter, main):
            wants = leaf.requires_grad
            # One that is frozen for now has no node of its own otherwise. Inference mode, in which
            # a first forward of `shard_module` may come here, makes none at all.
            with torch.inference_mode(False):
                node = get_gradient_edge(leaf.requires_grad_(True)).node
            leaf.requires_grad_(wants)
            # Before the node itself, which then finds nothing to accumulate.
            node.register_prehook(hook)
            nodes.append(node)
            group.shown.hooks.take(leaf, index)
        if main is not ref.parameter:
            main.__dict__[_LEAF] = GradientSink(group, index)
        ref.parameter.__dict__[_SINK] = GradientSink(group, index)
    return nodes


class _InGraph:
    """A main parameter while a graph waits in which its compute parameter is the leaf.

    Note [autograd.grad of main parameters]
        After a forward the modules hold main parameters, and the graph has compute parameters as
        leaves. `torch.autograd.grad(loss, model.parameters())` asks for leaves that the graph does
        not have, and autograd answers with an error, or with None or zeros if these are allowed.
        `loss.backward(inputs=model.parameters())` finds nothing, and says nothing.
        torch lets a class of inputs that has `__torch_function__` answer in its place, but such a
        class costs a Python call for each attribute that is read. So main parameters have this
        class only from the end of a forward until a backward begins. See docs/decisions/0422.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            return _gradients_of_leaves(*args, **(kwargs or {}))
        if func is torch.autograd.backward:
            return _backward_to_leaves(*args, **(kwargs or {}))
        call: Any = super().__torch_function__  # type: ignore[misc]
        return call(func, types, args, kwargs or {})


class _CutInGraph(_InGraph, ShardedTensor):  # type: ignore[misc]
    __slots__ = ()


class _WholeInGraph(_InGraph, nn.Parameter):
    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is in no graph."""
        memo[id(self)] = made = nn.Parameter(self.detach().clone(), self.requires_grad)
        return made


IN_GRAPH: dict[type, type] = {ShardedTensor: _CutInGraph, nn.Parameter: _WholeInGraph}
"""Of each class of main parameters, that which it has while a graph waits for its backward."""
AT_REST = {inside: outside for outside, inside in IN_GRAPH.items()}
"""Of each of those, the class that it has otherwise."""


def _backward_to_leaves(
    tensors: Sequence[Any], *, inputs: Sequence[Any] | None, **options: Any
) -> None:
    """What `torch.autograd.backward` does: of a main parameter, both leaves take gradients."""
    asked: list[Any] = []
    for given in inputs or ():
        if not isinstance(given, _CutInGraph | _WholeInGraph):
            asked.append(given)
        elif not given.requires_grad:
            asked.append(given.detach())  # for torch's own error
        else:
            ref = given.__dict__[_LEAF].ref
            if ref is not None and ref.parameter.requires_grad:
                asked.append(get_gradient_edge(ref.parameter))
            asked.append(get_gradient_edge(given))
    torch.autograd.backward(_plain(tensors), inputs=asked or None, **options)


def _plain(outputs: Sequence[Any]) -> list[Any]:
    """Outputs without the class that would bring them here again."""
    return [
        each.view_as(each) if isinstance(each, _CutInGraph | _WholeInGraph) else each
        for each in outputs
    ]


def _gradients_of_leaves(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` gives for main parameters: whole, of this rank's outputs alone."""
    asked: list[Any] = list(inputs)
    refs: dict[int, ParameterRef] = {}
    for at, given in enumerate(inputs):
        if isinstance(given, _CutInGraph | _WholeInGraph):
            ref = given.__dict__[_LEAF].ref
            if not given.requires_grad:
                asked[at] = given.detach()  # for torch's own error
            elif ref is None or not ref.parameter.requires_grad:
                asked[at] = get_gradient_edge(given)
            else:
                asked[at], refs[at] = get_gradient_edge(ref.parameter), ref
    # A loss may read a parameter in a forward (the compute leaf), and outside of it (the main one).
    own = [get_gradient_edge(inputs[at]) for at in refs]
    # One run through the graph for all of them. What was not reached comes back as None, and is
    # refused or made zeros below, as the caller has asked.
    taken = list(torch.autograd.grad(_plain(outputs), [*asked, *own], allow_unused=True, **options))
    for (at, ref), direct in zip(refs.items(), taken[len(inputs) :], strict=True):
        if taken[at] is None or direct is None:
            taken[at] = direct if taken[at] is None else taken[at].to(inputs[at].dtype)
        elif isinstance(direct, ShardedTensor):
            raise RuntimeError(
                f"torch.autograd.grad of {ref.name}, which the loss reads in a forward and outside "
                "of it (a penalty): this rank has its own span of the second part alone. Call "
                "loss.backward() and read .grad, or take the gradients of both terms one by one"
            )
        else:
            taken[at] = taken[at].to(direct.dtype) + direct
    for at, given in enumerate(inputs):
        if taken[at] is None and materialize_grads:
            taken[at] = torch.zeros(
                given.shape,
                dtype=given.dtype,
                device=given.device,
                requires_grad=options["create_graph"],
            )
        elif taken[at] is None and not allow_unused:
            what = refs[at].name if at in refs else f"input {at} of torch.autograd.grad"
            raise RuntimeError(
                f"{what} has no part in the outputs that are differentiated: pass "
                "allow_unused=True, which gives None for it"
            )
    return tuple(taken[: len(inputs)])
