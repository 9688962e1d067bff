"""Tables of aten operations and what a ShardedTensor does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Handler", "HandlerTable"]

# (class, operation, positional arguments, keyword arguments), as __torch_dispatch__ is called.
Handler: TypeAlias = Callable[..., Any]


class HandlerTable(dict[torch._ops.OpOverload, Handler]):
    """Operation to handler; fill it with the `handles` decorator."""

    def handles(self, *overloads: torch._ops.OpOverload) -> Callable[[Handler], Handler]:
        """Register a function for some overloads."""

        def register(handler: Handler) -> Handler:
            self.update(dict.fromkeys(overloads, handler))
            return handler

        return register
