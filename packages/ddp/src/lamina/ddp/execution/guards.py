"""What looks after a model beside its computing: its modules' parameters, buffers, and their order.

Note [Parameters that are new since wrapping]: PyTorch lets a user put another parameter, or another
submodule, into a model at any time. No buffer has a place for it, so no rank would sum its gradient
and each rank would train its own. A parameter that was replaced would come back at the next
gather. So the outermost module looks before each forward of training, and says which one it is.

Note [Optimizers of other parameters]: an optimizer may hold parameters that never have a gradient,
since theirs are on main parameters: it was made before the model was wrapped, or after a forward
without a backward, while modules hold what they compute with. Its step would leave them out without
a word. So every optimizer is asked before its step, by a hook of torch's for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina.collectives.engine import broadcast
from lamina.ddp.execution.unit import Unit
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.mesh import role_of

__all__ = ["BufferPolicy", "Guards", "ModuleBuffers", "ModuleWatch", "UnitOrder"]

BufferPolicy = Literal["forward", "start", "never"] | bool
"""The setting `broadcast_buffers` of every wrapper. True and False are "forward" and "never"."""

_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class UnitOrder(Protocol):
    """Compares over ranks which units run."""

    def gather(self, unit: Unit, ran: Sequence[Unit], *, backward: bool) -> None:
        """A unit is about to be gathered, after these have begun to run."""

    def end(self, ran: Sequence[Unit], *, backward: bool) -> None:
        """A forward or backward of these units has ended."""


@dataclass(frozen=True)
class Guards:
    """What looks after a model beside its computing.

    Attributes:
        watch: looks for parameters that modules hold since, before each forward of training.
        module_buffers: brings buffers together before forwards.
        order: compares over ranks which units run.
        reads: makes what is entered around a forward: it watches over reads of released weights.
    """

    watch: ModuleWatch | None = None
    module_buffers: ModuleBuffers | None = None
    order: UnitOrder | None = None
    reads: Callable[[], AbstractContextManager[None]] = nullcontext


class ModuleWatch:
    """Looks at a model, of these groups, before its forwards of training and before any step.

    `wrapper` is what the user called and `remedy` how its optimizers are made, for messages.
    `left_alone` are `id`s of parameters that are in no group, and were to be left out.
    """

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        wrapper: str,
        remedy: str,
        left_alone: Collection[int] = (),
    ) -> None:
        self._wrapper, self._remedy = wrapper, remedy
        self._left_alone = frozenset(left_alone)
        # By module and attribute: the name of the parameter, and the `id`s it may have there.
        self._expected: dict[tuple[int, str], tuple[str, int, int]] = {}
        self._computed_with: dict[int, str] = {}  # names of parameters whose main one is another
        self._modules: list[weakref.ref[nn.Module]] = []  # whose `id`s are in use while they live
        for group in groups:
            for ref, main in zip(group.refs, group.main_parameters, strict=True):
                for owner, attribute in ref.owners:
                    if (module := owner()) is not None:
                        self._modules.append(owner)
                        ids = (ref.name, id(ref.parameter), id(main))
                        self._expected[id(module), attribute] = ids
                if group.requires_grad and main is not ref.parameter:
                    self._computed_with[id(ref.parameter)] = ref.name
        if self._computed_with:
            _refuse_in_steps(self)

    def look(self, root: nn.Module) -> None:
        """Raise if the model below `root` holds parameters that it was not wrapped with.

        RuntimeError: a parameter is new, gone or another one.
        """
        expected, left_alone = self._expected, self._left_alone
        # Plain loops over dictionaries: this runs before every forward.
        modules, seen = [root], {id(root)}
        for module in modules:
            place = id(module)
            for name, parameter in module._parameters.items():
                known = expected.get((place, name))
                if known is None:
                    if (
                        parameter is not None
                        and parameter.requires_grad
                        and id(parameter) not in left_alone
                    ):
                        raise RuntimeError(self._new(root, parameter))
                elif id(parameter) not in known:
                    raise RuntimeError(self._replaced(known[0], parameter))
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)

    def refuse(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if an optimizer holds parameters that never have a gradient."""
        for settings in optimizer.param_groups:
            ids = list(map(id, settings["params"]))
            if not self._computed_with.keys().isdisjoint(ids):
                name = next(self._computed_with[key] for key in ids if key in self._computed_with)
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() with {name} as modules compute with it, "
                    "whose gradient is on a main parameter, so no step would change it: the "
                    f"optimizer was made before {self._wrapper} and not given to it, or after a "
                    "forward without a backward, or the parameter was added to it afterwards. "
                    f"{self._remedy}"
                )

    def _new(self, root: nn.Module, parameter: nn.Parameter) -> str:
        name = next((n for n, p in root.named_parameters() if p is parameter), "a parameter")
        return (
            f"{name} was not there when {self._wrapper} was called, so no rank would sum its "
            f"gradient and ranks would diverge. Add parameters before {self._wrapper}, or freeze "
            "this one with requires_grad_(False)"
        )

    def _replaced(self, name: str, parameter: nn.Parameter | None) -> str:
        what = "was removed" if parameter is None else "is another parameter"
        return (
            f"{name} {what} since {self._wrapper} was called, and the buffers hold the one before. "
            "Write values into that one (`with torch.no_grad(): parameter.copy_(value)`), or "
            f"replace, tie and remove parameters before {self._wrapper}"
        )


