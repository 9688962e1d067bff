"""A typed call of autograd functions."""

from typing import Any, cast

import torch
from torch import Tensor


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call `function.apply`, to which torch gives no types, of a function that returns a tensor."""
    return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]
