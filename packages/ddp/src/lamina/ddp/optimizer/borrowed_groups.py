"""Other parameters in an optimizer's groups for the time of a step, and the end of that time.

Note [Steps that raise]
~~~~~~~~~~~~~~~~~~~~~~~
torch calls a step's post-hooks only where the step returns. A step that raised (memory ran out
while it made its state, say) leaves the borrowed parameters in the groups. So whatever comes next
puts the user's parameters back first: another step, `state_dict`, `load_state_dict` or `zero_grad`.
The optimizer has no hook for `zero_grad`, which would leave the user's gradients to be added to.
While its groups are borrowed, the optimizer object has a `zero_grad` of its own.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["BorrowedGroups", "closure_of"]

_ZERO_GRAD = "zero_grad"


class BorrowedGroups(ABC):
    """Hooks of an optimizer that put other parameters into its groups while it steps.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._held: list[list[nn.Parameter]] = []
        self._zero_grad: Any = None
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self.restore)
        optimizer.register_load_state_dict_pre_hook(lambda held, _: self.restore(held))

    def restore(self, optimizer: Optimizer) -> None:
        """Put the user's parameters back after a step that raised; do nothing after any other."""
        if self._held:
            self._put_back(optimizer, stepped=False)

    @abstractmethod
    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a step: `restore`, then `_borrow` and put other parameters into the groups.

        Args:
            optimizer: the user's.
            args: of the step; the first one is the optimizer again.
            kwargs: of the step.

        Returns:
            Other arguments for the step, or None for those given.
        """

    @abstractmethod
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a step that returned."""

    @abstractmethod
    def _put_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """`_release`, with the state that the step has left (not all of it, if it raised)."""

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


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that a step was given, which computes gradients inside the step; None for none.

    Args:
        args: of the step, the optimizer first.
        kwargs: of the step.
    """
    return kwargs.get("closure", args[1] if len(args) > 1 else None)
