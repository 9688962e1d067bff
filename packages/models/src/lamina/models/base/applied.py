"""A typed call of autograd functions, and what their forwards may return."""

from typing import Any, cast

import torch
from torch import Tensor


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call `function.apply`, to which torch gives no types, of a function that returns a tensor."""
    return cast(Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]


# Note [Results that are another tensor]
# Where the last call of a forward gives back a tensor that it was given (`to` the dtype that it
# has, `contiguous`, an operator in place), a graph of torch 2.11 has zeros for all gradients,
# without a word. `tests/test_compat.py` reads all forwards for it.
def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A forward's result in a dtype. See Note [Results that are another tensor]."""
    return x if x.dtype == dtype else x.to(dtype)
