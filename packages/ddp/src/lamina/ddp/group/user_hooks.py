"""The hooks that users register on parameters: called once, when a gradient is final.

Note [Hooks of users]
    torch calls a leaf's hooks with the gradient of one backward on one rank, before anything is
    summed. What a user wants to see, mask, or step with is the gradient that the optimizer reads.
    So the two dictionaries in which a tensor keeps its hooks are replaced by tables. Python code
    registers and removes hooks in a table as in any dictionary; torch's C code reads the memory of
    the dictionary itself, which stays empty, and calls nothing. The engine calls the hooks when the
    last reduction of their group is done, in the middle of the backward if it is done there. Both
    leaves of a parameter share them, and they are kept by the group: what they refer to (the model,
    its optimizers) never hangs on an autograd node that the engine holds. See docs/decisions/0412.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lamina.ddp.parameters.parameters import ParameterRef

__all__ = ["UserHooks"]


class UserHooks:
    """Hooks of the parameters of one group."""

    def __init__(self) -> None:
        self.on_gradient: dict[int, dict[int, Callable[[torch.Tensor], torch.Tensor | None]]] = {}
        """By parameter and by handle, those of `register_hook`."""
        self.on_parameter: dict[int, dict[int, Callable[[torch.Tensor], None]]] = {}
        """Those of `register_post_accumulate_grad_hook`."""

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self.on_gradient or self.on_parameter)

    def take(self, leaf: torch.Tensor, index: int) -> None:
        """Keep the hooks of a leaf of one parameter: those there are, and those to come."""
        for attribute, kind in (
            ("_backward_hooks", "on_gradient"),
            ("_post_accumulate_grad_hooks", "on_parameter"),
        ):
            table = _Table(self, kind, index)
            for handle, hook in (getattr(leaf, attribute) or {}).items():
                table[handle] = hook
            setattr(leaf, attribute, table)

    @torch.no_grad()
    def call(
        self, refs: Sequence[ParameterRef], mains: Sequence[nn.Parameter], called: set[int]
    ) -> None:
        """Call the hooks of parameters that show a final gradient, unless they have been called.

        `refs` name the parameters of the group. `called` are those whose hooks were called in this
        step; those of now are added.
        """
        for index in sorted({*self.on_gradient, *self.on_parameter} - called):
            main = mains[index]
            if (shown := main.grad) is None:
                continue
            called.add(index)
            gradient = shown
            for hook in list(self.on_gradient.get(index, {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is not shown:
                shown.copy_(gradient)
            for after in list(self.on_parameter.get(index, {}).values()):
                try:
                    after(main)
                except KeyError as error:
                    key = error.args[0] if error.args else None
                    if key is not main and not (isinstance(key, int) and key == id(main)):
                        raise
                    raise RuntimeError(
                        f"a hook of {refs[index].name} looked the parameter up in a table that "
                        "does not hold it: hooks get the parameter that the optimizer updates, "
                        "which model.parameters() gives after wrapping. Make tables of parameters, "
                        "and optimizers that step in backward, after wrapping"
                    ) from error


class _Table(OrderedDict[int, Any]):
    """Where `register_hook` and its handles find a leaf's hooks (see the Note)."""

    def __init__(self, hooks: UserHooks, kind: str, index: int) -> None:
        super().__init__()
        self._hooks = weakref.ref(hooks)
        self._kind = kind
        self._index = index

    def _kept(self) -> dict[int, dict[int, Any]]:
        hooks = self._hooks()
        return {} if hooks is None else getattr(hooks, self._kind)

    def __setitem__(self, handle: int, hook: Any) -> None:
        self._kept().setdefault(self._index, {})[handle] = hook

    def __contains__(self, handle: object) -> bool:
        return handle in self._kept().get(self._index, ())

    def __delitem__(self, handle: int) -> None:
        kept = self._kept()
        del kept[self._index][handle]
        if not kept[self._index]:
            del kept[self._index]
