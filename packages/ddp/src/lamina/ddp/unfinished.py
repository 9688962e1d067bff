"""A warning where an optimizer steps, and submodules that end a step were not told of it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lamina.ddp.finalize import FinalizesStep

__all__ = ["warn_of_unfinished_steps"]


def warn_of_unfinished_steps(optimizer: Optimizer, module: nn.Module) -> None:
    """Warn, once, before a step that comes without `finalize_grads` to modules that need it.

    Those are submodules with a `finalize_step` whose attribute `needs_finalize` is true then: a
    router whose bias has not moved since tokens were counted, for one. An attribute `step_watched`
    is set to True, if there is one: the submodule need not look for steps itself.

    Args:
        optimizer: what steps; it gets a hook if there is such a submodule.
        module: the model.
    """
    watched = [
        (name, part) for name, part in module.named_modules() if isinstance(part, FinalizesStep)
    ]
    if not watched:
        return
    for _, part in watched:
        if hasattr(part, "step_watched"):  # it would look for steps itself
            part.step_watched = True

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [name for name, part in watched if getattr(part, "needs_finalize", False)]
        if names:
            watched.clear()
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            warnings.warn(
                f"the optimizer steps, and {shown} have work of their own at the end of a step (a "
                "router's bias, its counts for a global loss) that is left undone: call "
                "lamina.ddp.finalize_grads(model, mesh) after the last backward of every step",
                stacklevel=4,
            )

    optimizer.register_step_pre_hook(before)
