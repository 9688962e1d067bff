"""Other parameters in an optimizer's groups for the time of a step, and the end of that time.

Note [Steps that raise]
torch calls a step's post-hooks only where the step returns. A step that raised (memory ran out
while it made its state, say) leaves the borrowed parameters in the groups. So whatever comes next
puts the user's parameters back first: another step, `state_dict`, `load_state_dict` or `zero_grad`.
The optimizer has no hook for `zero_grad`, which would leave the user's gradients to be added to.
While its groups are borrowed, the optimizer object has a `zero_grad` of its own.

Note [Hooks of the user]
A user's pre-hook comes after ours, as it is registered later. It reads and changes the user's
parameters, and it may raise, after which nothing may have been stepped. So the groups are lent
within the step, when all pre-hooks are done: torch's optimizers call the closure first of all, and
are given one.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.facts import OptimizerAgreement

__all__ = ["BorrowedGroups"]

_ZERO_GRAD = "zero_grad"


class BorrowedGroups(ABC):
    """Hooks of an optimizer that put other parameters into its groups while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.paused = False
        """Steps are made for their state alone: gradients are read from `.grad`, nobody is told."""
        self._agreement = OptimizerAgreement(optimizer)
        self._trained: list[ParameterGroup] = []
        self._after_step: list[Callable[[], None]] = []
        self._held: list[list[nn.Parameter]] = []
        self._zero_grad: Any = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self.restore)
        optimizer.register_load_state_dict_pre_hook(lambda held, _: self.restore(held))

    def add(self, groups: Iterable[ParameterGroup], after_step: Callable[[], None]) -> None:
        """Step over these groups as well, and call `after_step` after each step."""
        given = list(groups)
        self._after_step.append(after_step)
        for group in given:
            group.look_for_writes()  # nobody was to tell of those before
            group.optimizers.append(self._agreement)
        self._trained += [group for group in given if group.requires_grad]

    def restore(self, optimizer: Optimizer) -> None:
        """Put the user's parameters back after a step that raised; do nothing after any other."""
        if self._held:
            self._take_back(optimizer, stepped=False)

    @abstractmethod
    def _lend(self, optimizer: Optimizer) -> None:
        """`_borrow`, and put other parameters into the groups; gradients are there."""

    @abstractmethod
    def _take_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """`_release`, with the state that the step has left (not all of it, if it raised)."""

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and not type(optimizer).__module__.startswith("torch.optim."):
            self._begin(optimizer)  # its step may take no closure
            return None

        def first() -> Any:
            # The closure computes the gradients, and may zero those there were: both concern the
            # user's parameters.
            self.restore(optimizer)
            loss = None if closure is None else closure()
            self._begin(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], first, *args[2:]), kwargs  # args[0] is the optimizer itself
        return args, {**kwargs, "closure": first}

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer) -> None:
        if self._held:  # somebody has wrapped the class's step, and torch calls hooks for both
            return
        if not self.paused:
            for group in self._trained:
                group.look_for_writes()
                group.shown.refuse_unsummed(f"{type(optimizer).__name__}.step()")
                if group.writes.addresses:
                    group.refuse_assigned()
        self._lend(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take_back(optimizer, stepped=True)
        if not self.paused:
            for group in self._trained:
                group.writes.forget()
            self._agreement.steps += 1
            for tell in self._after_step:
                tell()

    def _borrow(self, optimizer: Optimizer) -> None:
        """Remember the user's parameters; groups may hold others until `_release`."""
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        self._zero_grad = optimizer.__dict__.get(_ZERO_GRAD)
        reference = weakref.ref(optimizer)

        def zero_grad(*args: Any, **kwargs: Any) -> None:  # see Note [Steps that raise]
            if (held := reference()) is not None:
                self.restore(held)
                held.zero_grad(*args, **kwargs)

        optimizer.__dict__[_ZERO_GRAD] = zero_grad

    def _release(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Give the groups what they held, and return it."""
        held, self._held = self._held, []
        for settings, parameters in zip(optimizer.param_groups, held, strict=False):
            settings["params"] = parameters
        if held:
            optimizer.__dict__.pop(_ZERO_GRAD, None)
            if self._zero_grad is not None:
                optimizer.__dict__[_ZERO_GRAD] = self._zero_grad
        return held
