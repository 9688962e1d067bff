"""What every module of a model takes, gives and sends back in a step, recorded by hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lamina.mesh import Role
from lamina.models.bisection.pieces import Share
from lamina.models.compat import current_graph_task_id
from lamina.models.layers.linear import ColumnParallelLinear
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.mamba.convolution import CausalConvolution
from lamina.models.moe.experts import GroupedExperts

What = Literal[
    "input", "output", "gradient of output", "gradient of input",
    "parameter before", "gradient of parameter", "parameter after",
]  # fmt: skip


class Key(NamedTuple):
    """What a recorded tensor is.

    Attributes:
        module: the name of the module, or of the parameter.
        what: what the tensor is to it.
        label: which input or output, as `0` or `context.runs`.
        call: the number of the module's call within a forward.
    """

    module: str
    what: What
    label: str = ""
    call: int = 0


@dataclass(frozen=True)
class Activation:
    """A tensor of one microbatch; `fused` are widths that are fused in its last dimension."""

    values: Tensor
    microbatch: int
    fused: tuple[int, ...] | None


@dataclass
class Trace:
    """What one rank has recorded of a step.

    Attributes:
        share: what of the step the rank has.
        scale: what turns gradients of this rank's loss into those of the batch's.
        activations: by key, in the order of their arrival, those of a key by microbatch.
        parameters: values and role by key.
    """

    share: Share
    scale: float = 1.0
    activations: dict[Key, list[Activation]] = field(default_factory=dict)
    parameters: dict[Key, tuple[Tensor, Role]] = field(default_factory=dict)

    def add_parameters(
        self, what: What, values: Mapping[str, Tensor], roles: Mapping[str, Role]
    ) -> None:
        """Record parameters or their gradients by name."""
        for name, value in values.items():
            self.parameters[Key(name, what)] = value.detach().clone().cpu(), roles[name]

    def save(self, folder: Path) -> None:
        """Write the trace into a folder, where `load_traces` reads those of all ranks."""
        torch.save(self, folder / f"rank{self.share.rank:05}.pt")


def load_traces(folder: Path) -> list[Trace]:
    """Read the traces that the ranks of a layout have saved, in rank order."""
    # The files are this program's own, and hold its classes.
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]


class _Call(NamedTuple):
    """A tensor with the number of its module's call in the step, before calls are sorted."""

    key: Key
    number: int
    values: Tensor
    fused: tuple[int, ...] | None


class _Recorder:
    """The hooks on all modules, and what they have recorded."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.counts: Counter[str] = Counter()
        # Tensors that modules share, such as positions, are recorded where they come first. They
        # are kept, as another tensor could get the number of one that is gone.
        self.shared: dict[int, Tensor] = {}
        # The views of the inputs of the modules that run now, and the hooks of these views.
        self.views: dict[str, list[tuple[Tensor, RemovableHandle]]] = {}

    def before(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any] | None:
        """Record the inputs, and hook the gradient that the module returns for each of them."""
        if current_graph_task_id() != -1:
            return None  # activations are computed again in a backward
        number, views = self.counts[name], self.views.setdefault(name, [])

        def own(label: str, value: Any, fused: tuple[int, ...] | None) -> Any:
            if not isinstance(value, Tensor):
                for path, tensor in _tensors_in(label, value):
                    if id(tensor) not in self.shared:
                        self.shared[id(tensor)] = tensor
                        self.note(Key(name, "input", path), number, tensor)
                return value
            self.note(Key(name, "input", label), number, value, fused)
            if not (value.requires_grad and torch.is_grad_enabled()):
                return value
            # A view has a gradient of its own, which is what this module sends back alone.
            view = value.view_as(value)
            key = Key(name, "gradient of input", label)
            hook = partial(self.note_gradient, key, number, fused)
            views.append((view, view.register_hook(hook)))  # type: ignore[no-untyped-call]
            return view

        fused = _fused_input(module)
        given = tuple(own(str(at), value, fused) for at, value in enumerate(args))
        named = {label: own(label, value, None) for label, value in kwargs.items()}
        return given, named

    def after(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Record the outputs, and hook the gradients that they get."""
        if current_graph_task_id() != -1:
            return
        number = self.counts[name]
        self.counts[name] += 1
        fused = _fused_output(module)
        returned = {id(tensor) for _, tensor in _tensors_in("", output)}
        unchanged = set()
        for view, handle in self.views.pop(name, ()):
            if id(view) in returned:
                # A dropout of rate 0 gives back its input: this is no product of the module.
                unchanged.add(id(view))
                handle.remove()
        for label, tensor in _tensors_in("", output):
            if id(tensor) in unchanged:
                continue
            self.note(Key(name, "output", label), number, tensor, fused)
            if tensor.requires_grad and torch.is_grad_enabled():
                key = Key(name, "gradient of output", label)
                tensor.register_hook(partial(self.note_gradient, key, number, fused))  # type: ignore[no-untyped-call]

    def note(
        self, key: Key, number: int, values: Tensor, fused: tuple[int, ...] | None = None
    ) -> None:
        """Record a copy of a tensor."""
        self.calls.append(_Call(key, number, values.detach().clone().cpu(), fused))

    def note_gradient(
        self, key: Key, number: int, fused: tuple[int, ...] | None, grad: Tensor
    ) -> None:
        """Record a gradient; as a hook it leaves the gradient as it is."""
        self.note(key, number, grad, fused)

    def sort_into(self, trace: Trace) -> None:
        """Number the calls of each module within its forward, and add them to the trace."""
        microbatches = trace.share.microbatches
        for key, number, values, fused in self.calls:
            # Microbatches run forward in order in all schedules, and modules as often in each.
            microbatch, call = divmod(number, max(self.counts[key.module] // microbatches, 1))
            activation = Activation(values, microbatch, fused)
            trace.activations.setdefault(key._replace(call=call), []).append(activation)


@contextmanager
def recording(modules: Mapping[str, nn.Module], trace: Trace) -> Iterator[None]:
    """Record what modules take and give inside, and what backward sends through them.

    Args:
        modules: by the name that they have in the whole model.
        trace: gets what was recorded, at the end.
    """
    recorder, handles = _Recorder(), []
    rows = {n for n, m in modules.items() if isinstance(m, GroupedExperts)}
    for name, module in modules.items():
        # The model itself is given the batch, and gives a loss.
        if name in ("", *rows) or any(name.startswith(f"{parent}.") for parent in rows):
            continue  # rows of experts are not in the order of tokens
        before = partial(recorder.before, name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(recorder.after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        recorder.sort_into(trace)


def _tensors_in(label: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in tuples and dataclasses, with labels."""
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            yield from _tensors_in(f"{label}.{at}" if label else str(at), item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            path = f"{label}.{each.name}" if label else each.name
            yield from _tensors_in(path, getattr(value, each.name, None))


def _fused_output(module: nn.Module) -> tuple[int, ...] | None:
    """Widths, over all ranks, that are fused in a module's output."""
    if isinstance(module, (ColumnParallelLinear, CausalConvolution)):
        return tuple(module.blocks)
    return None


def _fused_input(module: nn.Module) -> tuple[int, ...] | None:
    """As `_fused_output`, for the input; halves of unknown width are -1."""
    if isinstance(module, CausalConvolution):
        return tuple(module.blocks)
    return (-1, -1) if isinstance(module, ActivationFunction) and module.gated else None