def _refuse_in_steps(watch: ModuleWatch) -> None:
    """Let a model's watch look at every optimizer before its steps, as long as the model lives."""
    reference = weakref.ref(watch)

    def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
        # Torch runs the hook for optimizers of other models too, which may be compiled.
        if not torch.compiler.is_compiling() and (known := reference()) is not None:
            known.refuse(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(watch, handle.remove)


class ModuleBuffers:
    """Brings the buffers of one model together (collective).

    Ranks along ep hold different experts, so buffers of experts go over the axes `expert`, if the
    mesh has these. `ignored` are qualified names of buffers that each rank keeps.
    """

    def __init__(
        self,
        policy: BufferPolicy,
        dense: DataParallelAxes,
        expert: DataParallelAxes | None,
        ignored: Collection[str] = (),
    ) -> None:
        self._at_start = policy not in ("never", False)
        self.per_forward = policy in ("forward", True)
        """Whether forwards bring them together too."""
        self._axes = {False: dense, True: dense if expert is None else expert}
        self._has_experts = expert is not None
        self._ignored = frozenset(ignored)
        self._written = False
        """Whether the forward before this one was a forward of training, which writes buffers."""

    def start(self, root: nn.Module, modules: Iterable[nn.Module]) -> None:
        """The model is being wrapped.

        Own buffers of the modules, which are in the model or unit `root`, are sent.
        """
        if self._at_start:
            self._send(root, {id(module) for module in modules})

    def before_forward(self, root: nn.Module) -> None:
        """A forward of the model begins: one of training, or the first after it, as in torch."""
        if self.per_forward:
            if root.training or self._written:
                self._send(root, {id(module) for module in root.modules()})
            self._written = root.training

    def _send(self, root: nn.Module, chosen: set[int]) -> None:
        """Take the first rank's, with one collective for all of one device."""
        experts = set(_of_experts(root)) if self._has_experts else set()
        found: dict[tuple[bool, torch.device], list[torch.Tensor]] = {}
        for prefix, module in root.named_modules():
            for name, buffer in module._buffers.items() if id(module) in chosen else ():
                if buffer is None or not buffer.numel() or buffer.is_meta:
                    continue
                if f"{prefix}.{name}".removeprefix(".") not in self._ignored:
                    # `.data` leaves the version alone, as batch norm itself does: no backward
                    # reads statistics, and one of an earlier forward may be still to come.
                    written = buffer.data if isinstance(module, _STATISTICS) else buffer
                    found.setdefault((id(module) in experts, buffer.device), []).append(written)
        for (of_expert, _), buffers in found.items():
            _broadcast(buffers, self._axes[of_expert])


def _broadcast(buffers: list[torch.Tensor], axes: DataParallelAxes) -> None:
    # Bytes, because backends do not know all dtypes.
    sent = [b.detach().contiguous().reshape(-1).view(torch.uint8) for b in buffers]
    together = torch.cat(sent)
    for group in axes.groups("gather"):
        broadcast(together, group, src=0).wait()
    pieces = torch.split(together, [piece.numel() for piece in sent])
    with torch.no_grad():
        for buffer, piece in zip(buffers, pieces, strict=True):
            # A copy, because a piece may begin where its dtype may not.
            buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


def _of_experts(root: nn.Module) -> Iterator[int]:
    """`id`s of the modules at and below which all parameters, one at least, are experts'."""
    for module in root.modules():
        roles = [role_of(parameter).expert for parameter in module.parameters()]
        if roles and all(roles):
            yield from (id(below) for below in module.modules())
