"""What a backward takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

import sys
from typing import Any

import torch
from torch import _foreach_copy_ as foreach_copy
from torch import _foreach_norm as foreach_norm
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _will_engine_execute_node as will_execute
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "COMMON_VIEW",
    "creation_meta",
    "current_graph_task_id",
    "foreach_copy",
    "foreach_norm",
    "function_transform",
    "graph_is_kept",
    "local_of_state_call",
    "queue_callback",
    "set_creation_meta",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "will_execute",
]

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called when the backward that runs now has ended."""

function_transform = torch._C._functorch.peek_interpreter_stack
"""The transform of `torch.func` (`vmap`, `grad`) that runs now; None if there is none."""

graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined, unused-ignore]
"""Whether the backward that runs now was asked to keep its graph."""

creation_meta = torch._C._autograd._get_creation_meta
set_creation_meta = torch._C._autograd._set_creation_meta
COMMON_VIEW = torch._C._autograd.CreationMeta.DEFAULT
"""How a view came to be, by which autograd decides who may write into it."""

_GENERIC = "torch.distributed.checkpoint.state_dict"
_DEPTH = 64
"""Frames to look at, outwards."""


def local_of_state_call(name: str, *, within: int = _DEPTH) -> Any:
    """Return a local variable of torch's generic state functions, which run now; None otherwise.

    Note [Options that torch keeps to itself]: `get_model_state_dict(options=)` and its like call
    `state_dict()` and then make tensors full themselves, of the classes that they know: `DTensor`,
    and torch's old `ShardedTensor`. Any other class passes through untouched. What they were given
    is in local variables of theirs: options in `info`, the model in `model`, optimizers in
    `optims`. Nothing else tells of it (decision 0540).

    The innermost function that has a variable of this name gives it. At most `within` callers of
    the caller stand before the first of these functions.
    """
    frame, inside = sys._getframe(2), False
    for number in range(_DEPTH):
        if frame.f_globals.get("__name__") == _GENERIC:
            inside = True
            if name in frame.f_locals:
                return frame.f_locals[name]
        if frame.f_back is None or (number == within and not inside):
            break
        frame = frame.f_back
    return None
